"""The settings: where KV events are published, and how much of them is kept."""

from __future__ import annotations

from typing import Annotated

from kvrelay.engine.settings import Positive, Section, matching

_ZMQ = matching(r"|tcp://[^\s/]+:\d{1,5}|ipc://\S+", "tcp://HOST:PORT or ipc://FILE")


class EventsSection(Section, frozen=True):
    """What the workers hold, published in vLLM's form: docs/events.md."""

    # "tcp://*:5557": where subscribers connect; each router has a port of its own, this one and
    # those after it; "": nothing is published. Whoever reaches it reads prompts
    endpoint: Annotated[str, _ZMQ] = ""
    # "tcp://*:5757": where they ask for what they have missed; "": nowhere
    replay_endpoint: Annotated[str, _ZMQ] = ""
    buffer_steps: Positive = 10_000  # batches that are kept for that
    hwm: Positive = 10_000  # batches that wait for a subscriber; it loses those that come then
    max_blocks: Positive = 100_000  # whose tokens are known; the least recently used is forgotten
    salt_prefix: str = ""  # the extra key that stands for a tenant's salt begins so
