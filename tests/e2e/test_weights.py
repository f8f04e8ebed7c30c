"""A real server whose weights change while it streams: by command, one worker after the other, with
a worker and the controller killed on the way, and back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.checkpoint.version import read_version
from tests.e2e.serving import KVRELAY, MODEL, STORY, all_up, is_idle, status, wait_for, worker_of
from tests.structure import ROOT
from tests.support.weights import scaled

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    own = resolve_model(MODEL, progress=print)
    return [own, scaled(own, tmp_path_factory.mktemp("weights") / "v2", 1.5)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {
        "cluster.prefill": 0,
        "cluster.decode": 2,
        "engine.num_blocks": 512,
        "sessions.state_dir": str(tmp_path_factory.mktemp("state")),
    }
    with Served(settings) as served:
        yield served


def ask(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body | fields, timeout=120)


def update(served: Served, *args: str) -> subprocess.CompletedProcess[str]:
    """As an operator does, who tries again where the controller of a busy machine is late."""
    command = [*KVRELAY, "update", MODEL, *args, "--url", served.url]
    for _ in range(10):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "controller does not answer" not in done.stderr:
            break
    return done


def streams(pool: ThreadPoolExecutor, served: Served, count: int = 16) -> list[Future[Answer]]:
    def one(number: int) -> Answer:
        fields = {"prompt": f"{number}. {STORY}", "max_tokens": 200}
        answer: Answer = ask(served, **fields).json()
        return answer

    futures = [pool.submit(one, number) for number in range(count)]
    wait_for(served.url, lambda s: s["totals"]["output_tokens"] > 20 * count, 60, "no tokens")
    return futures


def post(served: Served, path: str) -> int:
    return httpx.post(f"{served.url}{path}", timeout=30, auth=OwnKey()).status_code


def is_paused(served: Served) -> bool:
    found: bool = httpx.get(f"{served.url}/is_paused", timeout=30, auth=OwnKey()).json()[
        "is_paused"
    ]
    return found


def paused(served: Served) -> None:
    assert post(served, "/pause") == 200
    wait_for(served.url, lambda _: is_paused(served), 10, "not paused")


TRAINER = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from kvrelay.cluster.cli.own_key import OwnKey

url, folder, step = sys.argv[1:]
files = Path(folder).glob("*.safetensors")
tensors = {name: each for file in files for name, each in load_file(file).items()}
region = publish(httpx.Client(base_url=url, auth=OwnKey(), timeout=60), tensors, int(step))
print("published", flush=True)
sys.stdin.read()
region.close()
region.unlink()
"""


def killed(served: Served, name: str) -> None:
    """Returns when another one is up in its place."""
    worker = worker_of(status(served.url), name)
    os.kill(worker["pid"], signal.SIGKILL)
    wait_for(served.url, lambda s: worker_of(s, name)["epoch"] > worker["epoch"], 60, "no new one")
    wait_for(served.url, all_up, 60, "not up")


def names(served: Served) -> list[str]:
    return [each["weights"] for each in status(served.url)["workers"]]


def test_a_trainer_publishes_from_its_memory_as_the_page_shows(
    served: Served, versions: list[Path], tmp_path: Path
) -> None:
    """In a process of its own. A worker that starts later finds the region too; once it is gone,
    all go back."""
    page = (ROOT / "docs/weights.md").read_text(encoding="utf-8")
    example = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    step, (own, new) = os.getpid(), versions
    script = tmp_path / "trainer.py"
    script.write_text("".join(example) + TRAINER)
    texts = [ask(served).json()["choices"][0]["text"]]
    command = [sys.executable, str(script), served.url, str(new), str(step)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "published\n"
        texts.append(ask(served).json()["choices"][0]["text"])
        assert names(served) == [f"step-{step}"] * 2
        killed(served, "decode-0")
        assert names(served) == [f"step-{step}"] * 2
        texts.append(ask(served).json()["choices"][0]["text"])
        trainer.stdin.close()
        assert trainer.wait(30) == 0
    os.kill(worker_of(status(served.url), "decode-1")["pid"], signal.SIGKILL)
    old = read_version(own).name
    wait_for(served.url, lambda _: names(served) == [old, old], 120, "not back")
    wait_for(served.url, all_up, 60, "not up")
    texts.append(ask(served).json()["choices"][0]["text"])
    assert texts[0] == texts[3] != texts[1] == texts[2]


def test_streams_go_on_while_workers_get_other_weights_and_back(
    served: Served, versions: list[Path]
) -> None:
    old, new = (read_version(path).name for path in versions)
    first = ask(served).json()
    assert first["usage"]["weight_version"] == old
    with ThreadPoolExecutor(16) as pool:
        futures = streams(pool, served)
        paused(served)  # however fast this machine is, they have not ended
        done = update(served, str(versions[1]))
        assert done.returncode == 0, done.stdout + done.stderr
        assert new in done.stdout
        assert post(served, "/resume") == 200
        answers = [future.result() for future in futures]
    assert [each["usage"]["completion_tokens"] for each in answers] == [200] * 16
    assert {each["usage"]["weight_version"] for each in answers} == {new}
    assert all(len(each["usage"]["weight_versions"]) == 2 for each in answers)
    assert names(served) == [new, new]
    again = ask(served).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["text"] != first["choices"][0]["text"]
    refused = ask(served, weight_version=old)
    assert refused.status_code == 409
    assert new in refused.text
    assert ask(served, weight_version=new).json()["choices"] == again["choices"]

    killed(served, "decode-0")
    assert names(served) == [new, new]

    assert update(served, "--back", "--mode", "keep").returncode == 0
    assert names(served) == [old, old]
    assert ask(served).json()["choices"][0]["text"] == first["choices"][0]["text"]
    wrong = update(served, str(versions[0].parent))
    assert wrong.returncode == 1
    assert "safetensors" in wrong.stderr


def test_a_controller_that_is_killed_is_followed_by_one_that_goes_on(
    served: Served, versions: list[Path]
) -> None:
    new = read_version(versions[1]).name
    body = {"path": str(versions[1]), "mode": "drain"}
    with ThreadPoolExecutor(16) as pool:
        futures = streams(pool, served, 8)
        paused(served)
        begun = httpx.post(f"{served.url}/v1/weights", json=body, timeout=60, auth=OwnKey())
        assert begun.status_code == 202, begun.text
        os.kill(status(served.url)["controller"]["pid"], signal.SIGKILL)
        wait_for(served.url, lambda s: s["controller"]["epoch"] > 1, 60, "no other controller")
        assert post(served, "/resume") == 200
        assert all("weight_versions" not in f.result()["usage"] for f in futures)
    wait_for(served.url, lambda s: [w.get("weights") for w in s["workers"]] == [new, new], 90, "no")
    wait_for(served.url, lambda s: [w["state"] for w in s["weights"]] == ["done"], 30, "not done")
    wait_for(served.url, is_idle, 30, "not idle")
    assert subprocess.run([*KVRELAY, "audit", "--url", served.url], check=False).returncode == 0


def test_a_pause_holds_requests_and_a_resume_lets_them_go_on(served: Served) -> None:
    assert post(served, "/pause?mode=abort") == 400
    paused(served)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask, served)
        wait_for(served.url, lambda s: s["num_live"] == 1, 10, "not there")
        before = status(served.url)["totals"]["output_tokens"]
        assert not waits.done()
        assert status(served.url)["totals"]["output_tokens"] == before
        assert post(served, "/resume") == 200
        assert waits.result().json()["usage"]["completion_tokens"] == 24
    wait_for(served.url, lambda _: not is_paused(served), 10, "still paused")
