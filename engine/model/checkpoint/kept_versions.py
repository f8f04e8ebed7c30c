"""Weights that a worker was given while it served, in a copy of its own: a trainer writes the next
ones into the same folder, or removes it, and a worker that starts later still finds them.

`<cache>/weights/<digest of the model's own>/<digest>`. A copy shares its bytes with the trainer's
files where the file system can do that (reflinks); a second name for a file (a hard link) would
change with it. The last KEPT that were used are kept: those that are current, those before, to
which an operator may go back, and those that are being rolled out.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from kvrelay.engine.cache_dir import publish_dir
from kvrelay.engine.identity import files_of
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.model.errors import ModelError, WeightsMissing
from kvrelay.engine.weights import WeightVersion

KEPT = 3
log = logging.getLogger("kvrelay.weights")


def find_version(version: WeightVersion, model: Path, cache: Path) -> Path:
    """A folder that holds `version`, in place of the weights in `model`: the copy in `cache`, which
    is made if there is room. Raises WeightsMissing, and ModelError where it does not fit."""
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
        shutil.rmtree(kept, ignore_errors=True)  # a damaged one: others would have been found
        publish_dir(kept, lambda fresh: _copy(folder, fresh))
        _remove_old(shelf)
    except OSError as error:
        log.warning("%s is not copied to %s, and is gone with its folder: %s", folder, kept, error)
        return folder
    return kept if _holds(kept, version) else folder


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
