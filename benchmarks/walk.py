"""Which files of the product three things pass: a prompt, a new worker, a block of KV.

`python -m benchmarks.walk [prompt|scale-up|block] [--json FILE]` serves the default model through a
prefill worker and a decode worker, and lists the Python files with a function that was called with
the thing, in an argument or `self`: with what marks it, or an object that holds that within two
attributes or elements.

* prompt, until its first token: marked by its text, token ids and request id. The decode worker,
  which prepares to read the KV meanwhile, is left out.
* scale-up, from the decision for a third worker until that is up: marked by its name, and by
  objects of the class Decision, in arguments alone. Its own processes, guardian and worker, all
  of which know its name, are left out.
* block, from the prefill worker to the decode worker: marked by the messages between both and by
  the effects that copy blocks.

The number of files in which any function ran stands beside it; that has what happens at intervals
(statistics, probes), too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import msgspec
import numpy as np
from tokenizers import Tokenizer

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.kvtransfer import messages as kv_messages
from tests.structure import PACKAGES, ROOT

MODEL = "smollm2-135m"
MARKER = "zebra quince"  # how the prompt begins
ID = "5eed0b5e55ed5eed"  # how request ids begin
PROMPT = MARKER + " " + " ".join(f"word{i}" for i in range(200))
DECODE_WORKER = "decode-0"  # in its command line
NEW_WORKERS = ("prefill-1", "decode-1", "prefill-2", "decode-2")  # one of them
SCALING = {"scaling.enabled": True, "scaling.min_workers": 3, "scaling.max_workers": 3}
WORKER_TIMEOUT_S = 120.0
POLL_S = 0.02

# Runs at the start of every process of the cluster: notes the files whose functions are called
# while the file `on` exists, and writes them down once it does not. Request ids are made to begin
# with ID meanwhile, so that every process knows them. A worker's process forks as it starts.
RECORDER = """
import collections, itertools, os, sys, threading, time, uuid
folder, root, recording = os.environ["WALK_FOLDER"], ROOT, False
ran, passed = {}, {}
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
        return any(text in value for text in TEXTS)
    if isinstance(value, (bytes, bytearray, memoryview)):
        whole = bytes(value)
        return any(text.encode() in whole for text in TEXTS) or any(i in whole for i in PACKED)
    if type(value).__name__ in KINDS:
        return True
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
        if argument == "self" and not SELF:
            continue
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
                command = open("/proc/self/cmdline").read().split("\\0")
                out.write(" ".join(command).replace("\\n", " ") + "\\n")
                for name, at in [*ran.items()]:
                    out.write(f"{at} {passed.get(name, 0)} {name}\\n")
        recording = on
        time.sleep(POLL_S)

threading.setprofile(note)
sys.setprofile(note)

def start():
    threading.Thread(target=watch, daemon=True).start()

os.register_at_fork(after_in_child=start)
start()
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """What marks a thing, and what makes it go: `make(url, on)` returns when it has arrived."""

    make: Callable[[str, Path], float]
    texts: Sequence[str] = ()
    ids: Sequence[int] = ()
    kinds: Sequence[str] = ()  # names of classes
    settings: Mapping[str, object] = field(default_factory=dict)
    is_at_start: bool = False  # it goes as soon as there is a server
    leaves_out: Sequence[str] = ()  # processes with one of these in their command line
    counts_self: bool = True  # False: only arguments count

    def recorder(self) -> str:
        packed = [b"".join(map(msgspec.msgpack.encode, self.ids))]
        packed += [np.array(self.ids, dtype).tobytes() for dtype in ("<i4", "<i8")]
        known = {
            "POLL_S": POLL_S,
            "ID": ID,
            "ROOT": f"{ROOT}/",
            "TEXTS": [*self.texts],
            "IDS": [*self.ids] or None,
            "PACKED": packed if self.ids else [],
            "KINDS": {*self.kinds},
            "SELF": self.counts_self,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + RECORDER

    def run(self) -> tuple[list[str], int]:
        """The files that it passes, relative to the repository and in the order in which it enters
        them first, and how many files ran at all."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(self.recorder(), encoding="utf-8")
            os.environ["WALK_FOLDER"] = folder
            os.environ["PYTHONPATH"] = f"{folder}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
            on = Path(folder, "on")
            if self.is_at_start:
                on.touch()
            with Served({"router.policy": "round_robin", **self.settings}) as served:
                until = self.make(served.url, on)
                on.unlink()
                time.sleep(20 * POLL_S)
                seen = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.seen")]
        first: dict[str, float] = {}
        ran: set[str] = set()
        for text in seen:
            command, _, lines = text.partition("\n")
            if any(each in command for each in self.leaves_out):
                continue
            for name, at in _entered(lines, until).items():
                ran.add(name)
                if at:
                    first[name] = min(at, first.get(name, at))
        return sorted(first, key=lambda name: first[name]), len(ran)


def send_prompt(url: str, on: Path, whole: bool = False) -> float:
    """Sends PROMPT, when connections exist, until its first token or until its end."""
    url = f"{url}/v1/completions"
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 8}
    httpx.post(url, json=body, timeout=60).raise_for_status()
    body |= {"prompt": PROMPT, "stream": True}
    on.touch()
    time.sleep(5 * POLL_S)
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        for _ in lines if whole else ():
            pass
        return time.time()


def wait_for_worker(url: str, _: Path) -> float:
    deadline = time.time() + WORKER_TIMEOUT_S
    while time.time() < deadline:
        workers = httpx.get(f"{url}/status", timeout=60, auth=OwnKey()).json()["workers"]
        if any(each["worker"] in NEW_WORKERS and each["state"] == "up" for each in workers):
            return time.time()
        time.sleep(0.1)
    raise RuntimeError(f"no third worker is up after {WORKER_TIMEOUT_S:g} s: {workers}")


def walks() -> dict[str, Walk]:
    model = prepare_model(Config(), 1, lambda _: None)
    tokenizer = Tokenizer.from_file(str(Path(model.path) / "tokenizer.json"))
    messages = [name for name in vars(kv_messages) if name.startswith("KV")]
    return {
        "prompt": Walk(
            send_prompt,
            texts=(MARKER, ID),
            ids=tokenizer.encode(PROMPT).ids[:8],
            leaves_out=(DECODE_WORKER,),
        ),
        "scale-up": Walk(
            wait_for_worker,
            texts=NEW_WORKERS,
            kinds=("Decision",),
            settings=SCALING,
            is_at_start=True,
            counts_self=False,
            leaves_out=NEW_WORKERS,
        ),
        "block": Walk(
            partial(send_prompt, whole=True), kinds=(*messages, "CopyBlocks", "CopyDone")
        ),
    }


def _entered(lines: str, until: float) -> dict[str, float]:
    """File of the product -> when the thing first entered it in this process, of those in
    which anything ran by `until`; 0: it did not enter."""
    found = {}
    for line in lines.splitlines():
        ran, passed, name = line.split(" ", 2)
        relative = os.path.relpath(os.path.realpath(name), ROOT)
        if relative.split("/")[0] in PACKAGES and float(ran) <= until:
            found[relative] = float(passed) if float(passed) <= until else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("walk", nargs="?", choices=["prompt", "scale-up", "block"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, walk in walks().items():
        if arguments.walk in (None, name):
            files, num_ran = walk.run()
            lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file in files}
            print(*(f"{count:6,} {file}" for file, count in lines.items()), sep="\n")
            what = f"{len(files)} files, {sum(lines.values()):,} lines"
            print(f"{name}: passes {what}; {num_ran} files in which anything ran")
            found[name] = {"passed": files, "lines": sum(lines.values()), "num_ran": num_ran}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
