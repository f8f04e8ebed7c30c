"""Adapters in use, as a picker of endpoints reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.adapter_metrics import AdapterCollector, AdapterUse, adapter_use
from kvrelay.cluster.api.adapters import Registered
from kvrelay.engine.adapters import WEIGHTS_NAME, Adapter
from kvrelay.engine.request import SamplingParams
from kvrelay.router.messages import Submit
from tests.router.script import CLIENT, Script, worker_stats

NAMES = ("first", "loaded", "queued", "unused")


def registered(folder: Path, num_bytes: int) -> dict[str, Registered]:
    found = {}
    for number, name in enumerate(NAMES):
        (folder / name).mkdir()
        (folder / name / WEIGHTS_NAME).write_bytes(bytes(num_bytes))
        found[name] = Registered(str(folder / name), bytes([number + 1]) * 32, "m")
    return found


def submit(script: Script, name: str, entry: Registered) -> None:
    need, params = Adapter(entry.digest, entry.source), SamplingParams(max_tokens=4)
    script.tell(Submit(name, params, CLIENT, tuple(range(8)), 60.0, need=need))


def test_what_runs_or_is_loaded_and_what_waits(tmp_path: Path) -> None:
    script, own = Script(max_inflight_per_worker=1), registered(tmp_path, 100)
    script.up("decode-0", loads=True)
    script.tell(worker_stats("decode-0", loaded=(own["loaded"].digest, b"gone" * 8)))
    assert adapter_use("m", own, script.router, 450) == AdapterUse("m", 4, (), ("loaded",))
    submit(script, "first", own["first"])
    submit(script, "queued", own["queued"])
    use = adapter_use("m", own, script.router, 350)
    assert use == AdapterUse("m", 3, ("queued",), ("first", "loaded"))


def test_one_that_is_larger_than_the_room_counts_as_one(tmp_path: Path) -> None:
    script, own = Script(), registered(tmp_path, 100)
    assert adapter_use("m", own, script.router, 10).max_loaded == 1
    (tmp_path / "first" / WEIGHTS_NAME).unlink()
    assert adapter_use("m", own, script.router, 3000).max_loaded == 40


def test_its_labels_are_those_of_vllm() -> None:
    registry, uses = CollectorRegistry(), [AdapterUse("m", 4, ("c",), ("a", "b"))]
    AdapterCollector(registry, lambda: uses)
    labels = {
        "model_name": "m",
        "max_lora": "4",
        "waiting_lora_adapters": "c",
        "running_lora_adapters": "a,b",
    }
    value = registry.get_sample_value("vllm:lora_requests_info", labels)
    assert value is not None
    assert value > 1.7e9
    uses.clear()
    assert registry.get_sample_value("vllm:lora_requests_info", labels) is None
    assert [*registry.collect()] == []
