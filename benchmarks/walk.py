"""Which files of the product a prompt passes until its first token.

`python -m benchmarks.walk [--json FILE]` serves the default model through a prefill worker and a
decode worker, sends one prompt that nothing has cached, and lists the Python files that it passes:
those with a function that was called with the request, in an argument or `self`. That is its text,
its token ids or its id, or an object that holds one of them within two attributes or elements.
Counted are the process of API and router and the prefill worker, whose token it is; what the decode
worker does meanwhile is left out. The number of files in which any function ran is told beside it;
it has what happens at intervals (statistics, probes), too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
from tokenizers import Tokenizer

from benchmarks.serving.served import Served
from cluster.config import Config
from cluster.worker.build import prepare_model

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kvtransfer", "prefill_worker", "decode_worker", "router", "cluster", "lab")
MODEL = "smollm2-135m"
MARKER = "zebra quince"  # how the prompt begins
PROMPT = MARKER + " " + " ".join(f"word{i}" for i in range(200))
DECODE_WORKER = "decode_worker/worker.py"
POLL_S = 0.02

# Runs at the start of every process of the cluster: notes the files whose functions are called
# while the file `on` exists, and writes them down once it does not. Request ids are made to begin
# with ID meanwhile, so that every process knows them.
RECORDER = """
import collections, itertools, os, sys, threading, time, uuid
folder, root, recording = os.environ["WALK_FOLDER"], ROOT, False
ran, passed = {}, {}
ID = "5eed0b5e55ed5eed"
PLAIN = (int, float, bool, type(None), type, type(os), type(len), type(lambda: 0))
LISTS = (list, tuple, set, frozenset, collections.deque)
make_uuid = uuid.uuid4

def marked_uuid():
    made = make_uuid()
    return uuid.UUID(ID + made.hex[len(ID):]) if recording else made

uuid.uuid4 = marked_uuid

def carries(value, hops=2):
    if isinstance(value, PLAIN):
        return False
    if isinstance(value, str):
        return MARKER in value or ID in value
    if isinstance(value, (bytes, bytearray, memoryview)):
        whole = bytes(value)
        return ID.encode() in whole or MARKER.encode() in whole or any(i in whole for i in PACKED)
    if type(value).__module__.partition(".")[0] in ("numpy", "torch", "array"):
        return getattr(value, "ndim", 1) == 1 and value[:8].tolist() == IDS
    if isinstance(value, LISTS):
        if list(itertools.islice(value, 8)) == IDS:
            return True
        inner = itertools.islice(value, 64)
    elif isinstance(value, dict):
        inner = itertools.chain.from_iterable(itertools.islice(value.items(), 64))
    else:
        inner = [getattr(value, n, None) for kind in type(value).__mro__ for n in slots(kind)]
        inner += getattr(value, "__dict__", {}).values()
    return hops > 0 and any(carries(each, hops - 1) for each in list(inner))

def slots(kind):
    names = kind.__dict__.get("__slots__", ())
    own = [names] if isinstance(names, str) else [*names]
    own += kind.__dict__.get("__struct_fields__", ())
    return [n for n in own if not n.startswith("__")]

def note(frame, event, _):
    if not recording or event != "call":
        return
    code = frame.f_code
    name = code.co_filename
    if name in passed or not name.startswith(root):
        return
    now = time.time()
    ran.setdefault(name, now)
    num = code.co_argcount + code.co_kwonlyargcount
    num += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    found = frame.f_locals
    for argument in code.co_varnames[:num]:
        try:
            if carries(found.get(argument)):
                passed.setdefault(name, now)
                return
        except Exception:  # it changed meanwhile
            pass

def watch():
    global recording
    while True:
        on = os.path.exists(os.path.join(folder, "on"))
        if recording and not on:
            with open(os.path.join(folder, f"{os.getpid()}.seen"), "w") as out:
                for name, at in [*ran.items()]:
                    out.write(f"{at} {passed.get(name, 0)} {name}\\n")
        recording = on
        time.sleep(POLL_S)

threading.setprofile(note)
sys.setprofile(note)
threading.Thread(target=watch, daemon=True).start()
"""


def recorder(ids: list[int]) -> str:
    """The text of RECORDER for a prompt that begins with these 8 token ids."""
    packed = [b"".join(map(msgspec.msgpack.encode, ids))]
    packed += [np.array(ids, dtype).tobytes() for dtype in ("<i4", "<i8")]
    known = {"POLL_S": POLL_S, "MARKER": MARKER, "IDS": ids, "PACKED": packed, "ROOT": f"{ROOT}/"}
    return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + RECORDER


def walk() -> tuple[list[str], int]:
    """The files that the prompt passes, relative to the repository and in the order in which it
    enters them first, and how many files ran at all."""
    model = prepare_model(Config(), 1, lambda _: None)
    tokenizer = Tokenizer.from_file(str(Path(model.path) / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        code = recorder(tokenizer.encode(PROMPT).ids[:8])
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
                until = time.time()
            Path(folder, "on").unlink()
            time.sleep(10 * POLL_S)
            processes = [_entered(seen, until) for seen in Path(folder).glob("*.seen")]
    processes = [entered for entered in processes if DECODE_WORKER not in entered]
    first: dict[str, float] = {}
    for entered in processes:
        for name, at in entered.items():
            if at:
                first[name] = min(at, first.get(name, at))
    ran = {name for entered in processes for name in entered}
    return sorted(first, key=lambda name: first[name]), len(ran)


def _entered(path: Path, until: float) -> dict[str, float]:
    """File of the product -> when the request first entered it in this process, of those in
    which anything ran by `until`; 0: it did not enter."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        ran, passed, name = line.split(" ", 2)
        relative = os.path.relpath(name, ROOT)
        if relative.split("/")[0] in PACKAGES and float(ran) <= until:
            found[relative] = float(passed) if float(passed) <= until else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files, num_ran = walk()
    print(*files, sep="\n")
    print(f"{len(files)} files that the prompt passes; {num_ran} in which anything ran")
    if arguments.json:
        found = {"passed": files, "num_ran": num_ran}
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
