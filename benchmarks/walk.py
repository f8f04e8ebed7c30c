"""Which files of the product a prompt passes until its first token.

`python -m benchmarks.walk [--json FILE]` serves the default model through a prefill worker and a
decode worker, sends one prompt that nothing has cached, and lists every Python file of the product
in which a function ran between the request and its first token: in the process of API and router,
and in the prefill worker, whose token it is. What the decode worker does meanwhile is left out.
Files of what happens at intervals (statistics, probes) are among them if it happened just then.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.serving.served import Served

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kvtransfer", "prefill_worker", "decode_worker", "router", "cluster", "lab")
MODEL = "smollm2-135m"
PROMPT = " ".join(f"word{i}" for i in range(200))
DECODE_WORKER = "decode_worker/worker.py"
POLL_S = 0.02

# Runs at the start of every process of the cluster: notes the files whose functions are called
# while the file `on` exists, and writes them down once it does not.
RECORDER = """
import os, sys, threading, time
folder, seen, recording = os.environ["WALK_FOLDER"], {}, False

def note(frame, event, _):
    if recording and event == "call":
        seen.setdefault(frame.f_code.co_filename, time.time())

def watch():
    global recording
    while True:
        on = os.path.exists(os.path.join(folder, "on"))
        if recording and not on:
            with open(os.path.join(folder, f"{os.getpid()}.seen"), "w") as out:
                out.writelines(f"{at} {name}\\n" for name, at in list(seen.items()))
        recording = on
        time.sleep(POLL_S)

threading.setprofile(note)
sys.setprofile(note)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
"""


def walk() -> list[str]:
    """Paths relative to the repository, in the order in which they were first entered."""
    with tempfile.TemporaryDirectory() as folder:
        code = RECORDER.replace("POLL_S", str(POLL_S))
        Path(folder, "sitecustomize.py").write_text(code, encoding="utf-8")
        os.environ["WALK_FOLDER"] = folder
        os.environ["PYTHONPATH"] = f"{folder}:{ROOT}"
        with Served({"router.policy": "round_robin"}) as served:
            url = f"{served.url}/v1/completions"
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 8}
            httpx.post(url, json=body, timeout=60).raise_for_status()  # connections exist now
            body |= {"prompt": PROMPT, "stream": True}
            Path(folder, "on").touch()
            time.sleep(5 * POLL_S)
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                next(answer.iter_lines())
            Path(folder, "on").unlink()
            time.sleep(10 * POLL_S)
            processes = [_entered(seen) for seen in Path(folder).glob("*.seen")]
    first: dict[str, float] = {}
    for entered in processes:
        if DECODE_WORKER not in entered:
            for name, at in entered.items():
                first[name] = min(at, first.get(name, at))
    return sorted(first, key=lambda name: first[name])


def _entered(path: Path) -> dict[str, float]:
    """File of the product -> when a function of it was first called in this process."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        at, _, name = line.partition(" ")
        relative = os.path.relpath(name, ROOT)
        if relative.split("/")[0] in PACKAGES:
            found[relative] = float(at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = walk()
    print(*files, sep="\n")
    print(f"{len(files)} files")
    if arguments.json:
        arguments.json.write_text(json.dumps(files, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
