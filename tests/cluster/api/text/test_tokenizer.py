"""The tokenizer and chat templates, against `transformers` and against what templates may do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster.api.openai.tools import arguments_of
from cluster.api.text.chat_template import ChatTemplate
from cluster.api.text.tokenizer import TemplateError, Tokenizer, TokenizerError

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
        assert tokenizer.apply_chat_template(messages) == reference(text).input_ids
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
    assert tokenizer.apply_chat_template([]) == [0]


def test_a_model_without_a_template_says_so(smollm2_dir: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_a_directory_without_a_usable_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be used"):
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
