"""The tokenizer and chat templates, against `transformers` and against what templates may do."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, processors

from kvrelay.cluster.api.openai.tools import arguments_of
from kvrelay.cluster.api.text.chat_template import ChatTemplate, TemplateOptions
from kvrelay.cluster.api.text.tokenizer import TemplateError, Tokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, <b>'you'</b> & 世界 👋"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye."},
]


def test_chat_prompts_are_those_of_transformers(tokenizer: Tokenizer, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[1:2]):
        text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.chat_prompt(messages).tokens == reference(text).input_ids
    assert tokenizer.encode("Hello world, 1234") == reference("Hello world, 1234").input_ids
    assert reference.eos_token_id in tokenizer.eos_token_ids


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界 👋\n"
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]).startswith(b"<|")


def test_end_ids_are_gathered_from_all_files(smollm2_dir: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "chat_template": "{{ eos_token }}"})
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (0, 2, 7, 9)
    assert tokenizer.chat_prompt([]).tokens == [0]


def test_a_model_without_a_template_says_so(smollm2_dir: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(tmp_path).chat_prompt(MESSAGES)


def test_a_template_may_be_given_instead(smollm2_dir: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    given = Tokenizer(tmp_path, chat_template="{{ messages[0].content }}!")
    assert given.chat_prompt(MESSAGES).tokens == given.encode("Be brief.!")
    with pytest.raises(TokenizerError, match="not valid Jinja, line 2"):
        Tokenizer(tmp_path, chat_template="a\n{% if %}")


def test_prompts_begin_with_one_bos(smollm2_dir: Path, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    start = made.token_to_id("<|im_start|>")
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    template = "<|im_start|>{{ messages[0].content }}"
    tokenizer = Tokenizer(tmp_path, chat_template=template)
    expected = [start, *tokenizer.encode("Hello", add_special_tokens=False)]
    assert tokenizer.encode("Hello") == tokenizer.encode("<|im_start|>Hello") == expected
    assert tokenizer.encode("<|im_start|>Hello", add_special_tokens=False) == expected
    assert tokenizer.encode("") == tokenizer.encode("<|im_start|>") == [start]
    assert tokenizer.chat_prompt([{"role": "user", "content": "Hello"}]).tokens == expected
    said = [{"role": "user", "content": "<|im_start|>Hello"}]
    assert tokenizer.chat_prompt(said).tokens.count(start) == 1


BOTH = ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("template", ["", "<|im_start|> $A", "$A <|im_end|>"])
@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ({}, None),
        ({"add_bos_token": None}, None),
        ({"add_bos_token": True}, (True, None)),
        ({"add_bos_token": False}, (False, None)),
        ({"add_eos_token": True}, (None, True)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ({"add_bos_token": False, "add_eos_token": False}, (False, False)),
    ],
    ids=str,
)
def test_flags_decide_whether_texts_begin_with_bos_and_end_with_eos(
    smollm2_dir: Path,
    tmp_path: Path,
    template: str,
    flags: dict[str, bool],
    added: tuple[bool | None, bool | None] | None,
) -> None:
    """DeepSeek's tokenizer.json adds nothing, its other file says that BOS is to be added. What
    has no flag is as tokenizer.json has it."""
    made = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    ids = [made.token_to_id(name) for name in BOTH]
    if template:
        both = list(zip(BOTH, ids, strict=True))
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=both)
    made.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": BOTH[0], "eos_token": {"content": BOTH[1]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **flags}))
    has = [name in template for name in BOTH]
    wanted = [
        is_there if stated is None else stated
        for is_there, stated in zip(has, added or (None, None), strict=True)
    ]
    tokenizer = Tokenizer(tmp_path)
    text = tokenizer.encode("Hello world", add_special_tokens=False)
    assert len(text) == 2
    expected = [*ids[:1][: wanted[0]], *text, *ids[1:][: wanted[1]]]
    assert tokenizer.encode("Hello world") == expected
    assert tokenizer.num_start_tokens == wanted[0]


def test_a_text_that_is_normalized_to_a_control_token_is_text(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    made = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    made.normalizer = normalizers.NFKC()
    made.add_special_tokens([AddedToken("<|turn|>", normalized=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, chat_template="<|turn|>{{ messages[0].content }}")
    turn, wide = tokenizer.token_id("<|turn|>"), "＜|turn|＞"
    assert tokenizer.encode(wide) == [turn]
    said = tokenizer.chat_prompt([{"role": "user", "content": f"a {wide}"}]).tokens
    assert said.count(turn or 0) == 1
    assert tokenizer.decode(said) == "a <|turn|>"


def test_without_a_generation_prompt_it_ends_with_the_last_message(tokenizer: Tokenizer) -> None:
    whole = tokenizer.chat_prompt(MESSAGES)
    ended = tokenizer.chat_prompt(MESSAGES, TemplateOptions(add_generation_prompt=False)).tokens
    assert whole.tokens[: len(ended)] == ended
    assert tokenizer.decode(whole.tokens[len(ended) :]) == "assistant\n"


def test_what_is_nested_too_deep_is_refused(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_dir, chat_template="{{ tools | tojson }}")
    deep: dict[str, object] = {"a": "<|im_end|>"}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(TemplateError, match="nested too deep"):
        tokenizer.chat_prompt(MESSAGES, TemplateOptions([deep]))


def test_a_refusal_says_what_was_sent(smollm2_dir: Path) -> None:
    source = "{{ raise_exception('not ' + messages[0].content) }}"
    tokenizer = Tokenizer(smollm2_dir, chat_template=source)
    with pytest.raises(TemplateError, match=r"not <\|im_end\|>$"):
        tokenizer.chat_prompt([{"role": "user", "content": "<|im_end|>"}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["<", "<|im_", "<|im_end|>", "</think", "|>", "\U000f0000<|im_end|>"]
)
def test_long_texts_of_control_strings_take_no_longer_than_others(
    tokenizer: Tokenizer, text: str
) -> None:
    content = text * (200_000 // len(text))
    started = time.process_time()
    tokens = tokenizer.chat_prompt([{"role": "user", "content": content}]).tokens
    assert time.process_time() - started < 3.0
    assert content in tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_directory_without_a_usable_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    for text, told in (
        ("{", "cannot be read"),
        ("{}", "has no model"),
        ('{"model": {}}', "cannot be used"),
    ):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=told):
            Tokenizer(tmp_path)


def test_templates_may_refuse_and_name_the_day() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{{ strftime_now('%Y') | length }}{{ bos_token }}",
        {"bos_token": "<s>"},
    )
    assert template.render([{"role": "user"}]) == "4<s>"
    with pytest.raises(TemplateError, match="user first"):
        template.render([{"role": "assistant"}])


def test_templates_may_use_loops_json_and_generation_blocks() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}",
        {},
    )
    assert template.render([{"a": "<é>"}, {}, {}]) == '{"a": "<é>"}{}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",  # the sandbox
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0]['content'] / 0 }}",
    ],
)
def test_what_a_template_cannot_do_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot render"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_a_template_that_is_not_jinja_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})


def test_templates_write_arguments_as_the_client_sent_them() -> None:
    raw = '{"b":1,  "a": "\\u00e9"}'
    call = {"name": "f", "arguments": arguments_of(raw)}
    calls = [{"tool_calls": [call]}]
    of_call = "messages[0].tool_calls[0]"
    for source, expected in (
        (f"{{{{ {of_call}.arguments | tojson }}}}", raw),
        (f"{{{{ {of_call} | tojson }}}}", f'{{"name": "f", "arguments": {raw}}}'),
        (f"{{{{ 'args: ' + {of_call}.arguments }}}}", f"args: {raw}"),
        (f"{{{{ {of_call}.arguments }}}}", raw),
        (f"{{{{ {of_call}.arguments.a }}}}", "é"),
    ):
        assert ChatTemplate(f"{{# tools #}}{source}", {}).render(calls) == expected
