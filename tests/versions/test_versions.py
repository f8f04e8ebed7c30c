"""This version and the last release understand each other: what each of them sends and keeps.

What to do where one of these fails is said in docs/formats.md.
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import time
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

import kvrelay.engine
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.responses.store import ResponseStore
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.state.session_store import SessionStore
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.wire import channel, codec
from kvrelay.kvtransfer.store.disk import DiskStore
from kvrelay.router.sessions.session import SessionsUpdated
from kvrelay.router.state import IndexLoaded, OthersLoads
from kvrelay.router.status import STATS_FACTS
from tests.cluster.api.conftest import ANSWER, serve
from tests.cluster.api.conftest import tokenizer as tokenizer
from tests.cluster.api.responses.asking import ask
from tests.cluster.api.tools.templates import prompt
from tests.cluster.state.stores import Server, opened
from tests.versions import record
from tests.versions.schemas import NOT_SENT, Reader, Schema, filled, sparse

LAST: dict[str, Any] = json.loads(record.latest().read_text(encoding="utf-8"))
NOW = record.message_types()
THEN = Reader(LAST["named"])
THEN_KEPT = Reader(LAST["kept_named"])
# Only a supervisor and what it has started say these, which are of one version: it is replaced
# first, and only routers outlive that.
OF_ONE_VERSION = {
    "Ending": "by a supervisor to its controller",
    "PreparedModel": "likewise; PreparedModels now",
    "StartRouter": "by a controller to its supervisor, which starts routers by itself now",
    "StopRouter": "likewise",
    "RouterFailed": "by a router that starts to its supervisor; GaveUp now",
    "RouterOrder": "by a supervisor to a router that it starts",
}
ALL = [
    (form, name)
    for form in ("codec", "channel")
    for name in LAST[form]
    if name not in OF_ONE_VERSION
]

OF_OTHERS = {"EventBatch", "KVCacheEvent"}  # KV events have vLLM's form, and no process reads them
POSITIONAL = {
    # Arrays, to which fields are appended with a default, and never anything else: see below.
    "AgentMetadata": "the last release reads no other form",
    "Space": "likewise",
    "_Row": "of a session in Redis, which routers of both versions share",
    "_Meta": "of a view of the index in Redis, likewise",
    # Pairs
    "TokenDelta.weights": "(position, name): where weights change within a request",
    "Output.weights": "(index, name): likewise",
    "TokenLogprobs.top": "(token, logprob): once for each alternative of each token",
    "RouterProcessSpec.source": "(path, overrides): both or none",
    "ModelConfig.weight_scales": "(matrix, factor): both or none",
    "Decision.flips": "(worker, role): in a log that only its own version replays",
}
# Fields that no version needs, and why: the controller, which sends these, never filled them in.
GONE = {
    f"WorkerStatus.{name}": "what a worker says is merged by the router's process that has heard it"
    for name in STATS_FACTS.keys() & LAST["named"]["WorkerStatus"]["fields"].keys()
}
INNER_OF_ONE_VERSION = {"RouterProcessSpec", "ServedModel"}  # within RouterOrder
PICKLES = {
    "engine/model/parallel": "ranks of one worker, once they have compared versions",
    "cluster/api/constraints": "a process and its own child",
}


# By whom and when it is sent. What one version starts is of that version; a supervisor may find
# routers of an earlier one.
NEW_IN_CHANNELS = {
    "Leads": "by a supervisor",
    "Follow": "by a supervisor",
    "RestartStatus": "by a supervisor",
    "PreparedModels": "by a supervisor to its controller",
    "Handover": "by a supervisor to the one that it becomes, after a trial that reads one",
    "ChangeModels": "by a router whose supervisor has said that it is of the same version",
    "LoadRouter": "by a supervisor to a process that it has started",
    "RouterLoaded": "by a process that was told to load",
    "UseModels": "by a supervisor to routers that it has started",
    "ModelsUsed": "by a router that was told to",
    "ControllerListens": "by a controller to its supervisor",
}


def unpacked(text: str) -> bytes:
    return base64.b64decode(text)


def body_of(form: str, data: bytes) -> bytes:
    """The fields of a message as it is sent."""
    if form == "channel":  # a greeting comes first, a frame itself
        data = data[len(channel.PREAMBLE) :]
        after = channel.LENGTH_BYTES + int.from_bytes(data[: channel.LENGTH_BYTES], "big")
        data = data[after + channel.LENGTH_BYTES :]
    _, fields = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
    return bytes(fields)


def common(one: Any, other: Any) -> Any:
    """What of `one` has a counterpart in `other`: fields come and go."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: common(each, other[key]) for key, each in one.items() if key in other}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [common(a, b) for a, b in zip(one, other, strict=True)]
    return one


@pytest.mark.parametrize(("form", "name"), ALL)
def test_a_message_of_the_last_release_is_understood(form: str, name: str) -> None:
    assert name in NOW[form], "the last release sends it still: it has to be there once more"
    data = unpacked(LAST[form][name])
    message = record.decoded(form, data)
    now, then = (
        msgspec.msgpack.decode(body_of(form, each), strict=False)
        for each in (record.encoded(form, message), data)
    )
    assert common(now, then) == common(then, now)
    least = THEN.least({"kind": "named", "name": name})
    msgspec.convert(least, NOW[form][name], dec_hook=lambda _, text: Path(text))


@pytest.mark.parametrize(("form", "name"), ALL)
def test_the_last_release_understands_a_message(form: str, name: str) -> None:
    for make in (filled, sparse):
        THEN.decode(name, body_of(form, record.encoded(form, make(NOW[form][name]))))


def test_a_message_that_the_last_release_does_not_know_is_not_sent_to_it() -> None:
    spoken = LAST["protocol"].get("codec", 1)  # the first had no number yet
    new = NOW["codec"].keys() - LAST["codec"].keys()
    to_all = [name for name in new if codec.since(NOW["codec"][name]) <= spoken]
    assert to_all == [], f"register these with since={spoken + 1}"


def test_a_new_message_of_a_channel_is_not_sent_to_the_last_release() -> None:
    """Which ends the channel, and the process at its other end, again and again."""
    own = {n for n, kind in NOW["channel"].items() if kind.__module__.startswith("kvrelay.")}
    new = own - LAST["channel"].keys()  # tests have messages, too
    assert new == set(NEW_IN_CHANNELS), "say in NEW_IN_CHANNELS why the last release gets none"


def test_fields_of_the_last_release_are_still_sent() -> None:
    """Another version that misses one takes its default, which means something else."""
    now = record.described(NOW["codec"] | NOW["channel"]) | record.described(record.KEPT)
    then = LAST["named"] | LAST["kept_named"]
    gone = {
        f"{name}.{field}"
        for name, schema in then.items()
        if name not in OF_ONE_VERSION.keys() | INNER_OF_ONE_VERSION
        for field in schema.get("fields", {}).keys() - now[name].get("fields", {}).keys()
    }
    assert gone == set(GONE), "keep it for one release more, or say in GONE why nobody misses it"


def test_enums_have_the_values_of_the_last_release() -> None:
    """A message with another value is lost to the last release as a whole."""
    now = record.described(NOW["codec"] | NOW["channel"])
    enums = {name for name, schema in LAST["named"].items() if schema["kind"] == "enum"}
    sent = {n: [v for v in now[n]["values"] if v not in NOT_SENT.get(n, ())] for n in enums}
    assert sent == {n: LAST["named"][n]["values"] for n in enums}


@pytest.mark.parametrize("name", list(record.KEPT))
def test_an_object_that_was_kept_is_read_by_the_next_version_and_the_last(name: str) -> None:
    kind, data = record.KEPT[name], unpacked(LAST["kept"][name])
    form = msgspec.json if name in record.JSON else msgspec.msgpack
    now = form.decode(form.encode(form.decode(data, type=kind)))
    then = form.decode(data)
    assert common(now, then) == common(then, now)
    read = THEN_KEPT.decode_json if name in record.JSON else THEN_KEPT.decode
    read(kind.__name__, record.kept_objects()[name])


def test_files_of_the_last_release_are_read(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, text in LAST["files"].items():
        (tmp_path / name).write_bytes(zlib.decompress(unpacked(text)))
    with (tmp_path / "disk" / "blocks.kv").open("wb") as blocks:
        blocks.truncate(record.DISK["bytes_per_block"] * record.DISK["max_blocks"])
    with closing(SessionStore(tmp_path / "sessions.db", record.MODEL)) as sessions:
        (session,) = sessions.records
    assert session.tokens == record.SESSION.tokens
    assert session.scope == record.SESSION.scope
    with closing(DiskStore.open(tmp_path / "disk", **record.DISK)) as disk:
        assert [(r.block_hash, r.checksum) for r in disk.records] == [
            (record.BLOCK, record.DISK_RECORD.checksum)
        ]
        assert disk.warnings == []


def test_answers_of_the_last_release_are_found_and_continued(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "responses.db"
    path.write_bytes(zlib.decompress(unpacked(LAST["files"]["responses.db"])))
    with closing(sqlite3.connect(path)) as database, database:  # as if it were of today
        database.execute("UPDATE responses SET created_at = ?", (time.time(),))
    store, ids = ResponseStore(path), LAST["stored"]
    with (
        closing(store),
        serve(tokenizer, ApiSettings(), context={"responses": store}) as served,
    ):
        assert store.is_durable
        found = served.http.get(f"/v1/responses/{ids['response']}").json()
        assert found["output"][0]["content"][0]["text"] == ANSWER
        ask(served, "Thanks", previous_response_id=ids["response"])
        assert "dry" in prompt(served)
        ask(served, "Which?", conversation=ids["conversation"])
        assert prompt(served).count("Which?") == 2
        assert "slate" in prompt(served)


def tables(path: Path) -> tuple[int, dict[str, list[Any]]]:
    """The version of a database, and the columns of its tables."""
    with closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        names = [
            n for (n,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        return version, {n: database.execute(f"PRAGMA table_info({n})").fetchall() for n in names}


def test_files_are_such_as_the_last_release_reads_and_writes(tmp_path: Path) -> None:
    """Columns may be added, where they have a default; a raised version is refused there."""
    then, now = tmp_path / "then", tmp_path / "now"
    now.mkdir()
    record.files(now)
    for name, text in LAST["files"].items():
        (then / name).parent.mkdir(parents=True, exist_ok=True)
        (then / name).write_bytes(zlib.decompress(unpacked(text)))
        (old_version, old), (new_version, new) = tables(then / name), tables(now / name)
        assert new_version == old_version, name
        for table, columns in old.items():
            assert new[table][: len(columns)] == columns, (name, table)
            for _, column, _, not_null, default, _ in new[table][len(columns) :]:
                assert default is not None or not not_null, (name, table, column)


def restored(redis: Redis, keys: dict[str, Any]) -> None:
    for key, kept in keys.items():
        ((kind, value),) = kept.items()
        match kind:
            case "string":
                redis.set(key, unpacked(value))
            case "set":
                redis.sadd(key, *map(unpacked, value))
            case "hash":
                redis.hset(key, mapping={k: unpacked(v) for k, v in value.items()})
            case "stream":
                for entry in value:
                    redis.xadd(key, {k: unpacked(v) for k, v in entry.items()})


def test_what_the_last_release_has_shared_is_read(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    restored(Redis.from_url(server.url), LAST["redis"])
    tellers: list[Any] = []
    try:
        teller = opened(tellers, server, "router-0", routers=("router-0", "router-1"))
        teller.wait(lambda: any(m.tenants for m in teller.of(OthersLoads)))
        updates = teller.of(SessionsUpdated)
        (session,) = [each for update in updates for each in update.records]
        assert (session.tokens, session.pinned) == (record.SESSION.tokens, True)
        assert [each for update in updates for each in update.closed] == [
            (record.TENANT, "closed", 5)
        ]
        assert teller.of(IndexLoaded) == [IndexLoaded((record.VIEW,), (record.EVENTS,))]
        assert teller.of(OthersLoads)[0].tenants == record.LOADS
        assert teller.store.status().unreadable == 0
    finally:
        for each in tellers:
            each.close()
        server.kill()


def test_what_is_shared_has_the_keys_and_fields_of_the_last_release(tmp_path: Path) -> None:
    now = record.redis_keys(tmp_path)
    assert now.keys() >= LAST["redis"].keys()
    for key, then in LAST["redis"].items():
        assert now[key].keys() == then.keys(), key
        if "hash" in then:
            assert now[key]["hash"].keys() >= then["hash"].keys(), key
        if "stream" in then:
            assert now[key]["stream"][0].keys() >= then["stream"][0].keys(), key


def positional(named: dict[str, Schema]) -> set[str]:
    """Objects that are arrays, and fields with tuples of several parts."""
    arrays = {name for name, schema in named.items() if schema["kind"] == "array"}
    tuples = {
        f"{name}.{field}"
        for name, schema in named.items()
        for field, kind in schema.get("fields", {}).items()
        if _is_mixed(kind)
    }
    return arrays | tuples


def _is_mixed(schema: Schema) -> bool:
    of = schema.get("of", [])
    parts = of if isinstance(of, list) else [of]
    is_mixed = schema["kind"] == "tuple" and len({json.dumps(each) for each in parts}) > 1
    return is_mixed or any(map(_is_mixed, parts))


def test_what_goes_by_position_is_known_and_only_ever_grows_at_its_end() -> None:
    now = record.described(NOW["codec"] | NOW["channel"]) | record.described(record.KEPT)
    assert positional(now) == set(POSITIONAL), "name its fields, or say why not in POSITIONAL"
    then = LAST["named"] | LAST["kept_named"]
    for name in POSITIONAL:
        if then.get(name, {}).get("kind") == "array":
            old, new = list(then[name]["fields"]), list(now[name]["fields"])
            assert new[: len(old)] == old, f"{name}: append fields, change none"
            assert not any(now[name]["fields"][each]["required"] for each in new[len(old) :]), name


def test_no_other_form_goes_by_position() -> None:
    """Arrays and pickles, wherever they are made."""
    root = Path(kvrelay.engine.__file__).parents[1]
    arrays, pickles = set(), set()
    for package in record.PACKAGES:
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            arrays |= set(re.findall(r"^class (\w+)\([^)]*array_like=True", text, re.MULTILINE))
            if re.search(r"^(import|from) pickle|ForkingPickler", text, re.MULTILINE):
                pickles.add(path.parent.relative_to(root).as_posix())
    assert arrays == {name for name in POSITIONAL if "." not in name} | OF_OTHERS
    assert pickles == set(PICKLES)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DEEPSEEK = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,  # that of latents; KV of models with another is not what it was
    **EXPERTS,
}
HEADS = {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("architecture", "fields", "digest"),
    [
        ("Llama", HEADS, "0f2aeff55c532c23"),
        ("Gemma3", {"head_dim": 32, "sliding_window": 24, **HEADS}, "af91aeb2ea803b51"),
        ("Qwen3Moe", {"num_experts": 8, **EXPERTS, **HEADS}, "51e52774fa2be433"),
        ("DeepseekV3", DEEPSEEK, "80cb606e7c650339"),
    ],
)
def test_kv_of_the_last_release_is_of_the_same_model(
    architecture: str, fields: dict[str, Any], digest: str, tmp_path: Path
) -> None:
    """Another digest is another model: nothing that was kept is found, and workers of two versions
    exchange nothing. So a field of `ModelConfig` that came later counts only where it is set."""
    config = {"architectures": [f"{architecture}ForCausalLM"], **SHAPE, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config, sort_keys=True))
    assert read_config(tmp_path).digest(tmp_path).hex().startswith(digest)
