"""One model of the zoo as the server has it: the API's plans and their grammars, a worker's masks,
and what the API makes of the tokens. All are the product's own; only processes are left out."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.client import RequestStream, RouterClient
from kvrelay.cluster.api.constraints.compiler import _outcome
from kvrelay.cluster.api.constraints.grammar import Constraints, _Known
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.openai.formats import _Reader, message_of
from kvrelay.cluster.api.openai.generation import Choice
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import plan_chat
from kvrelay.cluster.api.openai.schema import ChatRequest
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.tenants import ANONYMOUS
from kvrelay.cluster.api.text.chat_template import TemplateOptions
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.model.sampling.grammar import Grammars
from kvrelay.engine.model.sampling.vocabulary import read_vocabulary
from kvrelay.engine.request import FinishReason
from kvrelay.engine.step import Sampled, ScheduledSeq
from kvrelay.router.explain import Explanations
from kvrelay.router.messages import Output
from tests.cluster.api.conftest import FakeOperations
from tests.cluster.api.zoo.texts import QUESTION, TOOLS

FILES = {
    path.name.removesuffix(".json.gz"): path
    for path in sorted((Path(__file__).parent / "models").glob("*.json.gz"))
}
NUM_PADDED = 64  # rows of logits that the tokenizer does not know
COMPILE_S = 20.0


class _InProcess(Constraints):
    """Compiles here, by what the compiler's process calls."""

    @cached_property
    def vocabulary(self) -> Any:
        return read_vocabulary(*self._source)

    async def _compiled(self, call: bytes) -> _Known:
        return _Known(*_outcome(self.vocabulary, pickle.loads(call)))


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        made = json.loads(gzip.decompress(FILES[name].read_bytes()))
        config = made["config"]
        ends = config.pop("ends")
        tokens = {each["content"]: each["id"] for each in made["tokenizer"]["added_tokens"]}
        files = {
            "tokenizer.json": made["tokenizer"],
            "tokenizer_config.json": config,
            "config.json": {"eos_token_id": [tokens[end] for end in ends]},
        }
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(made["template"], encoding="utf-8")
        self.name = name
        self.tokenizer = Tokenizer(folder)
        self.vocab_size = self.tokenizer.vocab_size + NUM_PADDED
        self.ctx = ApiContext(
            model_name=name,
            tokenizer=self.tokenizer,
            client=RouterClient("api-0", "router-0", lambda message: None),
            max_model_len=8192,
            operations=FakeOperations([True, {}], []),
            metrics=ApiMetrics(CollectorRegistry(), name),
            explanations=Explanations(1),
        )
        self.ctx.constraints = _InProcess(folder, self.tokenizer.eos_token_ids)
        self.grammars = Grammars(folder, self.tokenizer.eos_token_ids, self.vocab_size, 1)

    @property
    def thinks(self) -> bool:
        return self.ctx.dialect.thinks is not None or self.has_channels

    @property
    def has_channels(self) -> bool:
        return isinstance(self.ctx.dialect.tools, Harmony)

    def plan(self, **body: Any) -> Plan:
        """Plans a chat that asks a question; `body`: more of its request."""
        user = {"role": "user", "content": QUESTION}
        asked = {"model": self.name, "messages": [user], "tools": TOOLS, **body}
        request = ChatRequest.model_validate(asked)
        return asyncio.run(plan_chat(self.ctx, request, ANONYMOUS))

    def rendered(self, message: dict[str, Any], thinking: bool | None, thought: str) -> str:
        """What the model says, by its own template, where the next message is `message`. `thought`
        comes first where the prompt has the beginning of it."""
        template, user = self.tokenizer.chat_template, {"role": "user", "content": QUESTION}
        assert template is not None
        given = {} if thinking is None else {"enable_thinking": thinking}
        options = TemplateOptions(TOOLS, given)
        prompt = template.render([user], options)
        whole = template.render(
            [user, {"role": "assistant", **message}], replace(options, add_generation_prompt=False)
        )
        begun = prompt.removesuffix("<think>\n")
        num = next(
            (i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun)
        )
        assert num == len(begun), (begun[num:], whole[num:])
        if begun == prompt or whole.startswith(prompt):
            return whole.removeprefix(prompt)
        return f"{thought}\n</think>\n\n{whole[num:]}"

    def tokens(self, text: str) -> list[int]:
        """Returns those of an output, up to where it ends."""
        ends = self.tokenizer.eos_token_ids
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return [*tokens[:at], tokens[at] if at < len(tokens) else ends[0]]

    def told(self, plan: Plan, tokens: Sequence[int], *, at_once: bool = False) -> dict[str, Any]:
        """What a client is told of an output, streamed token by token or as a whole."""
        choice = Choice(self.ctx, plan.choices[0], plan)
        choice.stream = RequestStream("r", 10_000, asyncio.Event())
        assert plan.reading is not None
        reader = _Reader(plan.reading, "c", reasoning=True)
        parts = [tuple(tokens)] if at_once else [(token,) for token in tokens]
        deltas: list[dict[str, Any]] = []
        for i, part in enumerate(parts):
            finish = FinishReason.STOP if i + 1 == len(parts) else None
            deltas += reader.deltas(choice.absorb(Output("r", i, part, finish=finish)))
        return cast(dict[str, Any], message_of(deltas))


class Worker:
    """A worker that computes one output by the grammar of a plan."""

    _count = 0

    def __init__(self, model: Model, plan: Plan) -> None:
        Worker._count += 1
        self._name, self._grammars = f"r{Worker._count}", model.grammars
        choice = plan.choices[0]
        self._prompt, self.sampling = list(choice.tokens), choice.sampling
        self.output: list[int] = []
        self.forced: tuple[int, ...] = ()
        self._grammars.prepare(self.sampling.grammar).result(COMPILE_S)

    def _share(self) -> ScheduledSeq:
        context = [*self._prompt, *self.output]
        position = len(context) - 1
        more = (context, len(self._prompt))
        return ScheduledSeq(self._name, context[-1:], position, [], True, self.sampling, *more)

    def mask(self) -> np.ndarray:
        """Which tokens may come next, by id."""
        share = self._share()
        assert self._grammars.follow([share]) == {}
        words = self._grammars.masks([share])[0]
        return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)

    def take(self, token: int) -> None:
        """`mask` was called before. AssertionError: the worker would end the request."""
        share = self._share()
        (sampled,), failed = self._grammars.advance([share], [Sampled(token)])
        assert failed == {}, (failed, self.output[-8:], token)
        assert sampled is not None
        self.output.append(token)
        self.forced = sampled.forced


def follows(model: Model, plan: Plan, tokens: Sequence[int]) -> str:
    """Why a worker would not let `tokens` through; empty: it would."""
    worker = Worker(model, plan)
    for i, token in enumerate(tokens):
        name = model.tokenizer.token_str
        said = [name(each) for each in tokens[max(0, i - 4) : i]]
        if not worker.mask()[token]:
            return f"{name(token)!r} may not come after {said}"
        if worker.forced and token != worker.forced[0]:
            return f"{[*map(name, worker.forced)]} has to come after {said}, not {name(token)!r}"
        worker.take(token)
    return ""
