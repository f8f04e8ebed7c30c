"""A Prometheus of one's own, where its binary is there: it scrapes, and evaluates the alerts."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.operations.expressions import ALERTS

FOLDER_VARIABLE = "PROMETHEUS_HOME"  # with the binaries; else they are looked for in PATH
T = TypeVar("T")


def binary(name: str) -> str | None:
    """Path of `prometheus` or `promtool`; None: it is not there. Debian's package prometheus has
    both."""
    return shutil.which(name, path=os.environ.get(FOLDER_VARIABLE) or None)


class Prometheus:
    """Scrapes `targets` (HOST:PORT) every two seconds from `with` to its end, and evaluates the
    alerts of deploy/prometheus every second."""

    def __init__(self, port: int, targets: Sequence[str], key: str = "") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
        for group in rules["groups"]:
            group["interval"] = "1s"
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        config = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                {
                    "job_name": "kvrelay",
                    "static_configs": [{"targets": list(targets)}],
                    **({"authorization": {"credentials": key}} if key else {}),
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("w+")
        found = binary("prometheus")
        assert found is not None
        command = [found, f"--config.file={folder}/prometheus.yaml"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        try:
            self.wait("it is not ready", self._is_ready, 30.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()
        self._folder.cleanup()

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series that `expr` gives now. Raises ValueError."""
        answer = self._get("/api/v1/query", query=expr).json()
        if answer["status"] != "success":
            raise ValueError(f"{expr}: {answer.get('error')}")
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire now, by their names."""
        alerts = self._get("/api/v1/alerts").json()["data"]["alerts"]
        return {a["labels"]["alertname"]: a for a in alerts if a["state"] == "firing"}

    def wait(self, why: str, condition: Callable[[], T], timeout_s: float) -> tuple[T, float]:
        """What `condition` gives as soon as that is true, and the seconds until it was."""
        began = time.monotonic()
        while not (found := condition()):
            if time.monotonic() > began + timeout_s:
                raise TimeoutError(f"{why}, {timeout_s:g} s long")
            time.sleep(0.2)
        return found, time.monotonic() - began

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()[-2000:]
        try:
            return self._get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def _get(self, path: str, **params: str) -> httpx.Response:
        # It is HTTP, and asked often; certificates would take 28 ms to read each time.
        return httpx.get(self.url + path, params=params, timeout=20, verify=False)


def would_fire(alert: str, scrapes: Sequence[str]) -> bool:
    """Whether `alert` fires on these texts of /metrics, five seconds apart, the last of which
    stays for a while. By promtool, which has to be there."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[float | None]] = {}
    for i, text in enumerate(scrapes):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):  # no value of a test
                    continue
                key = sample.name, tuple(sorted(sample.labels.items()))
                found.setdefault(key, [None] * len(scrapes))[i] = sample.value
    series = [
        {
            "series": f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in labels)}}}",
            "values": " ".join("_" if v is None else str(v) for v in values) + f" {values[-1]}x4",
        }
        for (name, labels), values in found.items()
        if values[-1] is not None
    ]
    at = f"{5 * (len(scrapes) + 3)}s"
    test = {
        "interval": "5s",
        "input_series": series,
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.yaml"
        rules = {"rule_files": [str(ALERTS)], "evaluation_interval": "5s", "tests": [test]}
        path.write_text(yaml.safe_dump(rules))
        command = [binary("promtool") or "promtool", "test", "rules", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"alertname: {alert}" in done.stdout + done.stderr, done.stderr
    return done.returncode != 0  # none was expected
