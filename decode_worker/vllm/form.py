"""The form that KV of a model has at vLLM, as vLLM says it: what is planned, and whether its blocks
can be copied.

It is asked of the vLLM that will serve (`ask`, in a process of engine.python), since only that
knows its models, backends, quantizations and versions. That takes as long as vLLM's imports: the
answer is kept in the cache directory, by all that it depends on, so that a server, its workers and
a later start ask once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvrelay.decode_worker.vllm.arguments import asked_arguments, environment
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.files import given_folder
from kvrelay.engine.identity import QUANTIZATION_FILES, QUANTIZATION_OF_VLLM, telling_arguments
from kvrelay.engine.support import Trait
from kvrelay.worker.kv_plan import BuildError

ASK_S = 600.0  # vLLM's imports, on a machine that is busy
MODULE = "kvrelay.decode_worker.vllm.ask"
MOST_TOKENS = 1 << 20  # where a model does not say how many positions it has
VERSION = 3  # raised where something else is asked


class GroupForm(Struct, frozen=True):
    """Layers that have one block table."""

    kind: str  # full, window or state
    num_layers: int
    window: int  # tokens; 0: all
    block_size: int
    dtype: str


class Form(Struct, frozen=True):
    """All sizes are of the whole model, whatever the number of processes that share it."""

    version: str  # vLLM's
    architecture: str = ""
    dtype: str = ""  # that it computes in
    max_model_len: int = 0  # positions that the model has; 0: not known
    block_size: int = 0
    num_kv_heads: int = 1
    weights_bytes: int = 0  # 0: not known before they are loaded
    bytes_per_block: int = 0  # in vLLM's memory; 0: not known
    groups: tuple[GroupForm, ...] = ()
    why_not: str = ""  # why blocks are not copied, in vLLM's terms; "": they can be
    why_all: str = ""  # why layers with windows keep all tokens where they are; "": they do not
    error: str = ""  # what vLLM says of the settings; "": it takes them

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that groups of layers read whose blocks are copied, 0: all."""
        return (0,) if self.why_not else tuple(each.window for each in self.groups) or (0,)

    def traits(self, engine: EngineSection) -> frozenset[Trait]:
        """Those of a worker that serves it."""
        found = {Trait.VLLM}
        if engine.is_context_parallel:
            found.add(Trait.CONTEXT_PARALLEL)
        if self.why_not == "states":
            found.add(Trait.STATES)
        elif self.why_not:
            found.add(Trait.OTHER_KV)
        return frozenset(found)


def form_of(path: Path, model: ModelSection, engine: EngineSection, *, on_gpu: bool) -> Form:
    """`engine`: as it is set for this machine. Raises BuildError where vLLM is not there, or does
    not take the settings."""
    asked = asked_arguments(model, engine, path, on_gpu=on_gpu)
    variables = environment(on_gpu=on_gpu)
    kept = _place(path, engine.python, asked, variables)
    form = None if kept is None else _read(kept)
    if form is None:
        form = _once(kept, engine.python, asked, variables)
    if form.error:
        raise BuildError(f"vLLM {form.version} does not serve {path.name}: {form.error}")
    return form


def elsewhere(path: Path) -> Form:
    """What is known of a model on a machine that has no vLLM, and no workers of it: they say the
    rest when they start. Raises BuildError."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{path / 'config.json'}: {error}") from error
    text = config.get("text_config") or {}
    lengths = [each.get("max_position_embeddings") for each in (text, config)]
    return Form("", max_model_len=next((each for each in lengths if each), MOST_TOKENS))


def ask(python: str, asked: Mapping[str, Any], variables: Mapping[str, str]) -> Form:
    """Raises BuildError where no answer comes."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "question.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(asked, default=str), encoding="utf-8")
        words = ["python", "-m", MODULE, str(question), str(answer)]
        env = {**os.environ, **variables}
        try:
            if python != sys.executable:
                from kvrelay.worker.guardian import in_environment  # not where vLLM computes

                words, env = in_environment(python, words, env)
            done = subprocess.run(
                [python, *words[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ASK_S,
                check=False,
            )
            return msgspec.json.decode(answer.read_bytes(), type=Form)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{python} has not said for {ASK_S:g} s what vLLM keeps") from error
        except FileNotFoundError as error:
            if error.filename == str(answer):
                raise BuildError(_why_none(python, done.stderr)) from error
            raise BuildError(f"{python} does not start: {error.strerror}") from error
        except (OSError, msgspec.DecodeError) as error:
            raise BuildError(f"{python} does not say what vLLM keeps: {error}") from error


def _why_none(python: str, stderr: str) -> str:
    lines = [each.strip() for each in stderr.splitlines() if each.strip()] or ["it says nothing"]
    if "No module named 'vllm'" in lines[-1]:
        return f"engine.python = '{python}' has no vLLM: {python} -m pip install vllm"
    return f"engine.python = '{python}' cannot ask vLLM: {lines[-1]}"


def _once(
    kept: Path | None, python: str, asked: Mapping[str, Any], variables: Mapping[str, str]
) -> Form:
    """Asks, unless another process of this machine has done so meanwhile."""
    if kept is None:
        return ask(python, asked, variables)
    from filelock import FileLock, Timeout

    try:
        with FileLock(f"{kept}.lock", timeout=ASK_S):
            form = _read(kept)
            if form is None:
                form = ask(python, asked, variables)
                fresh = kept.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(msgspec.json.encode(form))
                fresh.replace(kept)
            return form
    except Timeout as error:
        raise BuildError(f"{kept}.lock is held: another process asks vLLM") from error


def _read(kept: Path) -> Form | None:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Form)
    except (OSError, msgspec.MsgspecError):
        return None


def _place(
    path: Path, python: str, asked: Mapping[str, Any], variables: Mapping[str, str]
) -> Path | None:
    """Where the answer is kept; None: nowhere, since not all that it depends on is known."""
    installed = Path(python).parent.parent.glob("lib/python*/site-packages/vllm*.dist-info")
    versions = sorted((each.name, each.stat().st_mtime_ns) for each in installed)
    if not versions:
        return None
    own = {name: value for name, value in asked.items() if name != "model"}
    about = [VERSION, python, versions, telling_arguments(own), sorted(variables.items())]
    digest = blake2b(json.dumps(about).encode(), digest_size=16)
    names = (*QUANTIZATION_FILES, *QUANTIZATION_OF_VLLM)
    for file in sorted([*path.glob("*.py"), *(path / name for name in names)]):
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    try:
        return given_folder(default_cache_dir() / "vllm") / f"{digest.hexdigest()}.json"
    except OSError:  # no place to keep it, or another user's
        return None
