"""A folder of weights as a version of those that a server was started with: what it is called, and
whether it fits.

A worker keeps what it was given while it served in a copy of its own: a trainer writes the next
weights into the same folder, or removes it, and a worker that starts later still finds them.
`<cache>/weights/<digest of the model's own>/<digest>`. A copy shares its bytes with the trainer's
files where the file system can do that (reflinks); a second name for a file (a hard link) would
change with it. The last KEPT that were used are kept: those that are current, those before, to
which an operator may go back, and those that are being rolled out.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvrelay.engine.cache_dir import file_digest, publish_dir
from kvrelay.engine.files import given_folder
from kvrelay.engine.identity import VOCABULARY_FILES, WEIGHTS, files_of, identity_of
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.errors import ModelError, WeightsMissing
from kvrelay.engine.weights import NAME_DIGITS, WeightVersion

KEPT = 3
_NO_SHAPE = (
    "bos_token_id",
    "eos_token_id",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
)
log = logging.getLogger("kvrelay.weights")


def read_version(path: Path, name: str = "", base: Path | None = None) -> WeightVersion:
    """The version that `path` holds, by every byte of its weights. `base`: the model that it is to
    take the place of. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"{path} is no folder; expected one with the *.safetensors of a model")
    files = sorted(path.glob(WEIGHTS))
    if not files:
        raise ModelError(f"{path} has no *.safetensors")
    if base is not None:
        _check(path, base)
    found = identity_of(files, None, b"kvrelay-version")
    return WeightVersion(name or found.hex()[:NAME_DIGITS], found, str(path))


def _check(path: Path, base: Path) -> None:
    """Raises ModelError where requests would mean something else with the model in `path`."""
    if (path / "config.json").is_file():
        one, other = _shape(path), _shape(base)
        for field in (*one, *other):
            mine, its = one.get(field), other.get(field)
            if mine != its:
                raise ModelError(
                    f"{path} is another model than {base}: {field} is {mine!r}, not {its!r};"
                    " weights are changed in place for the same architecture and shape only"
                )
    for name in VOCABULARY_FILES:
        mine, its = path / name, base / name
        if mine.is_file() and (not its.is_file() or file_digest(mine) != file_digest(its)):
            raise ModelError(f"{mine} differs from {its}: tokens would mean something else")


def _shape(path: Path) -> dict[str, Any]:
    """What weights have to fit. Where outputs end is the server's matter. Raises ModelError."""
    try:
        config = replace(read_config(path), bos_token_id=None, eos_token_ids=())
        return {each.name: getattr(config, each.name) for each in fields(config)}
    except ModelError as error:  # another engine may read it
        try:
            raw: dict[str, Any] = json.loads((path / "config.json").read_bytes())
        except ValueError:
            raise error from None
        return {name: value for name, value in raw.items() if name not in _NO_SHAPE}


def find_version(version: WeightVersion, model: Path, cache: Path) -> Path:
    """A folder that holds `version`, in place of the weights in `model`: the copy in `cache`, which
    is made if there is room. Raises WeightsMissing, and ModelError where it does not fit."""
    if version.memory is not None:
        raise ModelError(
            f"{version.name} is in {version.place}: this engine reads weights from a folder only"
        )
    base = read_version(model)
    if version.digest == base.digest:
        return model
    shelf = cache / "weights" / base.digest.hex()
    kept = shelf / version.digest.hex()
    if _holds(kept, version):
        os.utime(kept)
        return kept
    folder = Path(version.path)
    try:
        found = read_version(folder, version.name, model)
    except ModelError as error:
        if any(folder.glob("*.safetensors")):
            raise
        text = f"{error}, and no copy of {version.name} is in {shelf}"
        raise WeightsMissing(text, version.digest) from error
    if found.digest != version.digest:
        raise WeightsMissing(
            f"{folder} has other bytes than {version.name} had when it was named, and no copy of it"
            f" is in {shelf}",
            version.digest,
        )
    try:
        with _alone_on(shelf):  # ranks and workers of a machine come at once
            if not _holds(kept, version):
                shutil.rmtree(kept, ignore_errors=True)  # a damaged one
                publish_dir(kept, lambda fresh: _copy(folder, fresh))
                _remove_old(shelf)
    except OSError as error:
        log.warning("%s is not copied to %s, and is gone with its folder: %s", folder, kept, error)
        return folder
    return kept if _holds(kept, version) else folder


@contextmanager
def _alone_on(shelf: Path) -> Iterator[None]:
    """Others that copy to it wait: as long as a copy takes, or until its process ends. Raises
    OSError."""
    given_folder(shelf.parent)
    handle = os.open(
        shelf.parent / f".{shelf.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
    )
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holds(folder: Path, version: WeightVersion) -> bool:
    try:
        return read_version(folder).digest == version.digest
    except (ModelError, OSError):
        return False


def _copy(folder: Path, fresh: Path) -> None:
    for file in files_of(folder):
        with file.open("rb") as source, (fresh / file.name).open("wb") as target:
            left = os.fstat(source.fileno()).st_size
            while left:  # by the kernel, which shares the bytes where it can
                copied = os.copy_file_range(source.fileno(), target.fileno(), left)
                if not copied:
                    break  # it has become shorter, which its digest will tell
                left -= copied


def _remove_old(shelf: Path) -> None:
    known = sorted(
        (each for each in shelf.iterdir() if not each.name.startswith(".")),
        key=lambda each: each.stat().st_mtime_ns,
    )
    for old in known[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
