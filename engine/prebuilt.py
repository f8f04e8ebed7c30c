"""C libraries that come with a wheel, so that it needs no compiler.

They are made when the wheel is (`make release`), each by what it is made of, so that changed
sources never meet an old library. Those that are compiled for the machine they run on
(-march=native) come for several levels of processors, and are used only where there is no compiler:
one that is made here knows all that this processor can do. A checkout has none of them.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "libraries"
NATIVE = "-march=native"

_V3 = "avx2 bmi1 bmi2 f16c fma movbe abm"
_ICELAKE = (
    f"{_V3} avx512f avx512dq avx512cd avx512bw avx512vl avx512ifma avx512vbmi avx512_vbmi2 gfni"
    " vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq sha_ni adx"
)
_SAPPHIRE = f"{_ICELAKE} amx_tile amx_int8 amx_bf16 avx512_fp16 avx512_bf16 avx_vnni"


@dataclass(frozen=True, slots=True)
class Level:
    """What a library is compiled for."""

    march: str  # as compilers call it
    machine: str  # as platform.machine() does
    needs: str = ""  # features of the processor, as /proc/cpuinfo calls them


# The best one first of each machine.
LEVELS = (
    Level("sapphirerapids", "x86_64", _SAPPHIRE),
    Level("icelake-server", "x86_64", _ICELAKE),
    Level("x86-64-v3", "x86_64", _V3),
    Level("armv8-a", "aarch64", "asimd"),
)


def find(source: Path, flags: Sequence[str], has_compiler: bool) -> Path | None:
    """The library made from `source` for this machine; None: it is to be compiled."""
    if not FOLDER.is_dir() or (NATIVE in flags and has_compiler):
        return None
    machine, features = platform.machine(), _features()
    for level in LEVELS:
        if level.machine == machine and features.issuperset(level.needs.split()):
            path = FOLDER / place_of(source, flags, level)
            if path.is_file():
                return path
    return None


def place_of(source: Path, flags: Sequence[str], level: Level) -> Path:
    """Below FOLDER. One that is not for the machine it is made on is for any of its kind."""
    name = source.stem if source.is_file() else "-".join(source.parts[-2:])
    parts = [" ".join(flags).encode(), *contents_of(source)]
    kind = level.march if NATIVE in flags else level.machine
    return Path(kind) / f"{name}-{digest_of(parts)}.so"


def folder_of(source: Path) -> Path:
    return source.parent if source.is_file() else source


def sources_of(source: Path) -> list[Path]:
    """`source` is one C file or a folder of them."""
    return [source] if source.is_file() else sorted(source.rglob("*.c"))


def contents_of(source: Path) -> Iterator[bytes]:
    """What a library is made of: sources and headers, by name."""
    folder = folder_of(source)
    for path in (*sources_of(source), *sorted(folder.rglob("*.h"))):
        yield path.relative_to(folder).as_posix().encode()
        yield path.read_bytes()


def digest_of(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _features() -> set[str]:
    """Lists what this processor has; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    line = next((each for each in lines if each.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())
