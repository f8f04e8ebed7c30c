"""What the autoscaler's targets mean for routers and workers: the means that cost nothing."""

from __future__ import annotations

from msgspec import structs

from kvrelay.router.config import RouterConfig
from kvrelay.router.scaling_config import ScalingConfig

CHUNK_SHARE = 0.6  # of the ITL target, for a step of a decode worker that takes prompt tokens
STARTS = 2  # so many, one after the other, a request waits for its first worker


def chunk_target_s(scaling: ScalingConfig) -> float:
    """For a step that takes prompt tokens beside decodes."""
    return CHUNK_SHARE * scaling.itl_target_s


def router_config(config: RouterConfig, scaling: ScalingConfig) -> RouterConfig:
    """Requests in the order of the TTFT target, unless another is set; and those that come while
    there is no worker wait until one can be there."""
    wake_s = scaling.pending_timeout_s + STARTS * scaling.start_s
    return structs.replace(
        config,
        ttft_target_s=config.ttft_target_s or scaling.ttft_target_s,
        no_workers_wait_s=max(config.no_workers_wait_s, wake_s),
    )
