"""What is disturbed: a system that is started here, with its addresses and its processes."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import psutil

MODEL = "smollm2-135m"


class System(ABC):
    """A server under test. `kinds`: of its processes, by what their command lines match."""

    model = MODEL
    kinds: Mapping[str, str] = {}

    @property
    @abstractmethod
    def urls(self) -> list[str]:
        """Lists where its APIs listen."""

    @abstractmethod
    def roots(self) -> list[int]:
        """Processes that were started here; all others descend from them."""

    @abstractmethod
    def left_over(self) -> list[str]:
        """What an idle system should not have; empty if all is well."""

    def processes(self, kind: str) -> list[psutil.Process]:
        """Lists those of a kind that live, the oldest first."""
        pattern = re.compile(self.kinds[kind])
        found = [each for each in self.descendants() if pattern.search(_command(each))]
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    def descendants(self) -> Iterator[psutil.Process]:
        seen: set[int] = set()
        for root in self.roots():
            try:
                process = psutil.Process(root)
                tree = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for each in tree:
                if each.pid not in seen and each.is_running():
                    seen.add(each.pid)
                    yield each

    def restart(self, timeout_s: float) -> bool:
        """Every process anew, one after the other; whether that was over in time. A system that
        cannot do that says False at once."""
        return False

    def is_up(self) -> bool:
        """Whether each of its APIs serves, with everything that it should have."""
        return all(self._is_up(url) for url in self.urls)

    def _is_up(self, url: str) -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_up(self, timeout_s: float) -> float | None:
        """Seconds until it was; None: it was not."""
        began = time.monotonic()
        while not self.is_up():
            if time.monotonic() > began + timeout_s:
                return None
            time.sleep(0.1)
        return time.monotonic() - began


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return ""


def get_json(url: str, path: str, key: str) -> Any:
    """Asks with `key`, an operator's."""
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{url}{path}", headers=headers, timeout=30.0)
    return answer.raise_for_status().json()
