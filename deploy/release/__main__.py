"""`python -m deploy.release FOLDER`: what a release is made of, from the commit checked out.

    kvrelay-VERSION-py3-none-manylinux_…   a wheel with the C libraries compiled
    kvrelay-VERSION-py3-none-any.whl       the same without: a C compiler is needed where it runs
    kvrelay-VERSION.tar.gz                 the sources
    kvrelay-VERSION-constraints.txt        the versions that were tested, for `pip install -c`
    kvrelay-chart-VERSION.tgz              the Helm chart
    kvrelay-VERSION.cdx.json               a bill of materials (CycloneDX)
    kvrelay-VERSION.provenance.json        what it was made from, how (in-toto, SLSA); not signed
    SHA256SUMS                             of all these

`make release` calls it. The image is made by deploy/Containerfile, for CPUs and for NVIDIA GPUs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.release.materials import bill_of_materials, provenance

ROOT = Path(__file__).parents[2]
CHART = Path("deploy/helm/kvrelay")
TIMEOUT_S = 900.0
# A compiler for another kind of machine, where there is one.
CROSS = {"aarch64": "aarch64-linux-gnu-gcc", "x86_64": "x86_64-linux-gnu-gcc"}


def run(command: Sequence[str | Path], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed in {folder}:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def check_out(tree: Path) -> tuple[str, str]:
    """The commit as it is, without what lies beside it. Returns it and when it was made."""
    commit, made_at = run(["git", "log", "-1", "--format=%H %ct"], ROOT).split()
    packed = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tree, filter="tar")
    return commit, made_at


def build_wheel(tree: Path, out: Path, made_at: str) -> Path:
    shutil.rmtree(tree / "build", ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as fresh:
        run([*pip, "--no-deps", "--wheel-dir", fresh, "."], tree, SOURCE_DATE_EPOCH=made_at)
        (made,) = Path(fresh).glob("*.whl")
        return Path(shutil.move(made, out / made.name))


def build_native_wheel(tree: Path, out: Path, made_at: str, machine: str) -> Path:
    """With the tag that auditwheel gives what the libraries ask of a system's C library."""
    with tempfile.TemporaryDirectory() as fresh:
        plain = build_wheel(tree, Path(fresh), made_at)
        tags = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag"]
        named = Path(fresh) / run([*tags, f"linux_{machine}", plain], tree).strip()
        audit = [sys.executable, "-m", "auditwheel", "show", "--json", "--disable-isa-ext-check"]
        found = json.loads(run([*audit, named], tree))
        final = Path(fresh) / run([*tags, tag_of(found), named], tree).strip()
        return Path(shutil.move(final, out / final.name))


def tag_of(audited: dict[str, Any]) -> str:
    """The platform that auditwheel finds a wheel to be consistent with."""
    return str(audited["overall_tag"])


def build_sdist(tree: Path, out: Path, made_at: str) -> Path:
    code = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", code, out], tree, SOURCE_DATE_EPOCH=made_at).split()[-1]
    return out / name


def compile_libraries(folder: Path, machine: str, compiler: str) -> Iterator[Path]:
    """All C of the program, for each level of a kind of machine."""
    from kvrelay.engine.kv import block_hash
    from kvrelay.engine.model.cpu import kernels
    from kvrelay.engine.native import FLAGS, compile_library
    from kvrelay.engine.prebuilt import LEVELS, NATIVE, place_of
    from kvrelay.kvtransfer import checksum, codec, kivi
    from kvrelay.router.native import bindings

    native = (NATIVE,)
    libraries = [
        (block_hash.SOURCE, ()),
        (checksum.SOURCE, native),
        (codec.SOURCE, native),
        (kivi.SOURCE, native),
        (bindings.FOLDER, bindings.FLAGS),
        (kernels.FOLDER, kernels.FLAGS),
    ]
    for source, flags in libraries:
        for level in (each for each in LEVELS if each.machine == machine):
            path = folder / place_of(source, flags, level)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            own = [f"-march={level.march}" if each == NATIVE else each for each in flags]
            compile_library(source, [compiler, *FLAGS, *own], path)
            yield path


def pack_chart(tree: Path, out: Path, version: str) -> Path:
    """What its links name is in it, as in `helm package`."""
    path = out / f"kvrelay-chart-{version}.tgz"
    with tarfile.open(path, "w:gz", dereference=True) as archive:
        archive.add(tree / CHART, "kvrelay")
    return path


def compilers() -> dict[str, str]:
    """For each kind of machine that a wheel with libraries can be made for here."""
    found = {platform.machine(): shutil.which("cc") or ""}
    others = {machine: shutil.which(name) or "" for machine, name in CROSS.items()}
    return {machine: program for machine, program in (others | found).items() if program}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").absolute()
    out.mkdir(parents=True, exist_ok=True)
    if old := sorted(each.name for each in out.iterdir()):
        sys.exit(f"{out} has {', '.join(old[:3])} …: give an empty folder")
    with tempfile.TemporaryDirectory(prefix="kvrelay-release-") as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        commit, made_at = check_out(tree)
        project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
        version = project["version"]
        made = [build_wheel(tree, out, made_at), build_sdist(tree, out, made_at)]
        libraries = tree / "engine/libraries"
        for machine, compiler in compilers().items():
            number = len([*compile_libraries(libraries, machine, compiler)])
            made.append(build_native_wheel(tree, out, made_at, machine))
            print(f"{made[-1].name}: {number} libraries")
            shutil.rmtree(libraries)
        for machine in CROSS.keys() - compilers().keys():
            print(f"{machine}: no {CROSS[machine]} here; its wheel is py3-none-any")
        made.append(pack_chart(tree, out, version))
        constraints = out / f"kvrelay-{version}-constraints.txt"
        made.append(Path(shutil.copy(tree / "constraints.txt", constraints)))
        bill = out / f"kvrelay-{version}.cdx.json"
        bill.write_text(bill_of_materials(project, constraints.read_text()))
        made.append(bill)
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made}
        statement = out / f"kvrelay-{version}.provenance.json"
        statement.write_text(provenance(digests, commit, constraints.read_text()))
        digests[statement.name] = hashlib.sha256(statement.read_bytes()).hexdigest()
        lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        (out / "SHA256SUMS").write_text("".join(lines))
    print(f"{len(digests)} files in {out}")


if __name__ == "__main__":
    main()
