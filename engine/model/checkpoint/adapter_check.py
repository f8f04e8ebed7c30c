"""Whether a model's workers will be able to load an adapter, found out where it is registered.

That takes torch, which servers and routers do not import: a process of its own does it, which lives
for some seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvrelay.engine.adapters import AdapterError

TIMEOUT_S = 300.0  # to import torch, and to read adapters of some GB


def check_adapters(
    folders: Sequence[Path], model_dir: Path, dtype: str, adapter_bytes: int, num_ranks: int
) -> list[str]:
    """Why each of them cannot be loaded, "" where it can, by a process of its own. dtype: of the
    model; adapter_bytes: that each of `num_ranks` ranks may hold. Raises AdapterError if that
    process fails."""
    given = [[*map(str, folders)], str(model_dir), dtype, adapter_bytes, num_ranks]
    command = [sys.executable, "-m", "kvrelay.engine.model.checkpoint.adapter_check"]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        found: list[str] = json.loads(done.stdout.rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise AdapterError(f"it could not be checked within {TIMEOUT_S:g} s") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"the process that checks adapters has failed: {error}") from error
    return found


def why_not(folder: Path, model_dir: Path, dtype: str, adapter_bytes: int, num_ranks: int) -> str:
    """Returns what `check_adapters` says of one, found out here."""
    from kvrelay.engine.model.checkpoint.adapter import check_adapter
    from kvrelay.engine.model.checkpoint.families import read_config
    from kvrelay.engine.model.device import is_bf16_faster
    from kvrelay.engine.model.errors import ModelError

    try:
        count = check_adapter(folder, model_dir, read_config(model_dir))
    except (AdapterError, ModelError) as error:
        return str(error)
    except Exception as error:  # the loader's own: it would fail in a worker too
        return f"it does not fit the model: {type(error).__name__}"
    if dtype == "auto":
        dtype = "bfloat16" if is_bf16_faster() else "float32"
    needed = count * (4 if dtype == "float32" else 2) // num_ranks
    if needed > adapter_bytes:
        return f"it takes {needed} bytes, engine.adapter_bytes allows {adapter_bytes}"
    return ""


def main() -> None:
    folders, model_dir, *limits = json.loads(sys.stdin.read())
    found = [why_not(Path(each), Path(model_dir), *limits) for each in folders]
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
