"""Writes down what this version says and keeps: `python -m tests.versions.record`.

To be run at a release, before anything is changed after it. What it makes, a file `NNNN.json` with
the next number, is compared with later versions by `test_versions`:

    codec, channel    each message, with every field filled
    named             the fields of every type in them, by name, and the values of enums
    kept, kept_named  likewise of objects that are kept in files and in Redis
    files, stored     what a state directory and a disk tier may hold, and ids of answers there
    redis             each key with its value, as a router writes it

Bytes are in base64, those of files compressed before.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
import tempfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.cluster.hosts.agent import Running
from kvrelay.cluster.processes.life import LifeRecord
from kvrelay.cluster.scaling.decisions import Line
from kvrelay.cluster.state import index_keys, session_keys
from kvrelay.cluster.state.backup import Manifest
from kvrelay.cluster.state.session_store import SessionStore
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.wire import channel, codec
from kvrelay.kvtransfer.agent import DiskRecord, StoreIndex
from kvrelay.kvtransfer.movers.metadata import AgentMetadata
from kvrelay.kvtransfer.store.disk import DiskStore
from kvrelay.router.sessions.session import DeleteSession, SaveSession, SessionRecord
from kvrelay.router.state import IndexView, SaveEvents, SaveLoads, SaveView, TenantLoad
from tests.cluster.api.conftest import MODEL, serve
from tests.cluster.api.responses.asking import user
from tests.cluster.state.stores import Server, Teller, writer
from tests.versions.schemas import Schema, Table, filled

FOLDER = Path(__file__).parent
PACKAGES = (
    *("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router", "cluster"),
)
ANSWERED = {"Hello", "NotUnderstood"}  # by `channel` itself
FAR_S = 4e9  # what is kept here does not expire
TENANT = "a tenant"
SESSION = SessionRecord(
    tenant=TENANT,
    session="s",
    tokens=array("I", [1, 2, 70_000]).tobytes(),
    scope=CacheScope(b"\x00salt", 1),
    retention=Retention(FAR_S),
    num_turns=3,
    worker="decode-0",
    pinned=True,
    age_s=0.0,
    idle_s=0.0,
    version=4,
)
BLOCK = bytes(range(HASH_BYTES))
VIEW = IndexView("decode-0", 3, 7, {Tier.DEVICE: BLOCK * 2, Tier.HOST: BLOCK})
EVENTS = KVEvents("decode-0", 3, 8, (BLOCK,), (), (TierHashes(Tier.HOST, (BLOCK,)),))
LOADS = {TENANT: TenantLoad(2, 1)}
DISK: dict[str, Any] = {"fingerprint": b"f" * 16, "bytes_per_block": 4096, "max_blocks": 4}
DISK_RECORD = DiskRecord(1, BLOCK, 99, FAR_S)

PACKED = {
    "life": LifeRecord,
    "controller": Checkpoint,
    "agent": AgentMetadata,
    "session": session_keys._Row,
    "index": index_keys._Meta,
    "load": TenantLoad,
}
JSON = {"running.json": Running, "manifest.json": Manifest, "scaling.jsonl": Line}
KEPT = PACKED | JSON


def message_types() -> dict[str, dict[str, type]]:
    """Every message that crosses processes, by form and name."""
    root = Path(codec.__file__).parents[2]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if re.search(r"^(channel\.)?register\(", text, re.MULTILINE):
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                importlib.import_module(f"kvrelay.{name}")
    types = {name: decoder.type for name, decoder in codec._decoders.items()}
    of_channels = {n: t for n, t in channel._types.items() if n not in ANSWERED}
    return {"codec": types, "channel": of_channels}


def encoded(form: str, message: Any) -> bytes:
    return codec.encode(message) if form == "codec" else channel.pack(message)


def decoded(form: str, data: bytes) -> Any:
    return codec.decode_message(data) if form == "codec" else channel.unpack(data)


def kept_objects() -> dict[str, bytes]:
    found = {name: msgspec.msgpack.encode(filled(kind)) for name, kind in PACKED.items()}
    return found | {name: msgspec.json.encode(filled(kind)) for name, kind in JSON.items()}


def described(kinds: dict[str, type]) -> dict[str, Schema]:
    """The fields of all types in these, by name."""
    table = Table()
    for kind in kinds.values():
        table.describe(kind)
    return table.named


def files(folder: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """What this version keeps, and ids of answers in it. `folder` is empty."""
    sessions = SessionStore(folder / "sessions.db", MODEL)
    sessions.perform(SaveSession(SESSION))
    sessions.close()
    stored = store_answers(folder / "responses.db")
    store = DiskStore.open(folder / "disk", **DISK)
    store.update(StoreIndex(put=(DISK_RECORD,)))
    store.close()
    names = ("sessions.db", "responses.db", "disk/index.sqlite")
    return {name: (folder / name).read_bytes() for name in names}, stored


def store_answers(path: Path) -> dict[str, str]:
    """One of each kind that clients can ask for again; returns their ids."""
    tokenizer = Tokenizer(resolve_model(DEFAULT_MODEL, progress=lambda _: None))
    store = ResponseStore(path)
    with serve(tokenizer, ApiSettings(), context={"responses": store}) as served:
        called = [
            user("Rain?"),
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "dry"},
        ]
        bodies: dict[str, tuple[str, dict[str, Any]]] = {
            "conversation": ("/v1/conversations", {"items": [user("The word is slate.")]}),
            "response": ("/v1/responses", {"model": MODEL, "input": called}),
        }
        ids = {name: served.post(body, at).json()["id"] for name, (at, body) in bodies.items()}
        spoken = {"input": "Which?", "conversation": ids["conversation"]}
        served.post({"model": MODEL} | spoken, "/v1/responses").raise_for_status()
    store.close()
    return ids


def redis_keys(folder: Path) -> dict[str, Any]:
    """What a router of this version writes into an empty server."""
    server = Server(folder)
    server.start()
    tellers: list[Teller] = []
    try:
        teller = writer(tellers, server, "router-1")
        for change in (
            SaveSession(SESSION),
            DeleteSession(TENANT, "closed", 5),
            SaveView(VIEW),
            SaveEvents(EVENTS),
            SaveLoads(LOADS),
        ):
            teller.store.perform(change)
        redis = Redis.from_url(server.url)
        load = b"test:model:load:run-1:router-1"
        teller.wait(lambda: len(redis.get(load) or b"") > 1 and _has(redis, b":events"))
        return {key.decode(): _dumped(redis, key) for key in sorted(redis.keys("*"))}
    finally:
        for each in tellers:
            each.close()
        server.kill()


def _has(redis: Redis, what: bytes) -> bool:
    return any(what in key for key in redis.keys("*"))


def _dumped(redis: Redis, key: bytes) -> dict[str, Any]:
    kind = redis.type(key).decode()
    if kind == "string":
        return {kind: text(redis.get(key))}
    if kind == "set":
        return {kind: [text(each) for each in sorted(redis.smembers(key))]}
    if kind == "hash":
        return {kind: {k.decode(): text(v) for k, v in redis.hgetall(key).items()}}
    assert kind == "stream", kind
    return {kind: [{k.decode(): text(v) for k, v in e.items()} for _, e in redis.xrange(key)]}


def text(data: bytes | None) -> str:
    assert data is not None
    return base64.b64encode(data).decode()


def recorded() -> dict[str, Any]:
    """Collects all that a file of a release has."""
    types = message_types()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "redis").mkdir()
        kept, stored = files(Path(folder))
        shared = redis_keys(Path(folder) / "redis")
    return {
        "protocol": {"codec": codec.PROTOCOL, "channel": channel.PROTOCOL},
        **{
            form: {n: text(encoded(form, filled(t))) for n, t in sorted(kinds.items())}
            for form, kinds in types.items()
        },
        "named": dict(sorted(described(types["codec"] | types["channel"]).items())),
        "kept": {name: text(data) for name, data in kept_objects().items()},
        "kept_named": dict(sorted(described(KEPT).items())),
        "files": {name: text(zlib.compress(data, 9)) for name, data in kept.items()},
        "stored": stored,
        "redis": shared,
    }


def latest() -> Path:
    """The last release that was recorded."""
    return max(FOLDER.glob("[0-9][0-9][0-9][0-9].json"))


def _lines(part: dict[str, Any]) -> str:
    """One for each entry, so that two records can be compared."""
    compact = (",", ":")
    return ",\n".join(
        f"{json.dumps(name)}:{json.dumps(entry, separators=compact)}"
        for name, entry in part.items()
    )


def main() -> None:
    numbers = [int(path.stem) for path in FOLDER.glob("[0-9][0-9][0-9][0-9].json")]
    path = FOLDER / f"{max(numbers, default=0) + 1:04}.json"
    parts = (f"{json.dumps(k)}: {{\n{_lines(v)}\n}}" for k, v in recorded().items())
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
