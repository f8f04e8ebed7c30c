"""Chat templates of models that know tools and reason, and servers of such models.

Each is the small model's tokenizer with another template. A test scripts what the model says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.sampling.grammar import compile_grammar
from kvrelay.engine.model.sampling.vocabulary import read_vocabulary
from kvrelay.router.messages import Submit
from tests.cluster.api.conftest import Served, serve

# Tools, calls and reasoning as Qwen 3 has them. `enable_thinking`: not set, the model may begin to
# reason; true, the prompt begins; false, the prompt ends it at once.
THINKING = """\
{% if tools %}
<|im_start|>tools
{% for tool in tools %}
{{ tool.function | tojson }}
{% endfor %}
<|im_end|>
{% endif %}
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{ message.content }}{% for call in message.tool_calls or [] %}
{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
<|im_start|>assistant
{% if enable_thinking is defined %}
<think>
{% if not enable_thinking %}

</think>

{% endif %}
{% endif %}
"""

# Refuses calls whose ids it does not make itself.
MISTRAL = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for message in messages %}
{% if message.role == 'tool' %}
[TOOL_RESULTS]{{ {"content": message.content, "call_id": message.tool_call_id} | tojson }}
{% elif message.tool_calls %}
[TOOL_CALLS][
{% for call in message.tool_calls %}
{% if call.id | length != 9 %}
{{ raise_exception('an id of a call has nine characters') }}
{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }},
 "id": "{{ call.id }}"}
{% endfor %}
]
{% else %}
[{{ message.role }}]{{ message.content }}
{% endif %}
{% endfor %}
"""

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
ASK: list[Any] = [{"role": "user", "content": "Will it rain in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": WEATHER_SCHEMA,
    },
}
THOUGHT = "They ask about Oslo.\nI look it up."
SPOKEN = "I look it up."


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO = '{"city": "Oslo"}'
CALL = call_text("weather", OSLO)


def tokenizer_with(
    smollm2_dir: Path, folder: Path, template: str, tokenizer: tokenizers.Tokenizer | None = None
) -> Tokenizer:
    """The small model's (or another one), with another template; made in `folder`."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(smollm2_dir / name, folder)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@contextmanager
def serve_template(
    smollm2_dir: Path,
    folder: Path,
    template: str,
    tokenizer: tokenizers.Tokenizer | None = None,
    **settings: Any,
) -> Iterator[Served]:
    made = tokenizer_with(smollm2_dir, folder, template, tokenizer)
    usual = {"max_body_bytes": 64 * 1024, "max_live_requests": 64, "request_timeout_s": 20}
    with serve(made, ApiSettings(**usual | settings)) as running:
        yield running


@contextmanager
def as_new(server: Served) -> Iterator[Served]:
    """A server that other tests have used; its router is as new, and idle afterwards."""
    router = server.router
    kept = {name: getattr(router, name) for name in vars(router)}
    router.submits, router.cancels, router.commands = [], [], []
    yield server
    server.wait_idle()
    vars(router).update(kept)


def says(served: Served, *texts: str) -> None:
    """The model says the first of `texts`, to the next request the next, and ends each."""
    tokenizer, left = served.ctx.tokenizer, list(texts)

    def answer(_: Submit) -> list[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        return [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]

    served.router.answer = answer


def prompt(served: Served, index: int = -1) -> str:
    """Text of what was submitted, with special tokens."""
    data = map(served.ctx.tokenizer.token_bytes, served.router.submits[index].tokens)
    return b"".join(data).decode()


def allows(served: Served, text: str) -> bool:
    """Whether the grammar of the last request takes `text` as a whole answer."""
    tokenizer, grammar = served.ctx.tokenizer, served.router.submits[-1].sampling.grammar
    assert grammar
    matcher = compile_grammar(_vocabulary(tokenizer), grammar)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    return matcher.validate_tokens(tokens) == len(tokens)


@cache
def _vocabulary(tokenizer: Tokenizer) -> Any:
    return read_vocabulary(tokenizer.directory, tokenizer.eos_token_ids)


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events with names."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
