"""A server moves to another machine: `kvrelay backup` here, `kvrelay restore` there.

Machines are namespaces of network, mounts and host name; the second one does not see the folder of
the first one, and has its own elsewhere.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served, toml_text
from tests.chaos.network import Hosts, what_is_missing
from tests.e2e.serving import KVRELAY, MODEL, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

BEGIN = 'hostname "$1"; mount -t tmpfs tmpfs "$2"; shift 2; exec "$@"'
STORY = "The keeper of the lighthouse wrote down every ship that passed in the night. " * 40
PORT, SESSION, BLOCK_SIZE = 8000, "night-watch", 16


@dataclass(slots=True)
class Machine:
    """Where `folder` is, and the folder of the other machine is empty."""

    hosts: Hosts
    number: int
    folder: Path
    hidden: Path

    @property
    def inside(self) -> list[str]:
        name = f"machine-{self.number}"
        apart = ("unshare", "--uts", "--mount", "sh", "-c", BEGIN, "sh")
        return [*self.hosts.inside(self.number), *apart, name, str(self.hidden)]

    @property
    def settings(self) -> dict[str, object]:
        return {
            "sessions.state_dir": str(self.folder / "state"),
            "tiers.host_gib": 0,
            "tiers.disk_gib": 1.0,
            "tiers.disk_after_s": 0.1,
            "tiers.disk_path": str(self.folder / "kv"),
        }

    def serve(self) -> Served:
        where = ("--host", "0.0.0.0", "--port", str(PORT))
        return Served(self.settings, *where, prefix=self.inside)

    def run(self, *command: str) -> str:
        config = self.folder / "kvrelay.toml"
        config.write_text(toml_text(self.settings))
        whole = [*self.inside, *KVRELAY, *command, "--config", str(config)]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def ask(self, key: str, path: str, **body: Any) -> Any:
        url = f"http://{self.hosts.address(self.number)}:{PORT}{path}"
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": MODEL, "temperature": 0, **body}
        answer = httpx.post(url, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def blocks_on_disk(self, key: str) -> int:
        url = f"http://{self.hosts.address(self.number)}:{PORT}/v1/sessions/{SESSION}"
        found = httpx.get(url, headers={"authorization": f"Bearer {key}"}, timeout=20).json()
        return max((worker["blocks"]["disk"] for worker in found["workers"]), default=0)


def talk(machine: Machine, key: str, messages: list[Any]) -> Any:
    named = {"messages": messages, "prompt_cache_key": SESSION, "max_tokens": 24}
    return machine.ask(key, "/v1/chat/completions", **named)


def test_sessions_answers_and_kv_are_found_on_another_machine(tmp_path: Path) -> None:
    first_folder, second_folder = tmp_path / "here", tmp_path / "elsewhere" / "kvrelay"
    copy = tmp_path / "copy"
    for folder in (first_folder, second_folder):
        folder.mkdir(parents=True)
    with Hosts(2) as hosts:
        first = Machine(hosts, 0, first_folder, second_folder)
        second = Machine(hosts, 1, second_folder, first_folder)
        question = {"role": "user", "content": STORY + "Which ship came first?"}
        with first.serve() as served:
            key = (first_folder / "state/api.key").read_text().strip()
            begun = talk(first, key, [question])
            answer = begun["choices"][0]["message"]
            stored = first.ask(key, "/v1/responses", input=STORY + "Who?", max_output_tokens=8)
            whole_blocks = begun["usage"]["total_tokens"] // BLOCK_SIZE
            wait_until(lambda: first.blocks_on_disk(key) >= whole_blocks - 1)
            assert served.stop() == 0
        assert "and the disk tier" in first.run("backup", str(copy), "--kv")
        assert "of machine-0 at" in second.run("restore", str(copy), "--kv")
        with second.serve():
            go_on = [question, answer, {"role": "user", "content": "Go on."}]
            usage = talk(second, key, go_on)["usage"]
            sources = usage["prompt_tokens_details"]["cached_tokens_by_source"]
            following = second.ask(
                key,
                "/v1/responses",
                previous_response_id=stored["id"],
                input="Why?",
                max_output_tokens=8,
            )
        of_prompt = sources.get("disk", 0) / usage["prompt_tokens"]
        print(f"{of_prompt:.1%} of {usage['prompt_tokens']} tokens from disk")
        assert of_prompt >= 0.95, usage
        assert following["usage"]["input_tokens"] > stored["usage"]["input_tokens"]
