"""Eight families of chat templates, each with a small tokenizer that has the family's control
tokens. The templates are short, and do with texts what those of the families do: strip, test,
split, slice, join and write them as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()  # control tokens that are not called special
    bos: str = ""
    frequent: tuple[str, ...] = ()  # added tokens that are text
    is_sentencepiece: bool = False

    @property
    def controls(self) -> tuple[str, ...]:
        return (*self.special, *self.added)

    def write(self, folder: Path) -> Path:
        """A model directory, as far as the API needs one."""
        tokenizer = _sentencepiece(self.special) if self.is_sentencepiece else _byte_level()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.special])
        more = [AddedToken(text, normalized=False) for text in (*self.added, *self.frequent)]
        tokenizer.add_tokens(more)
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"bos_token": self.bos or None, "eos_token": self.special[-1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(special: tuple[str, ...]) -> Tokenizer:
    pieces = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


# Qwen 3's: reasoning is also taken out of an answer's text, and a user's text may be a result.
CHATML = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": ...}\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- set content = message.content %}{%- set reasoning = message.reasoning_content or '' %}
  {%- if not reasoning and '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {{- '<|im_start|>assistant\n' }}
  {%- if reasoning %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
  {{- content }}
  {%- for call in message.tool_calls or [] %}
    {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' or message.content.startswith('<tool_response>') %}
  {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
  {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}{%- endif %}"""

LLAMA = r"""{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson(indent=4)) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- for call in message.tool_calls %}
{{- '<|python_tag|>' + call.function.name + '.call(' }}
{%- for key, value in call.function.arguments | items %}{{- key + '="' + value + '"' }}{% endfor %}
{{- ')' }}{%- endfor %}{{- '<|eom_id|>' }}
{%- else %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Knows neither systems nor tools.
GEMMA = r"""{{ bos_token }}
{%- set ns = namespace(first='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set ns.first = ns.first + message.content + '\n\n' %}
{%- else %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
{{- ns.first ~ message.content | trim }}{{- '<end_of_turn>\n' }}{%- set ns.first = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

MISTRAL = r"""{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + ({'content': message.content, 'call_id': message.tool_call_id} | tojson) }}
{{- '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']</s>' }}
{%- else %}{{- message.content + '</s>' }}{%- endif %}
{%- endfor %}"""

# R1's: an answer's text begins after its reasoning, and the prompt begins the next one.
DEEPSEEK = r"""{{- bos_token }}
{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments }}{{- '\n```<｜tool▁calls▁end｜>' }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
{%- if tools %}{%- endif %}"""

# Writes tags around keys, and thinks if it is not told not to.
GLM = r"""[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}
{{- tool.function.name + ': ' + tool.function.description }}
{%- for key, value in tool.function.parameters.properties | items %}
{{- '\n<' ~ key ~ '>' ~ value | tojson ~ '</' ~ key ~ '>' }}
{%- endfor %}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\n<think>' + (message.reasoning_content or '').strip() + '</think>' }}
{%- if message.content.strip() %}{{- '\n' + message.content.strip() }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments | items %}
{{- '\n<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ value ~ '</arg_value>' }}
{%- endfor %}{{- '\n</tool_call>' }}{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '<|observation|>\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{%- endif %}
"""

KIMI = r"""
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' ~ tools | tojson ~ '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'system' if message.role == 'tool' else message.role %}
{{- '<|im_' ~ role ~ '|>' ~ (message.name or message.role) ~ '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' ~ message.tool_call_id ~ '\n' }}{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson ~ '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

HARMONY = r"""
{%- if tools %}{{- '<|start|>developer<|message|># Tools\n' }}
{%- for tool in tools %}
{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: {' }}
{%- for key, value in tool.function.parameters.properties | items %}
{{- '\n// ' + (value.description or '')[:200] + '\n' + key + ': ' + value.type }}{%- endfor %}
{{- '}) => any;' }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start|>functions.' + (message.tool_call_id or '') + ' to=assistant<|channel|>commentary' }}
{{- '<|message|>' + message.content | tojson + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json' }}
{{- '<|message|>' }}{{- call.function.arguments | tojson }}{{- '<|call|>' }}
{%- endfor %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

THINKS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def names(text: str, pattern: str = "{}") -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in text.split())


FAMILIES = (
    Family("chatml", CHATML, names("endoftext im_start im_end", "<|{}|>"), (*CALLS, *THINKS)),
    Family(
        "llama3",
        LLAMA,
        (
            *names("begin_of_text start_header_id end_header_id python_tag", "<|{}|>"),
            *names(" ".join(map(str, range(250))), "<|reserved_special_token_{}|>"),
            *names("eom_id eot_id", "<|{}|>"),
        ),
        bos="<|begin_of_text|>",
    ),
    Family(
        "gemma",
        GEMMA,
        names("<bos> <start_of_turn> <end_of_turn> <eos>"),
        bos="<bos>",
        frequent=("\n\n", "▁▁", "<table>", "<h1>"),
        is_sentencepiece=True,
    ),
    Family(
        "mistral",
        MISTRAL,
        names(
            "<s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
            " [/TOOL_RESULTS] [TOOL_CALLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] </s>"
        ),
        bos="<s>",
        is_sentencepiece=True,
    ),
    Family(
        "deepseek",
        DEEPSEEK,
        names("begin▁of▁sentence end▁of▁sentence", "<｜{}｜>"),
        (
            *names("User Assistant tool▁calls▁begin tool▁calls▁end tool▁sep", "<｜{}｜>"),
            *names("tool▁output▁begin tool▁output▁end", "<｜{}｜>"),
            *THINKS,
        ),
        bos="<｜begin▁of▁sentence｜>",
    ),
    Family(
        "glm",
        GLM,
        ("[gMASK]", "<sop>", *names("system user assistant observation endoftext", "<|{}|>")),
        (*names("<arg_key> </arg_key> <arg_value> </arg_value>"), *CALLS, *THINKS),
    ),
    Family(
        "kimi",
        KIMI,
        (
            "[BOS]",
            *names("im_system im_user im_assistant im_middle tool_calls_section_begin", "<|{}|>"),
            *names("tool_calls_section_end tool_call_begin tool_call_argument_begin", "<|{}|>"),
            *names("tool_call_end im_end", "<|{}|>"),
        ),
    ),
    Family(
        "harmony",
        HARMONY,
        names("start message channel constrain end call return", "<|{}|>"),
    ),
)
