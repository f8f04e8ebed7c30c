"""What the API is given by whoever composes the system, and what it shares between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kvrelay.cluster.api.access import AccessLog
from kvrelay.cluster.api.adapters import AdapterBase, Adapters, Registered
from kvrelay.cluster.api.batches.store import BatchStore
from kvrelay.cluster.api.calls import Calls
from kvrelay.cluster.api.client import RouterClient
from kvrelay.cluster.api.console.sessions import ConsoleSessions
from kvrelay.cluster.api.errors import overloaded, unknown_model
from kvrelay.cluster.api.keys.keys import Keys
from kvrelay.cluster.api.limiter import (
    ByteBudget,
    ConcurrencyLimiter,
    LimitReached,
    RateLimits,
    Turns,
)
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.api.responses.threads import StoreThreads
from kvrelay.cluster.api.tenants import Tenant, Tenants
from kvrelay.cluster.api.text.tokenizer import PublicPrompts, Tokenizer
from kvrelay.cluster.api.tracing import Tracing
from kvrelay.cluster.config import ApiSection, names_of
from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.kv.tier import DEFAULT_RETENTION
from kvrelay.engine.logs import LogSection
from kvrelay.router.admission.admission import IncomingCall
from kvrelay.router.explain import Explanations
from kvrelay.router.messages import Failed

if TYPE_CHECKING:
    from kvrelay.cluster.api.batches.shared import SharedBatchStore
    from kvrelay.cluster.api.constraints.grammar import Constraints
    from kvrelay.cluster.api.openai.logprobs import TokenNames
    from kvrelay.cluster.api.operator import Operations
    from kvrelay.cluster.api.output.dialect import Dialect
    from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
    from kvrelay.engine.needs import Need

    AnyBatchStore = BatchStore | SharedBatchStore

P = ParamSpec("P")
T = TypeVar("T")

_NUM_BODIES = 8  # as large as they may be, that may be there at once
_LARGE = 128 * 1024  # characters; about 0.1 s to tokenise
_LARGE_AT_ONCE = 2  # threads; of one caller one
_MAX_LARGE = 32  # that wait, for one caller


class ApiSettings(ApiSection, frozen=True):
    """The section [api], and limits that no file sets."""

    body_timeout_s: float = 30.0  # to receive a body
    tokenizer_threads: int = 2
    max_session_commands: int = 256  # that wait for their replies, beyond it 429
    session_timeout_s: float = 12.0  # the router answers earlier, unless it is not there


class Threads:
    """For what would block the event loop. What is large has threads of its own, where callers take
    turns, so that it holds up only its like."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._small = ThreadPoolExecutor(num_threads, name)
        self._large = ThreadPoolExecutor(_LARGE_AT_ONCE, f"{name}-large")
        self._turns = Turns(_LARGE_AT_ONCE, _MAX_LARGE)

    async def run(self, size: int, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """`size`, in characters or bytes, says how much work it is. Raises ApiError (429)."""
        run = asyncio.get_running_loop().run_in_executor
        if size <= _LARGE:
            return await run(self._small, lambda: call(*args, **kw))
        try:
            async with self._turns.turn():
                return await run(self._large, lambda: call(*args, **kw))
        except LimitReached as reached:
            message = f"{_MAX_LARGE} large requests of this caller wait, which is the limit"
            raise overloaded(message, reached.retry_after_s) from None

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class ApiContext:
    """One model behind one router, and with it those that are served beside it, which share all but
    what follows from the model. Owned by the process that serves them.

    Invariant: `models` is one for all of them, and has each by its name and its aliases.

    `status()`: see `cluster.status`; `healthy()` says whether requests can be served,
    and why not. Both are called in the event loop and must not block.
    """

    model_name: str
    tokenizer: Tokenizer
    client: RouterClient
    max_model_len: int  # tokens, prompt and output together
    operations: Operations
    metrics: ApiMetrics
    explanations: Explanations  # those of the router behind `client`
    settings: ApiSettings = field(default_factory=ApiSettings)
    name: str = ""  # which the model has in [[models]]
    reads_images: bool = False  # in messages
    quest_mark: bytes = b""  # for salts of who asks for Quest; b"": nobody may
    # What a prompt with images is to the model; may raise ImageError. None: a worker is asked.
    expand: Callable[[Images], Expanded] | None = None
    # Why the router would refuse a call, by a cheap check; None: it has to be tried.
    refuse_early: Callable[[IncomingCall], Failed | None] = lambda call: None
    tenants: Tenants = field(default_factory=Tenants)
    public_prompts: PublicPrompts = field(default_factory=PublicPrompts)
    retention_s: float = DEFAULT_RETENTION.keep_s  # for KV, where a request does not say
    aliases: tuple[str, ...] = ()  # other names that clients may use for the model
    allowed: tuple[str, ...] = ()  # names of the tenants that may use it; empty: all may
    adapters: Adapters = field(default_factory=Adapters)  # all models' have one
    adapter_base: AdapterBase = field(default_factory=AdapterBase)
    vllm_parsers: VllmParsers | None = None  # where ours are not to read its outputs
    tracing: Tracing | None = None
    cluster: str = ""  # its name, where several servers share it; a label of all metrics
    rates: RateLimits = field(default_factory=RateLimits)
    keys: Keys = field(default_factory=Keys)
    log: LogSection = field(default_factory=LogSection)
    access: AccessLog = field(init=False)
    dialect: Dialect = field(init=False)
    token_names: TokenNames = field(init=False)
    constraints: Constraints = field(init=False)
    console_sessions: ConsoleSessions = field(init=False)
    responses: ResponseStore = field(default_factory=ResponseStore)
    batches: AnyBatchStore = field(default_factory=BatchStore)
    models: dict[str, ApiContext] = field(init=False, repr=False)
    calls: Calls = field(init=False)
    live: ConcurrencyLimiter = field(init=False)  # HTTP requests that generate
    commands: ConcurrencyLimiter = field(init=False)  # about sessions
    bodies: ByteBudget = field(init=False)  # and messages; only large ones count
    remembered: ByteBudget = field(init=False)  # what WebSockets go on from
    _parsing: Threads = field(init=False, repr=False)  # one for all models
    _tokenizing: Threads = field(init=False, repr=False)
    store: StoreThreads = field(init=False, repr=False)  # those in which `responses` is called

    def __post_init__(self) -> None:
        trace = None if self.tracing is None else self.tracing.record
        self.calls = Calls(self.model_name, self.explanations, self.metrics, trace)
        self.commands = ConcurrencyLimiter(
            self.settings.max_session_commands, what="session commands are waiting"
        )
        self.rates.follow(self.keys)
        self.console_sessions = ConsoleSessions(self.settings.operations_key)
        self.bodies = ByteBudget(_NUM_BODIES * self.settings.max_body_bytes)
        self.remembered = ByteBudget(_NUM_BODIES * self.settings.max_body_bytes)
        self._parsing = Threads("json", self.settings.tokenizer_threads)
        self.store = StoreThreads()
        self.models = {}
        self._use_model()

    def beside(self, **own: Any) -> ApiContext:
        """Another model. `own`: the fields that follow from it."""
        other = copy(self)
        for name, value in own.items():
            setattr(other, name, value)
        other.calls = self.calls.beside(other.model_name, other.explanations)
        other.metrics = self.metrics.of(other.model_name)
        other._use_model()
        return other

    def offer(self, names: Collection[str]) -> None:
        """These models from now on, of those that there are, in this order."""
        all_of = {each.model_name: each for each in self.all}
        for each in (each for name, each in all_of.items() if name not in names):
            each.end_processes()
        there = [all_of[name] for name in names if name in all_of]
        found = {alias: each for each in there for alias in (each.model_name, *each.aliases)}
        self.models.clear()
        self.models |= found

    def _use_model(self) -> None:
        """Make what follows from the model."""
        self.models |= dict.fromkeys((self.model_name, *self.aliases), self)
        self._tokenizing = Threads("tokenizer", self.settings.tokenizer_threads)
        self.access = AccessLog(self.log, self.tokenizer.decode)
        self.live = ConcurrencyLimiter(
            self.settings.max_live_requests, what="requests are being served"
        )
        from kvrelay.cluster.api.constraints.grammar import Constraints
        from kvrelay.cluster.api.openai.logprobs import TokenNames
        from kvrelay.cluster.api.output.dialect import Dialect

        self.token_names = TokenNames(self.tokenizer)
        template = self.tokenizer.chat_template
        source = template.source if template else ""
        outside = self.settings.vllm_parsers if self.vllm_parsers else ("", "")
        self.dialect = Dialect.of(source, *self.settings.own_parsers, outside=outside)
        self.constraints = Constraints(self.tokenizer.directory, self.tokenizer.eos_token_ids)

    @property
    def all(self) -> tuple[ApiContext, ...]:
        """Those of all models, the first one's first."""
        return tuple({each.model_name: each for each in self.models.values()}.values())

    def names_for(self, tenant: Tenant) -> dict[str, tuple[ApiContext, Registered | None]]:
        """What `tenant` may call models, and what each name stands for: a model, or what has been
        registered for it."""
        own = {name: (each, None) for name, each in self.models.items() if each.is_for(tenant)}
        return {**own, **self.adapters_for(tenant)}

    def is_for(self, tenant: Tenant, adapter: Registered | None = None) -> bool:
        """Whether `tenant` may use this model, or an adapter of it."""
        allowed = adapter.tenants if adapter is not None and adapter.tenants else self.allowed
        return not allowed or tenant.name in allowed

    def adapters_for(self, tenant: Tenant) -> dict[str, tuple[ApiContext, Registered]]:
        """Adapters that `tenant` may use, of all models that are offered."""
        return {
            name: (each, adapter)
            for each in self.all
            for name, adapter in each.adapters.of_model(each.model_name).items()
            if name not in self.models and each.is_for(tenant, adapter)
        }

    def who_has(self, name: str) -> str:
        """Whose name that is, other than an adapter's, in words; "": nobody's."""
        own = dict(names_of((each.model_name, each.aliases) for each in self.all))
        return own.get(name, "") or self.operations.reserved().get(name, "")

    def chosen(self, name: str | None, tenant: Tenant) -> ApiContext:
        """The model that a call names, itself or by an adapter of it; if it names none, the first.
        Raises ApiError (404)."""
        found, adapter = self.models.get(name or ""), None
        if not name:
            found = next((each for each in self.all if each.is_for(tenant)), None)
        elif found is None and (adapter := self.adapters.find(name)) is not None:
            found = self.models.get(adapter.model)
            if found is not None and found.model_name != adapter.model:
                found = None  # that is an alias of another model now
        if found is not None and not found.is_for(tenant, adapter):
            found = None
        if found is None:
            raise unknown_model(name or "", self.names_for(tenant))
        return found

    def need_of(self, name: str | None) -> Need | None:
        """What this model has to be computed with, where a call names that; None: it names the
        model itself. Raises ApiError (404)."""
        if not name or self.models.get(name) is self:
            return None
        found = self.adapters.find(name)
        if found is None or found.model != self.model_name:  # it was removed meanwhile
            raise unknown_model(name, [self.model_name])
        return found.adapter

    def shown_model(self, asked: str) -> str:
        """What an answer to a request calls its model: an adapter by its name."""
        return self.model_name if asked in ("", *self.aliases) else asked

    @property
    def system_fingerprint(self) -> str:
        return "fp_" + blake2b(self.model_name.encode(), digest_size=5).hexdigest()

    async def in_thread(self, size: int, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Run what makes tokens or text and would block the event loop, as `Threads.run` does, in
        threads of this model."""
        return await self._tokenizing.run(size, call, *args, **kw)

    async def in_json_thread(
        self, size: int, call: Callable[P, T], *args: P.args, **kw: P.kwargs
    ) -> T:
        """Run what reads or writes JSON, likewise: in threads that tokenise nothing, so that a body
        waits for no model's tokenizer before it is known which one it is for."""
        return await self._parsing.run(size, call, *args, **kw)

    def close(self) -> None:
        for each in self.all:
            each.end_processes()
        self.store.close()
        self.responses.close()
        self.batches.close()
        for each in (self, *self.all):  # it may be of a model that was removed
            each.end_threads()
        self._parsing.close()

    def warm_up(self) -> None:
        """Start the processes that take a while to be ready."""
        self.constraints.warm_up()
        if self.vllm_parsers is not None:
            self.vllm_parsers.warm_up()

    def end_processes(self) -> None:
        """A request that is left has them started again."""
        self.constraints.close()
        if self.vllm_parsers is not None:
            self.vllm_parsers.close()

    def end_threads(self) -> None:
        """Nothing of this model is tokenised any more."""
        self._tokenizing.close()
