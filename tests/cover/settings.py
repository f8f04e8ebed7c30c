"""The values of a row, what they are in the support matrix, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvrelay.engine.support import Capability, How, No, Trait, no_to

C, T = Capability, Trait
Row = dict[str, str]  # a value for each setting
NO, YES = "no", "yes"
SETTINGS: dict[str, tuple[str, ...]] = {
    "model": ("dense", "experts", "hybrid", "windows", "short", "latent", "sparse"),
    "computes": ("process", "ranks", "triton"),
    "drafter": ("none", "head", "model", "mtp"),
    "weights": ("stored", "int8", "int4"),
    "kv": ("same", "fp8"),
    "pools": ("one", "two"),
    "models": ("one", "two"),
    "routers": ("one", "two"),
    **dict.fromkeys(
        (
            *("ngrams", "adapters", "grammars", "penalties", "logprobs", "updates", "approximate"),
            *("codec", "objects", "left", "sessions", "classes"),
        ),
        (NO, YES),
    ),
}
DEFAULTS: Row = {name: values[0] for name, values in SETTINGS.items()}
MODEL_TRAITS: dict[str, set[Trait]] = {
    "dense": set(),
    "experts": set(),
    "hybrid": {T.STATES},
    "windows": {T.WINDOWS},
    "short": {T.WINDOWS, T.ONLY_WINDOWS},
    "latent": {T.LATENT},
    "sparse": {T.LATENT, T.SPARSE},
}
_TRAITS: dict[tuple[str, str], set[Trait]] = {
    **{("model", name): traits for name, traits in MODEL_TRAITS.items()},
    ("computes", "process"): {T.CPU},
    ("computes", "ranks"): {T.CPU, T.RANKS},
    ("computes", "triton"): {T.GPU},
    ("weights", "int8"): {T.QUANTIZED},
    ("weights", "int4"): {T.QUANTIZED},
    ("kv", "fp8"): {T.FP8_KV},
    ("models", "two"): {T.MODELS},
    ("routers", "two"): {T.ROUTERS},
    # What a drafter keeps has a part in the blocks, and so have the keys of an index.
    **{("drafter", name): {T.UNEVEN_KV} for name in ("head", "model", "mtp")},
}
_ASKED: dict[tuple[str, str], Capability] = {
    ("drafter", "head"): C.HEAD_DRAFTS,
    ("drafter", "model"): C.MODEL_DRAFTS,
    ("drafter", "mtp"): C.MTP_DRAFTS,
    ("pools", "two"): C.HAND_OVER,
    ("ngrams", YES): C.NGRAM_DRAFTS,
    ("adapters", YES): C.ADAPTERS,
    ("grammars", YES): C.GRAMMARS,
    ("penalties", YES): C.PENALTIES,
    ("logprobs", YES): C.LOGPROBS,
    ("updates", YES): C.WEIGHT_UPDATES,
    ("approximate", YES): C.APPROXIMATE_KV,
    ("codec", YES): C.DISK_CODEC,
    ("objects", YES): C.OBJECT_TIER,
    ("left", YES): C.LEFT_KV,
    ("sessions", YES): C.SESSIONS,
    ("classes", YES): C.CLASSES,
}
COLUMNS: dict[str, tuple[str, str]] = {  # which columns of the matrix rows show
    "one process": ("computes", "process"),
    "ranks": ("computes", "ranks"),
    "states": ("model", "hybrid"),
    "windows": ("model", "windows"),
    "in all": ("model", "short"),
    "MLA": ("model", "latent"),
    "sparse": ("model", "sparse"),
    "int8, int4": ("weights", "int8"),
    "FP8 KV": ("kv", "fp8"),
    "models": ("models", "two"),
    "routers": ("routers", "two"),
}
HAVE_MTP = ("experts", "hybrid", "latent")  # whose checkpoints here have such a layer


def traits_of(row: Mapping[str, str]) -> set[Trait]:
    """`row`: of some settings, the others not known."""
    return set[Trait]().union(*(_TRAITS.get(pair, set()) for pair in row.items()))


def asked_of(row: Mapping[str, str]) -> list[Capability]:
    return [_ASKED[pair] for pair in row.items() if pair in _ASKED]


def why_not(row: Mapping[str, str]) -> No | None:
    """What the matrix refuses of it; a part is refused to those who ask for just that."""
    traits = traits_of(row)
    found = (no_to(each, traits) for each in asked_of(row))
    return next((no for no in found if no is not None and no.how is How.REFUSED), None)


def is_without(row: Mapping[str, str], capability: Capability) -> bool:
    """Whether it is asked for, and the row is served without it."""
    no = no_to(capability, traits_of(row))
    return no is not None and no.how is How.WITHOUT


def served() -> Iterator[tuple[Capability, str]]:
    """Capabilities with columns of the matrix that are together in some row."""
    for asked, capability in _ASKED.items():
        for column, value in COLUMNS.items():
            row = dict((asked, value))
            if is_valid(row) and no_to(capability, traits_of(row)) is None:
                yield capability, column


def cannot_be(row: Mapping[str, str]) -> bool:
    """What no rule of the matrix is about: a checkpoint has no such layer, or a number no kernel of
    that device."""
    model, drafter = row.get("model"), row.get("drafter")
    has_none = drafter == "mtp" and model is not None and model not in HAVE_MTP
    return has_none or (row.get("weights"), row.get("computes")) == ("int4", "triton")


def is_valid(row: Mapping[str, str]) -> bool:
    return not cannot_be(row) and why_not(row) is None


def parsed(text: str) -> Row:
    """A row as `shown` writes it; what is not said has its default. Raises ValueError."""
    row = dict(DEFAULTS)
    for word in text.split():
        name, _, value = word.partition("=")
        if value not in SETTINGS.get(name, ()):
            known = "; ".join(f"{each}={'|'.join(of)}" for each, of in SETTINGS.items())
            raise ValueError(f"{word!r} is no setting of a row: {known}")
        row[name] = value
    return row


def shown(row: Mapping[str, str]) -> str:
    """What is not by default."""
    return " ".join(f"{name}={value}" for name, value in row.items() if value != DEFAULTS[name])
