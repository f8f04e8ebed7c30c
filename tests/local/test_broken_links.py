"""KV that is always damaged between two workers: real nodes learn to hand over by another link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.request import SamplingParams
from kvrelay.kvtransfer.agent import CopyBlocks
from kvrelay.router.placement.links import RETRY, LinkHistory
from tests.local.test_local import VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import LocalCluster

PROMPTS = [[(11 * i + 5 * j + i * j) % VOCAB for j in range(200)] for i in range(48)]
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0)


def ask(cluster: LocalCluster, prompts: list[list[int]]) -> list[list[int]]:
    return [cluster.generate([prompt], SAMPLING)[0].tokens for prompt in prompts]


def test_prompts_are_not_handed_over_where_their_kv_is_always_damaged(model_dir: Path) -> None:
    with LocalCluster(model_dir, prefill=0, engine=small(num_blocks=1024)) as cluster:
        expected = ask(cluster, PROMPTS)
    is_broken = True

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        if is_broken and read.peer == "prefill-0":
            pool[read.dst[0]] ^= 1

    engine = small(num_blocks=1024)
    with LocalCluster(model_dir, prefill=2, engine=engine, corrupt=corrupt) as cluster:
        dispatcher: Any = cluster.router._dispatcher
        # However fast this machine computes, prompts and decodes are kept apart.
        dispatcher.cost.struct.stalled_at_least = 1000.0
        dispatcher.cost.struct.prefilling_at_least = 1000.0
        assert ask(cluster, PROMPTS[:24]) == expected[:24]
        explained = list(cluster.router.explanations.recent())[::-1]
        sources = [each.attempts[0].prefill for each in explained]
        names = [None if source is None else source.worker for source in sources]
        assert names.count("prefill-0") == 3
        assert names.count("prefill-1") >= 5
        status = cluster.router.status(0.0)
        assert status.totals.kv_lost == {"handoff": 3}
        assert [link.source for link in status.bad_links] == ["prefill-0"]
        is_broken = False
        ((_, link),) = dispatcher.links._links.items()
        assert isinstance(link, LinkHistory)
        link.retry_at -= RETRY.base_s
        assert ask(cluster, PROMPTS[24:]) == expected[24:]
        explained = list(cluster.router.explanations.recent())[:24]
        again = [each.attempts[0].prefill for each in explained]
        # Which of two that are idle is the faster one is this machine's to say; one was tried.
        assert any(each is not None and each.worker == "prefill-0" for each in again)
        assert not dispatcher.links._links
        assert cluster.router.status(0.0).bad_links == ()
