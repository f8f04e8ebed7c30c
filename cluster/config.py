"""Configuration: one TOML file, then the command line, become frozen structs. What the command
line gives wins; environment variables count where neither says.

Every setting has a default, a type and a range. What is unknown or out of range is an error that
names the key, its value and what would be right; nothing is ignored. A setting's comment is its
text in `kvrelay.example.toml`, which `make example` writes from this file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, ValidationError, convert, field
from msgspec.structs import asdict, fields, replace

from kvrelay.cluster import parser_names
from kvrelay.cluster.config_checks import name_table, no_scaling, not_of_vllm, python_with_vllm
from kvrelay.cluster.events.section import EventsSection
from kvrelay.cluster.parser_names import REASONING, REASONING_OF_VLLM, TOOLS, TOOLS_OF_VLLM
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.kv.scope import KVKind
from kvrelay.engine.logs import LogSection
from kvrelay.engine.settings import ConfigError as ConfigError
from kvrelay.engine.settings import (
    Count,
    FixedFloat,
    FixedInt,
    Positive,
    Seconds,
    Section,
    Timeout,
    check_settings,
    explain_error,
    matching,
    state_folder,
)
from kvrelay.engine.settings import read_toml as read_toml
from kvrelay.engine.stats import Role
from kvrelay.engine.support import Capability, Trait, no_to, refusal_of
from kvrelay.router.config import MAX_PRIORITY, RouterConfig
from kvrelay.router.scaling_config import ScalingConfig

OWN_SECTIONS = ("model", "engine", "router", "scaling", "api")  # that a model may have
Secrets = Annotated[tuple[str, ...], Meta(extra={"secret": True})]


class SessionsSection(Section, frozen=True):
    """Conversations that clients name by prompt_cache_key."""

    park_after_s: Seconds = 30.0  # KV without a turn is also below the device after this; 0: never
    max_sessions: Positive = 10_000  # beyond it the least recently used is forgotten
    max_per_tenant: Positive = 2_000
    max_tokens: Positive = 64_000_000  # of all sessions; each takes 4 bytes of memory and of disk
    order_timeout_s: FixedFloat = 10.0  # workers have this long to park, resume, pin or drop
    durable: bool = True  # they outlive the server, in the state directory
    state_dir: str = ""  # "": kvrelay in the user's state directory

    @property
    def state_path(self) -> Path:
        """The directory for what has to be there again after a restart, and is not KV."""
        return state_folder(self.state_dir)


class TenantsSection(Section, frozen=True):
    """Without a [[tenant]] there are no keys, and all clients share KV."""

    file: str = ""  # a TOML file with more [[tenant]]s; only the server has to read it
    # keeps tenants' KV apart; "": made once, in the state directory
    salt_secret: Annotated[str, matching("|.{16,}", "at least 16 characters", secret=True)] = ""
    public_prompts: tuple[str, ...] = ()  # system prompts whose KV all tenants may share
    public_prompt_files: tuple[str, ...] = ()  # files with one each


class TenantEntry(Section, frozen=True):
    """Whoever presents one of its keys."""

    name: Annotated[str, matching(r"\S(.{0,126}\S)?", "a name of 1 to 128 characters")]
    keys: Secrets = ()  # Authorization: Bearer KEY
    key_hashes: Secrets = ()  # or the SHA-256 of a key: printf %s "$KEY" | sha256sum
    # its share of the service, where tenants compete
    weight: Annotated[float, Meta(ge=0.01, le=1000.0)] = 1.0
    max_concurrent: Count = 0  # requests that run at once; 0: any number
    max_queued: Count = 0  # requests that wait; 0: any number
    requests_per_minute: Count = 0  # of each router; 0: any number
    tokens_per_minute: Count = 0  # of prompts and answers, of each router; 0: any number
    max_sessions: Count = 0  # that are kept; 0: sessions.max_per_tenant
    max_session_tokens: Count = 0  # of all its sessions; 0: any number
    max_pinned_tokens: Count = 0  # of its pinned sessions; 0: any number
    # what its KV may be, where a request does not say: exact; approximate, which is kept in four
    # bits a number below device memory; or quest, whose outputs read a part of their context
    kv: KVKind = "exact"
    # requests that do not say: batch, flex, default or priority, as far as min_priority lets them
    service_tier: Literal["batch", "flex", "default", "priority"] = "default"
    # its requests cannot ask for a lower number, which goes first
    min_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


class AdapterEntry(Section, frozen=True):
    """A LoRA adapter, which clients name as the model of a request."""

    name: Annotated[str, matching(r"[^\s/]\S{0,254}", "a name of 1 to 255 characters, no spaces")]
    path: Annotated[str, Meta(min_length=1)]  # a folder that PEFT has written, or a hub id
    # in [[models]], that it was made for; "": the only one, or that which the adapter's own
    # base_model_name_or_path names
    model: str = ""
    tenants: tuple[str, ...] = ()  # who may use it; empty: whoever may use the model


ParserName = Annotated[str, matching("[A-Za-z0-9_.-]{1,64}", "the name of a parser")]
_KEY = "16 characters or more"
Key = Annotated[str, matching("|[!-~]{16,}", _KEY, secret=True)]


class ApiSection(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # 0: any that is free
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 8 << 20  # of a request
    max_header_bytes: FixedInt = 64 << 10  # of a request
    # open at once, of each router, and at most half of the files that it may open (ulimit -n)
    max_connections: Positive = 8192
    # from which images of messages are fetched, with spaces between; "": they come in the request
    image_hosts: str = ""
    max_live_requests: Positive = 4096  # requests that generate at once; beyond it 429
    request_timeout_s: Timeout = 600.0  # from the arrival of a request to its last token
    max_file_bytes: Annotated[int, Meta(ge=1024)] = 200 << 20  # a file for batches may have so many
    max_tenant_file_bytes: Annotated[int, Meta(ge=1024)] = 4 << 30  # all files of a tenant together
    max_batch_rows: FixedInt = 50_000  # requests that a batch may have
    max_batch_rows_at_once: FixedInt = 64  # that run of a tenant at a model, in each router
    # no stream is silent for longer: it sends comments, before its first token too; 0: it may be
    keepalive_s: Annotated[float, Meta(ge=0, le=3600)] = 15.0
    # for everybody who calls, where there is no [[tenant]], or several with spaces between; "":
    # KVRELAY_API_KEY, or else none at a loopback address; at others one is made, in the state
    # directory
    key: Annotated[str, matching("|[!-~]{16,}( [!-~]{16,})*", f"{_KEY} for each", secret=True)] = ""
    insecure: bool = False  # no key is made: whoever reaches the address uses the server
    # of /status, /metrics, /audit and /workers; "": KVRELAY_OPERATIONS_KEY, or else one is made, in
    # operations.key of the state directory, where commands of the server's user find it
    operations_key: Key = ""
    # by which clients without keys may call the server, besides localhost, its host's name and its
    # addresses, as "llm.example gpu-box"
    names: Annotated[str, matching(r"[^,/:]*", "names with spaces between them")] = ""
    # pages from where may call, in a browser: "*", or "https://A https://B"; "": none
    cors_origins: Annotated[str, matching(r"[^,]*", "* or origins with spaces between them")] = ""
    # in which agents name their conversation, a session: "auto" knows Claude Code, OpenCode and
    # Codex, and Qwen Code, which sends no name; "": none; or names of headers, of which the first
    # that is there counts
    session_headers: Annotated[
        str,
        matching("[A-Za-z0-9-]*( [A-Za-z0-9-]+)*", "auto, or names of headers with spaces between"),
    ] = "auto"
    # how the model writes tool calls: "auto" goes by its chat template, "none" leaves them in the
    # text; or hermes, qwen3_coder, llama3_json, pythonic, mistral, deepseek, glm, kimi, minimax,
    # harmony, seed_oss, llama4_json, gemma4; where vLLM runs, any that it has
    tool_parser: ParserName = "auto"
    # "think" takes <think> tags out of the text, "mistral" [THINK], "seed_oss" <seed:think>,
    # "gemma4" <|channel>; "none" leaves them; "auto" goes by the template; or as vLLM has it
    reasoning_parser: ParserName = "auto"
    # false: a special token that is written in a message, a tool or its result is text, as with
    # split_special_tokens of transformers; true: whoever writes <|im_end|> ends the turn
    parse_special_tokens_in_messages: bool = False

    @property
    def own_parsers(self) -> tuple[str, str]:
        """Ours, of tool calls and of reasoning; "": vLLM's is to read them."""
        tool = parser_names.own(self.tool_parser, TOOLS, TOOLS_OF_VLLM)
        return tool, parser_names.own(self.reasoning_parser, REASONING, REASONING_OF_VLLM)

    @property
    def vllm_parsers(self) -> tuple[str, str]:
        """Likewise, vLLM's; "": ours is to read them."""
        tool, reasoning = self.own_parsers
        return "" if tool else self.tool_parser, "" if reasoning else self.reasoning_parser


class TlsSection(Section, frozen=True):
    """TLS, with certificates of your own or made at launch: docs/links.md."""

    api: bool = False  # HTTPS instead of HTTP
    frames: bool = False  # between processes: requests, tokens and KV events; not KV blocks
    # of this server, a PEM file with its chain; "": one is made, in the state directory
    cert: str = ""
    key: str = ""  # of the certificate, a PEM file without a password
    ca: str = ""  # a PEM file with the CA that processes ask each other's certificates to be of

    @property
    def is_on(self) -> bool:
        return self.api or self.frames

    @property
    def scheme(self) -> str:
        """Of the API's URL."""
        return "https" if self.api else "http"


_REDIS = matching(
    r"|(redis|rediss)://[^\s/]+\S*|unix://\S+",
    "redis://HOST:PORT, rediss://HOST:PORT or unix://PATH",
    secret=True,
)


class StateSection(Section, frozen=True):
    """What several routers share, and what outlives them: docs/routers.md."""

    # of Redis or Valkey: "redis://HOST:6379", "rediss://..." or "unix://PATH"; "":
    # KVRELAY_REDIS_URL, or else memory, and a file for sessions
    url: Annotated[str, _REDIS] = ""
    # of all keys; give each cluster that uses one Redis its own
    key_prefix: Annotated[str, matching(r"[\w.-]{1,64}", "letters, digits, . _ or -")] = "kvrelay"
    # between two looks at which workers' blocks have to be written
    index_interval_s: FixedFloat = 5.0
    # of each command; beyond it the routers go on from memory
    timeout_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 2.0
    # its memory for files and results of batches, where servers have one cluster.name: a quarter of
    # what it may have (maxmemory), if that is less; beyond it files are refused, and rows wait
    max_batch_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    # another Redis for files and batches of such servers, of which they may have half: then what
    # fills it takes nothing from sessions and the lease; "": KVRELAY_BATCHES_REDIS_URL, or else url
    batches_url: Annotated[str, _REDIS] = ""


class ClusterSection(Section, frozen=True):
    # servers with one name, one token and one state.url are one cluster: their routers share its
    # workers, and one of them leads: docs/high-availability.md; "": this server is a cluster alone
    name: Annotated[str, matching(r"|[\w.-]{1,64}", "letters, digits, . _ or -")] = ""
    # the secret of its processes; "": KVRELAY_CLUSTER_TOKEN, or, without a name, one is made
    token: Key = ""
    # where the leader is not heard for so long, another server leads
    lease_s: Annotated[float, Meta(ge=1.0, le=600.0)] = 5.0
    prefill: Annotated[int, Meta(ge=0, le=10_000)] = 1  # prefill workers; 0: decode workers do both
    decode: Annotated[int, Meta(ge=1, le=10_000)] = 1  # decode workers
    # of workers that are started for prefill, whatever their role is later; 0: as in [engine]
    prefill_tensor_parallel_size: Annotated[int, Meta(ge=0, le=64)] = 0
    decode_tensor_parallel_size: Annotated[int, Meta(ge=0, le=64)] = 0  # the same, for decode
    # of one worker: one that has more is divided evenly among machines; 0: none is. The ranks of a
    # worker meet twice in each layer, so only over a network that is made for it
    ranks_per_machine: Annotated[int, Meta(ge=0, le=64)] = 0
    # each with an API of its own, at api.port and the ports after it
    routers: Annotated[int, Meta(ge=1, le=64)] = 1
    # of a running Ray cluster: "auto" or "HOST:PORT"; "": start one
    address: Annotated[str, matching(r"|auto|.+:\d{1,5}", "auto or HOST:PORT")] = ""
    # of Ray's dashboard, at 127.0.0.1, where Ray is started here (an extra: dashboard); 0: none
    ray_dashboard_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    # join a Ray cluster that asks for no token: whoever reaches it runs code on its machines
    insecure_ray: bool = False
    # a worker that takes longer to start is started again
    start_timeout_s: Annotated[float, Meta(ge=1.0)] = 180.0
    # fork workers from a process that each machine keeps for it, which has torch loaded; false:
    # each worker imports torch, and starts seconds later
    fork_server: bool = True
    # a broken connection between processes may take so long to come back; then the peer is lost
    reconnect_s: Timeout = 10.0
    # a worker that routers find silent (router.silent_after_s), and that does not answer for this
    # long, is killed and started again
    silent_grace_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 5.0
    max_frame_mib: FixedInt = 64  # the largest message between processes
    # workers live so long without a controller: a server that is started again within this time, at
    # the same port, finds them with their weights and KV
    orphan_s: Annotated[float, Meta(ge=10.0, le=86_400.0)] = 120.0
    # requests that are served when the server is told to stop have so long to finish
    drain_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 30.0
    # what becomes of workers when the server is told to stop, by SIGTERM or SIGINT: with
    # "keep-workers" the next one, started within orphan_s, finds them; `kvrelay drain` ends them
    on_stop: Literal["end-workers", "keep-workers"] = "end-workers"


_OTLP = matching(r"|https?://[^\s/]+\S*", "http://HOST:PORT of an OTLP/HTTP collector")


class TracingSection(Section, frozen=True):
    """A trace of each request, with a span for each of its phases."""

    # of an OpenTelemetry collector, OTLP over HTTP: "http://HOST:4318"; "": no traces
    endpoint: Annotated[str, _OTLP] = ""
    # fraction of requests; those with a traceparent follow their caller
    sample: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0


Table = dict[str, Any]


class ModelEntry(Section, frozen=True):
    """One of several models behind one endpoint, the first for calls that name none."""

    # what clients call it, and what its workers are named after
    name: Annotated[str, matching(r"[\w.-]{1,64}", "letters, digits, . _ or -")]
    checkpoint: str  # as model.name
    aliases: tuple[str, ...] = ()  # other names that clients may use
    tenants: tuple[str, ...] = ()  # names of the tenants that may use it; empty: all
    prefill: Annotated[int, Meta(ge=0, le=10_000)] = 1  # as in [cluster], of this model
    decode: Annotated[int, Meta(ge=1, le=10_000)] = 1
    # its own settings, in place of those in [model], [engine], [router], [scaling] and [api]
    model: Table = field(default_factory=dict)
    engine: Table = field(default_factory=dict)
    router: Table = field(default_factory=dict)
    scaling: Table = field(default_factory=dict)
    api: Table = field(default_factory=dict)  # tool_parser, reasoning_parser, max_live_requests ...


class Config(Section, frozen=True):
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    tiers: TiersSection = TiersSection()
    sessions: SessionsSection = SessionsSection()
    tenants: TenantsSection = TenantsSection()
    tenant: tuple[TenantEntry, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    api: ApiSection = ApiSection()
    tls: TlsSection = TlsSection()
    state: StateSection = StateSection()
    events: EventsSection = EventsSection()
    cluster: ClusterSection = ClusterSection()
    router: RouterConfig = RouterConfig()
    scaling: ScalingConfig = ScalingConfig()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()
    models: tuple[ModelEntry, ...] = ()

    def by_model(self) -> dict[str, Config]:
        """The settings of each model, by its name; without [[models]] there is one, "". Raises
        ConfigError."""
        found = {each.name: self._of_model(each) for each in self.models} or {"": self}
        return {name: own._with_python() for name, own in found.items()}

    @property
    def first(self) -> Config:
        """The settings of what a call gets that names no model."""
        return next(iter(self.by_model().values()))

    def _with_python(self) -> Config:
        """Sets the interpreter that has the engine, where none is set."""
        if self.engine.runs != "vllm" or self.engine.python:
            return self
        return replace(self, engine=replace(self.engine, python=python_with_vllm()))

    def with_model(self, name: str, entry: ModelEntry | None) -> Config:
        """With one more, or (None) without one, while the server serves. Raises ConfigError."""
        if entry is not None:
            check_added(entry)
        others = tuple(each for each in self.models if each.name != name)
        known = ", ".join(each.name for each in self.models)
        if not self.models:
            wanted = "start the server with NAME=MODEL, or with [[models]] in a file"
            raise ConfigError(f"the model that is served has no name of its own: {wanted}")
        if entry is None and len(others) == len(self.models):
            raise ConfigError(f"there is no model {name!r}; there are {known}")
        if entry is not None and len(others) < len(self.models):
            raise ConfigError(f"there is a model {name!r}; remove it first, or take another name")
        return self.with_models((*others, entry) if entry else others)

    def with_models(self, models: tuple[ModelEntry, ...]) -> Config:
        """These in place of the ones that there are. Raises ConfigError."""
        if not models:
            raise ConfigError("no model would be left: use `kvrelay drain` to end the server")
        config = _read_chat_templates(replace(self, models=models), Path(), "models")
        _check(config)
        return config

    def _of_model(self, entry: ModelEntry) -> Config:
        own: dict[str, Any] = {}
        for name in OWN_SECTIONS:
            common, given = getattr(self, name), getattr(entry, name)
            try:
                check_settings(given, type(common), "$")
                own[name] = convert(asdict(common) | given, type(common)) if given else common
            except ValidationError as error:
                told = explain_error(str(error), asdict(common) | given, type(common))
                raise ConfigError(f"models.{name} of {entry.name}: {told}") from None
        model = replace(own.pop("model"), name=entry.checkpoint, served_name=entry.name)
        cluster = replace(self.cluster, prefill=entry.prefill, decode=entry.decode)
        return replace(self, model=model, cluster=cluster, models=(), **own)

    @property
    def scales(self) -> bool:
        """Whether workers of any model come and go."""
        return any(each.scaling.enabled for each in self.by_model().values())

    @property
    def most_workers(self) -> int:
        """That there may be at once."""
        if self.models:
            own = self.by_model().values()
            fixed = sum(each.most_workers for each in own if not each.scaling.enabled)
            coming = sum(each.most_workers for each in own if each.scaling.enabled)
            return fixed + min(coming, self.scaling.max_workers if coming else 0)
        scaling, first = self.scaling, self.cluster.prefill + self.cluster.decode
        most = (scaling.max_workers, *scaling.limits_of_schedules()) if scaling.enabled else ()
        return max((first, *most))

    def ranks_of(self, role: Role) -> int:
        """Processes (on GPUs: as many GPUs) of a worker that is started for prefill or decode."""
        return self.tensor_size_of(role) * self.engine.num_stages

    def tensor_size_of(self, role: Role) -> int:
        """Returns how many of those processes share each layer."""
        own: int = getattr(self.cluster, f"{role}_tensor_parallel_size")
        return own or self.engine.tensor_parallel_size


def parse_override(text: str) -> tuple[str, Any]:
    """SECTION.KEY=VALUE as an override. VALUE is as in the file, without the quotes of a text.
    Raises ConfigError."""
    name, sign, value = (part.strip() for part in text.partition("="))
    section, _, key = name.partition(".")
    if not sign or not section or not key:
        raise ConfigError(f"{text}: expected SECTION.KEY=VALUE, as engine.max_model_len=32768")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return name, value
    found = read["value"] if len(read) == 1 else value
    is_text = _type_of(section, key) is str and not isinstance(found, str)
    return name, value if is_text else found


def read_overrides(file: Path) -> dict[str, Any]:
    """Overrides as a JSON object, so that secrets are in no command line. Raises ConfigError."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"@{file}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f'@{file}: expected an object, as {{"api.key": "..."}}')
    return found


def secret_settings() -> set[str]:
    """As "section.key", those whose values are never shown."""
    found = set()
    for section in fields(Config):
        kind = section.type
        for each in fields(kind) if isinstance(kind, type) and issubclass(kind, Section) else ():
            notes = [meta.extra or {} for meta in getattr(each.type, "__metadata__", ())]
            if any(extra.get("secret") for extra in notes):
                found.add(f"{section.name}.{each.name}")
    return found


def _type_of(section: str, key: str) -> Any:
    """Returns a setting's type without its range; None: there is none of that name."""
    kind: Any = Config
    for part in (section, key):
        known = fields(kind) if isinstance(kind, type) and issubclass(kind, Section) else ()
        kind = next((each.type for each in known if each.name == part), None)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def load_config(
    path: Path | None, overrides: Mapping[str, Any], kept: Path | None = None
) -> Config:
    """The file's settings (none without a file), then `overrides` ("section.key" -> value; None
    means not given). `kept`: a copy to read in place of the file, for which names of other files
    are still beside `path`. Raises ConfigError."""
    given = {key: value for key, value in overrides.items() if value is not None}
    tables: dict[str, Any] = {} if path is None else read_toml(kept or path)
    config = build_config(tables, str(path))
    if config.models and ("model.name" in given or "models" in given):
        raise ConfigError(f"command line: a MODEL was given, and {path} has [[models]]: leave one")
    if config.models and "model.served_name" in given:
        raise ConfigError(f"command line: model.served_name: {path} has [[models]] with names")
    for key, value in given.items():
        section, _, name = key.partition(".")
        table = tables.get(section, {})
        if not name:
            tables = tables | {section: value}
            continue
        if not isinstance(table, Mapping) or isinstance(getattr(config, section, None), tuple):
            raise ConfigError(f"command line: {section} is a list of tables: write it in a file")
        tables = tables | {section: {**table, name: value}}
    config = build_config(tables, "command line")  # the file alone is right
    # What the command line names is found from where it was given.
    folders = {key: Path() if path is None or key in given else path.parent for key in _FILES}
    config = _resolve_paths(config, folders)
    where = "command line" if "model.chat_template" in given else str(path)
    return _read_chat_templates(config, folders["model.chat_template"], where)


_FILES = (
    *("model.chat_template", "tenants.file", "tenants.public_prompt_files"),
    *("tls.cert", "tls.key", "tls.ca", "adapters"),
)


def _read_chat_templates(config: Config, folder: Path, where: str) -> Config:
    """The files' texts in place of their names: other machines do not have the files."""
    source = _template(config.model.chat_template, folder, where)
    model = replace(config.model, chat_template=source)
    models = tuple(
        replace(each, model=each.model | {"chat_template": _template(given, folder, where)})
        if (given := each.model.get("chat_template"))
        else each
        for each in config.models
    )
    return replace(config, model=model, models=models)


def _template(given: str, folder: Path, where: str) -> str:
    if not given or "{{" in given or "{%" in given:
        return given
    file = folder / Path(given).expanduser()
    try:
        source = file.read_text(encoding="utf-8")
        reason = "" if source.strip() else "it is empty"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
    if reason:
        wanted = "neither Jinja nor a file with it"
        raise ConfigError(f"{where}: model.chat_template is {wanted}: '{file}': {reason}")
    return source


def _resolve_paths(config: Config, folders: Mapping[str, Path]) -> Config:
    """With what is named beside the file found from wherever the server is started."""
    tenants, tls, names = config.tenants, config.tls, ("cert", "key", "ca")
    pem = {n: str(folders[f"tls.{n}"] / path) for n in names if (path := getattr(tls, n))}
    file = str(folders["tenants.file"] / tenants.file) if tenants.file else ""
    prompts = folders["tenants.public_prompt_files"]
    files = tuple(str(prompts / name) for name in tenants.public_prompt_files)
    resolved = replace(tenants, file=file, public_prompt_files=files)
    folder = folders["adapters"]
    beside = [(entry, folder / Path(entry.path).expanduser()) for entry in config.adapters]
    adapters = tuple(replace(e, path=str(at)) if at.is_dir() else e for e, at in beside)
    return replace(config, tenants=resolved, tls=replace(tls, **pem), adapters=adapters)


def build_config(tables: Mapping[str, Any], where: str) -> Config:
    """The settings of `tables`, which `where` names to the user. Raises ConfigError."""
    try:
        config = convert(tables, Config)
        for section, table in tables.items():
            if isinstance(table, Mapping):
                check_settings(table, type(getattr(config, section)), f"$.{section}")
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain_error(str(error), tables, Config)}") from None
    for number, entry in enumerate(config.tenant, start=1):
        if not entry.keys and not entry.key_hashes:
            who = f"tenant {number} ({entry.name})"
            raise ConfigError(f"{where}: {who} has neither keys nor key_hashes")
    try:
        _check(config)
        return _for_their_models(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_added(entry: ModelEntry) -> None:
    """What runs as the server's user is named by who starts the server, and by no call to it.
    Raises ConfigError."""
    no = no_to(Capability.MODEL_CHANGES, (Trait.VLLM,))
    for name in ("python", "arguments"):
        if no is not None and entry.engine.get(name):
            raise ConfigError(
                f"models.engine.{name} of {entry.name}: {no.text}: name {entry.name} in [[models]]"
                " there, and start anew"
            )


def _check(config: Config) -> None:
    """Raises ConfigError where settings do not fit each other."""
    _check_names(config)
    for each in config.by_model().values():
        if why := _not_with_vllm(each):
            raise ConfigError(why)
        prefill, decode = each.ranks_of(Role.PREFILL), each.ranks_of(Role.DECODE)
        if each.scaling.enabled and prefill != decode:
            told = f"prefill workers have {prefill} rank(s), decode workers {decode}"
            wanted = "give them one tensor_parallel_size, or set scaling.enabled = false"
            raise ConfigError(f"scaling.enabled counts workers, and {told}: {wanted}")


def _not_with_vllm(config: Config) -> str:
    """Why workers cannot compute with what engine.runs says; "": they can."""
    runs, python = config.engine.runs, config.engine.python
    if runs == "kvrelay":
        if why := parser_names.not_ours(*config.api.vllm_parsers):
            return why
        return "" if not python else f"engine.python = '{python}' is for engine.runs = 'vllm'"
    if not python:
        return (
            "engine.runs = 'vllm': no environment here has vLLM: `make setup-vllm` makes one in the"
            " project's folder, or name the bin/python of another: --set engine.python=PATH"
        )
    is_apart = config.engine.is_context_parallel
    traits = {Trait.VLLM, *((Trait.CONTEXT_PARALLEL,) if is_apart else ())}
    if config.cluster.prefill and (why := refusal_of(Capability.HAND_OVER, traits)):
        return f"prefill = {config.cluster.prefill}: {why}: set it to 0"
    if why := not_of_vllm(config.engine, config.model):
        return why
    return no_scaling(config.scaling.enabled, traits)


def names_of(models: Iterable[tuple[str, Iterable[str]]]) -> Iterator[tuple[str, str]]:
    """What clients may call models, and who each is, as `name_table` takes them. `models`: the name
    and the aliases of each."""
    for name, aliases in models:
        yield name, "the name of a model"
        yield from ((alias, f"an alias of the model {name!r}") for alias in aliases)


def _check_names(config: Config) -> None:
    """Raises ConfigError where one name would stand for two."""
    own = ((each.name, "an adapter in [[adapters]]") for each in config.adapters)
    name_table([*names_of((each.name, each.aliases) for each in config.models), *own])


def check_tenants(config: Config, known: Collection[str]) -> None:
    """Whether those who may use a model or an adapter are among the `known`. Raises ConfigError:
    nobody else is kept out by a name that is misspelt, and nobody is let in."""
    there = f"there are {', '.join(sorted(known))}" if known else "there is no [[tenant]]"
    for section, entries in (("models", config.models), ("adapters", config.adapters)):
        for each in entries:
            for name in each.tenants:
                if name not in known:
                    raise ConfigError(
                        f"{section}: {each.name}: tenants has {name!r}, which is none; {there}"
                    )


def _for_their_models(config: Config) -> Config:
    """Adapters that name no model have the only one, whatever is added later. Raises
    ConfigError."""
    known = [each.name for each in config.models]
    for each in config.adapters:
        if each.model and known and each.model not in known:
            raise ConfigError(
                f"adapters: {each.name}: model = {each.model!r} is not in [[models]]; there are"
                f" {', '.join(known)}"
            )
    if len(known) != 1:
        return config
    own = tuple(replace(each, model=each.model or known[0]) for each in config.adapters)
    return replace(config, adapters=own)
