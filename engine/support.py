"""The support matrix: which capability works where, and why it does not elsewhere.

Whoever refuses a capability, or serves without it, asks this table and has no text of its own.
docs/matrix.md is made of it, with the tests of what works. A capability without a rule works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvrelay.engine.config import EngineSection, TiersSection
    from kvrelay.engine.kv.spec import KVSpec
    from kvrelay.engine.model.config import ModelConfig


class Capability(StrEnum):
    """What a user may ask for."""

    GENERATION = "chats and completions"
    ADAPTERS = "LoRA adapters"
    NGRAM_DRAFTS = "drafts by n-grams"
    HEAD_DRAFTS = "drafts by a head"
    MODEL_DRAFTS = "drafts by a model"
    MTP_DRAFTS = "drafts by an MTP layer"
    GRAMMARS = "grammars, JSON schemas, tools"
    REASONING_BUDGET = "budgets for reasoning"
    PENALTIES = "penalties, biases, bad_words"
    LOGPROBS = "log-probabilities"
    EMBEDDINGS = "embeddings"
    IMAGES = "images in prompts"
    HAND_OVER = "prompts computed for others"
    HOST_TIER = "host tier"
    DISK_TIER = "disk tier"
    DISK_CODEC = "codec of the disk tier"
    OBJECT_TIER = "object tier"
    LEFT_KV = "KV that outlives its worker"
    APPROXIMATE_KV = "KV in four bits"
    QUEST = "Quest"
    SESSIONS = "parked sessions"
    CLASSES = "classes of service"
    WEIGHT_UPDATES = "weights changed in place"
    SCALING = "autoscaling"
    MODEL_CHANGES = "models added and removed live"


class Trait(StrEnum):
    """What a worker, its model or its server is like."""

    CPU = "CPU"
    GPU = "GPU"
    RANKS = "ranks"
    CONTEXT_PARALLEL = "context parallelism"
    MACHINES = "ranks on several machines"
    TORCH = "plain torch"
    STATES = "recurrent layers"
    WINDOWS = "windows"
    ONLY_WINDOWS = "windows in all layers"
    LATENT = "latent attention"
    SPARSE = "sparse attention"
    LAYERWISE = "layer by layer"
    QUANTIZED = "quantized weights"
    FP8_KV = "KV in 8 bits"
    OTHER_KV = "no KV of all tokens"
    UNEVEN_KV = "KV of several shapes"
    OTHER_VISION = "no vision tower that is known"
    DRAFTER = "a drafter"
    VLLM = "vLLM"
    NO_LORA = "vLLM without LoRA"
    POOLING = "vLLM that pools"
    NO_POOLING = "vLLM that generates"
    MODELS = "several models"
    ROUTERS = "several routers"
    SERVERS = "several servers"


# Why not, in a word.
Word = Literal["bits", "device", "engine", "torch", "layers", "ranks", "servers", "shape", "states"]


class How(StrEnum):
    REFUSED = "no"  # an error, of the start or of the request
    WITHOUT = "without"  # served without it: workers say so when they start
    PART = "part"  # a part is refused, where somebody asks for it


@dataclass(frozen=True, slots=True)
class No:
    """Why a capability does not work, or not all of it, wherever all of `where` are."""

    how: How
    word: Word
    text: str  # for users: one line, with what would be right if anything would
    where: frozenset[Trait]


def no_to(capability: Capability, traits: Iterable[Trait]) -> No | None:
    """The first that holds in a place with these traits; None: the capability works there."""
    found = frozenset(traits)
    return next((no for no in RULES.get(capability, ()) if no.where <= found), None)


def refusal_of(capability: Capability, traits: Iterable[Trait]) -> str:
    """As `no_to`, for those who refuse all of it: the text; "": it is not refused."""
    no = no_to(capability, traits)
    return no.text if no is not None and no.how is How.REFUSED else ""


def notices_of(capabilities: Iterable[Capability], traits: Iterable[Trait]) -> list[str]:
    """What an operator should know of those that are asked for: lines, one for each text."""
    missing: dict[str, list[str]] = {}
    found = frozenset(traits)
    for each in capabilities:
        no = no_to(each, found)
        if no is not None and no.how is How.WITHOUT:
            missing.setdefault(no.text, []).append(each)
    return [f"serving without {', '.join(names)}: {text}" for text, names in missing.items()]


def engine_traits(engine: EngineSection, *, on_gpu: bool) -> frozenset[Trait]:
    """Those of a worker by its settings. Another engine has its own rules for devices."""
    device = Trait.GPU if on_gpu else Trait.CPU
    is_vllm, has_lora = engine.runs == "vllm", bool(engine.arguments.get("enable_lora"))
    return _of(
        (Trait.VLLM if is_vllm else device, True),
        (Trait.RANKS, engine.tensor_parallel_size > 1 and not is_vllm),
        (Trait.DRAFTER, bool(engine.drafter) and not is_vllm),
        (Trait.NO_LORA, is_vllm and not (has_lora and (on_gpu or LORA_ON_CPUS))),
        (Trait.POOLING, engine.pools),
        (Trait.NO_POOLING, is_vllm and not engine.pools),
    )


def model_traits(model: ModelConfig) -> frozenset[Trait]:
    return _of(
        (Trait.STATES, model.recurrent is not None),
        (Trait.WINDOWS, any(model.windows)),
        (Trait.ONLY_WINDOWS, model.kv_groups()[0][0] > 0),
        (Trait.LATENT, model.latent is not None),
        (Trait.SPARSE, model.indexer is not None),
        (Trait.LAYERWISE, model.is_layerwise),
        (Trait.OTHER_VISION, model.vision is None),
    )


def kv_traits(spec: KVSpec) -> frozenset[Trait]:
    return _of(
        (Trait.STATES, spec.num_state_groups > 0),
        (Trait.LATENT, spec.num_planes == 1 and not spec.heads),
        (Trait.FP8_KV, spec.dtype == "float8_e4m3"),
        (Trait.UNEVEN_KV, bool(spec.heads or spec.draft_bytes)),
    )


def _of(*known: tuple[Trait, bool]) -> frozenset[Trait]:
    return frozenset(trait for trait, is_so in known if is_so)


def drafts_of(engine: EngineSection, kind: str = "") -> list[Capability]:
    """Those that the settings ask for. `kind`: of the drafter; "": nobody has looked."""
    found = [Capability.NGRAM_DRAFTS] if engine.num_speculative_tokens else []
    return [*found, drafter_of(kind or engine.drafter)] if engine.drafter else found


def drafter_of(kind: str) -> Capability:
    """`kind`: as of a DraftConfig, or engine.drafter, as far as that says it: those that are
    folders work in the same places."""
    named = {"mtp": Capability.MTP_DRAFTS, "model": Capability.MODEL_DRAFTS}
    return named.get(kind, Capability.HEAD_DRAFTS)


def tiers_of(tiers: TiersSection) -> list[Capability]:
    """What the settings ask for below device memory."""
    has_codec = tiers.disk_gib > 0 and tiers.disk_codec != "none"
    host, disk = [Capability.HOST_TIER, Capability.LEFT_KV], [Capability.DISK_TIER]
    found = [*(host if tiers.host_gib else ()), *(disk if tiers.disk_gib else ())]
    found += [Capability.DISK_CODEC] if has_codec else []
    found += [Capability.OBJECT_TIER] if tiers.object_bucket else []
    found += [Capability.APPROXIMATE_KV] if tiers.packed_gib or has_codec else []
    return [*found, Capability.SESSIONS]


def _no(word: Word, text: str, *where: Trait, how: How = How.REFUSED) -> No:
    return No(how, word, text, frozenset(where))


def _without(word: Word, text: str, *where: Trait) -> No:
    return _no(word, text, *where, how=How.WITHOUT)


def _not_copied(how: How, text: str) -> tuple[No, ...]:
    """Where workers that run vllm have no copy of its KV."""
    return (
        _no("ranks", f"{text} where {_APART}", Trait.VLLM, Trait.CONTEXT_PARALLEL, how=how),
        _no("states", f"{text} where layers are recurrent", Trait.VLLM, Trait.STATES, how=how),
        _no("shape", f"{text} where {_OTHER}", Trait.VLLM, Trait.OTHER_KV, how=how),
    )


LORA_ON_CPUS = False
"""vLLM 0.32 gives requests without an adapter, beside others in one step, the adapter of its last
slot there: index -1 of its slots means none, and is looked up as the last one."""

_APART = "ranks of context parallelism have different tokens of a block"
_OTHER = "layers keep other things than KV of tokens, or vLLM's prefix caching is off"
DRAFTERS = (Capability.HEAD_DRAFTS, Capability.MODEL_DRAFTS, Capability.MTP_DRAFTS)
_NOT_VERIFIED = "draft tokens are not verified"
_OF_MODEL = "drafters need one process on a CPU, whose kernels run all layers at once"
_ALL_WINDOWS = "all layers have a window, behind which no block stays for a drafter to read"
_IN_PLACE = "weights change in place on CPUs: restart the server with them instead"
_CHOOSES = "pages are chosen by one process on a CPU alone: leave it out"
_READS_ALL = "pages are chosen by kernels, of keys and values of one shape in 16 or 32 bits alone"
_EXACT = "KV stays exact: only keys and values in 16 or 32 bits, of one shape, are kept in four"
_CODE = "it says which code runs, so only the server's file and command line may"
_FILES = "servers of one cluster.name read [[models]] of their files: change those, then restart"
_NOT_KEPT = "workers that run vllm keep no KV of earlier weights: use recompute or drain"
_KEEP_MODE = "recurrent layers leave no KV to keep: use recompute or drain"
_NO_LORA = (
    "of workers that run vllm, those on GPUs with engine.arguments.enable_lora compute adapters"
)
_POOLS = "with engine.arguments.runner = 'pooling' vLLM computes embeddings alone: /v1/embeddings"
_GENERATES = "of vLLM's workers, those with engine.arguments.runner = 'pooling' compute embeddings"
_BY_VLLM = "workers with engine.runs = 'vllm' do"
_NO_IMAGES = f"images are read on CPUs; {_BY_VLLM} on GPUs too"
_NO_TOWER = f"images of Qwen3-VL and Qwen3.5 are read, this model's are not; {_BY_VLLM}"
_DRAFTED = "images are not read beside engine.drafter, which knows tokens alone: n-grams draft"
_PARTS = "vLLM's backend for grammars takes none of this form"
_NO_EDITS = "vLLM's runner for GPUs, and one with vLLM's drafts, has no budget for reasoning here"

_ONLY_POOLS = _no("engine", _POOLS, Trait.VLLM, Trait.POOLING)
_STATES_OF_RANKS = (Trait.GPU, Trait.STATES, Trait.RANKS)

_OWN_DRAFTS = "vLLM drafts by engine.arguments.speculative_config alone"
_OF_DRAFTERS = (
    _no("engine", _OWN_DRAFTS, Trait.VLLM),
    _no("ranks", _OF_MODEL, Trait.RANKS),
    _no("device", _OF_MODEL, Trait.GPU),
    _no("layers", _OF_MODEL, Trait.LAYERWISE),
    _no("layers", _ALL_WINDOWS, Trait.ONLY_WINDOWS),
    _without("torch", f"{_NOT_VERIFIED} by torch, without kernels", Trait.TORCH),
)
_NO_MTP = "MTP layers have no sparse attention yet: n-grams, a head or a model draft"
_OF_TIERS = _not_copied(How.WITHOUT, "KV stays in vLLM's memory")

RULES: dict[Capability, tuple[No, ...]] = {
    **dict.fromkeys(
        (Capability.GENERATION, Capability.PENALTIES, Capability.LOGPROBS), (_ONLY_POOLS,)
    ),
    Capability.ADAPTERS: (
        _no("engine", _NO_LORA, Trait.VLLM, Trait.NO_LORA),
        _no("device", "adapters are computed on CPUs, not on GPUs", Trait.GPU),
    ),
    Capability.NGRAM_DRAFTS: (
        _without("engine", "vLLM's steps have no draft tokens of ours", Trait.VLLM),
        _without("states", f"{_NOT_VERIFIED} by states on several GPUs", *_STATES_OF_RANKS),
        _without("torch", f"{_NOT_VERIFIED} by torch, without kernels", Trait.TORCH),
    ),
    **dict.fromkeys(DRAFTERS, _OF_DRAFTERS),
    Capability.MTP_DRAFTS: (*_OF_DRAFTERS, _no("layers", _NO_MTP, Trait.SPARSE)),
    Capability.GRAMMARS: (
        _ONLY_POOLS,
        _no("engine", _PARTS, Trait.VLLM, how=How.PART),
    ),
    Capability.REASONING_BUDGET: (
        _ONLY_POOLS,
        _no("engine", _NO_EDITS, Trait.VLLM, Trait.GPU),
    ),
    Capability.EMBEDDINGS: (_no("engine", _GENERATES, Trait.VLLM, Trait.NO_POOLING),),
    Capability.IMAGES: (
        _ONLY_POOLS,
        _no("device", _NO_IMAGES, Trait.GPU),
        _no("layers", _NO_TOWER, Trait.OTHER_VISION),
        _no("engine", _DRAFTED, Trait.DRAFTER),
    ),
    Capability.HAND_OVER: _not_copied(How.REFUSED, "vLLM's workers compute their own prompts"),
    Capability.HOST_TIER: _OF_TIERS,
    Capability.DISK_TIER: _OF_TIERS,
    Capability.DISK_CODEC: _OF_TIERS,
    Capability.OBJECT_TIER: _OF_TIERS,
    Capability.LEFT_KV: _OF_TIERS,
    Capability.APPROXIMATE_KV: (
        _without("engine", "KV stays exact: blocks have an order of vLLM's", Trait.VLLM),
        _without("states", _EXACT, Trait.STATES),
        _without("bits", _EXACT, Trait.FP8_KV),
        _without("shape", _EXACT, Trait.LATENT),
        _without("shape", _EXACT, Trait.UNEVEN_KV),
    ),
    Capability.QUEST: (
        _no("engine", "vLLM's attention reads all of a context", Trait.VLLM),
        _no("device", _CHOOSES, Trait.GPU),
        _no("ranks", _CHOOSES, Trait.RANKS),
        _without("torch", _READS_ALL, Trait.TORCH),
        _without("states", _READS_ALL, Trait.STATES),
        _without("bits", _READS_ALL, Trait.FP8_KV),
        _without("shape", _READS_ALL, Trait.LATENT),
        _without("shape", _READS_ALL, Trait.UNEVEN_KV),
        _without("layers", "layers with windows read few pages anyway", Trait.ONLY_WINDOWS),
    ),
    Capability.SESSIONS: _OF_TIERS,
    Capability.WEIGHT_UPDATES: (
        _no("engine", _NOT_KEPT, Trait.VLLM, how=How.PART),
        _no("device", _IN_PLACE, Trait.GPU),
        _no("states", _KEEP_MODE, Trait.STATES, how=How.PART),
    ),
    Capability.SCALING: _not_copied(How.REFUSED, "vLLM's workers keep their role"),
    Capability.MODEL_CHANGES: (
        _no("servers", _FILES, Trait.SERVERS),
        _no("engine", _CODE, Trait.VLLM, how=How.PART),
    ),
}
