"""Made-up results of replays, for the report, the picture and the command."""

from __future__ import annotations

import numpy as np

from kvrelay.lab.replay.replay import LoadSeries, ReplayResult, Sample


def sample(number: int, **changes: object) -> Sample:
    """A completed request of 1,000 prompt tokens and 11 tokens, 100 ms to the first, 10 ms each."""
    values: dict[str, object] = {
        "request_id": f"r{number}",
        "at_s": float(number),
        "input_length": 1_000,
        "output_length": 11,
        "ttft_s": 0.1,
        "second_s": 0.11,
        "e2e_s": 0.2,
        "num_output": 11,
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def refused(number: int, reason: str, after_s: float, retry_after_s: float | None) -> Sample:
    return Sample(
        f"r{number}",
        float(number),
        1_000,
        11,
        refused=reason,
        refused_s=after_s,
        retry_after_s=retry_after_s,
    )


def result(samples: list[Sample], policy: str = "prefix", **changes: object) -> ReplayResult:
    times_s = np.arange(4.0)
    workers = ("prefill-0", "decode-0", "decode-1")
    zeros = np.zeros((len(workers), len(times_s)))
    values: dict[str, object] = {
        "trace": "a-trace",
        "policy": policy,
        "timing": "polynomial",
        "speedup": 1.0,
        "samples": samples,
        "itl_s": np.array([0.01, 0.03], dtype=np.float32),
        "itl_counts": np.array([98, 2], dtype=np.int32),
        "load": LoadSeries(workers, times_s, zeros, zeros, zeros),
        "virtual_s": 100.0,
        "wall_s": 2.0,
        "num_events": 1_234,
        "peak_rss_bytes": 64 << 20,
    }
    return ReplayResult(**{**values, **changes})  # type: ignore[arg-type]


def busy_result(
    policy: str = "prefix", num_prefill: int = 8, num_decode: int = 8, slower: float = 1.0
) -> ReplayResult:
    """Half an hour of plausible traffic; decode-1 is dead for a while."""
    rng = np.random.default_rng(7)
    samples = []
    for number in range(1_500):
        at_s = number * 1.2
        length = int(rng.lognormal(8, 1))
        ttft_s = slower * float(rng.lognormal(-1.2, 0.9)) * (3 if 600 < at_s < 800 else 1)
        warm = min(1.0, at_s / 600)
        samples.append(
            sample(
                number,
                at_s=at_s,
                input_length=length,
                tenant=f"tenant-{number % 3}",
                ttft_s=ttft_s,
                second_s=ttft_s + 0.05,
                e2e_s=ttft_s + 6,
                num_output=300,
                cached={
                    "device": int(0.3 * length * warm * rng.random()),
                    "host": int(0.4 * length * warm * rng.random()),
                    "disk": int(0.1 * length * rng.random()),
                    "peer": int(0.1 * length * rng.random()),
                },
                predicted_ttft_s=ttft_s * float(rng.lognormal(0, 0.2)),
            )
        )
    samples += [refused(n, "queue_full", 0.001, 3.0) for n in range(600, 640)]
    workers = tuple(
        f"{role}-{n}"
        for role, many in (("prefill", num_prefill), ("decode", num_decode))
        for n in range(many)
    )
    times_s = np.linspace(0, 1_800, 240)
    wave = 0.5 + 0.3 * np.sin(times_s / 200)
    base = rng.random((len(workers), 1)) * 0.5 + 0.5
    used = np.clip(base * wave + 0.08 * rng.standard_normal((len(workers), 240)), 0, 1)
    used[num_prefill + 1, 100:140] = 0.0
    return result(
        samples,
        policy,
        itl_s=rng.lognormal(-4.2, 0.4, 500).astype(np.float32) * slower,
        itl_counts=rng.integers(1, 400, 500).astype(np.int32),
        load=LoadSeries(workers, times_s, used * 64, used, used * 30_000 * slower),
        virtual_s=1_810.0,
        wall_s=31.0,
        speedup=2.5,
        timing="h100:llama-3-8b",
    )
