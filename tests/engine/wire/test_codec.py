"""Every message survives the wire; nothing else gets through."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.api.openai.schema import MAX_PROMPT_LOGPROBS, MAX_SCORED_TOKENS
from kvrelay.cluster.control.messages import ScalingReport
from kvrelay.cluster.orders import SetRole
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.request import PromptOutputs, SamplingParams, TokenDelta, TokenLogprobs
from kvrelay.engine.wire.codec import FrameError, decode_message, encode
from kvrelay.engine.wire.context import WireLimits

U64 = st.integers(0, 2**64 - 1)
st.register_type_strategy(int, U64)
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(st.characters(codec="utf-8"), max_size=20))


NESTED = {"TokenDelta", "TokenLogprobs", "SamplingParams", "WorkerInfo", "PromptOutputs"}
NESTED |= {"ReasoningBudget", "SessionInfo", "SessionHolder", "SessionLimits", "TenantShare"}
NESTED |= {"RouterLoad", "KVLink", "GroupBlocks", "Peer"}
MODULES = [
    "kvrelay.engine.kv.events",
    "kvrelay.engine.messages",
    "kvrelay.engine.request",
    "kvrelay.engine.stats",
]
MODULES += [
    "kvrelay.kvtransfer.messages",
    "kvrelay.prefill_worker.messages",
    "kvrelay.decode_worker.messages",
]
MODULES += [
    "kvrelay.router.messages",
    "kvrelay.worker.messages",
    "kvrelay.cluster.control.process_messages",
]
INSIDE = {"StartFailed", "ProcessEnds"}  # they go to a guardian
INSIDE |= {"RequestSpec", "WorkRequest"}  # bases of others
INSIDE |= {"Fact", "Hidden", "Number"}  # notes at fields


def declared() -> Iterator[type]:
    for module in map(importlib.import_module, MODULES):
        for value in vars(module).values():
            is_message = isinstance(value, type) and dataclasses.is_dataclass(value)
            if is_message and value.__module__ == module.__name__:
                yield value
    # The controller's other messages and effects stay within its process.
    yield from (SetRole, ScalingReport)


MESSAGE_TYPES = [each for each in declared() if each.__name__ not in NESTED | INSIDE]


@pytest.mark.slow
@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda t: t.__name__)
def test_every_message_survives_a_round_trip(message_type: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.builds(message_type))
    def round_trip(message: object) -> None:
        decoded = decode_message(encode(message))
        assert decoded == message
        assert type(decoded) is message_type

    round_trip()


def test_a_long_decode_keeps_its_tokens() -> None:
    sampling = SamplingParams(logit_bias={5: -1.5}, stop_token_ids=(1, 2))
    scope = CacheScope(b"\x00")
    message = Decode("r", sampling, 3, "router-0", tuple(range(3000)), 2999, 1.5, scope=scope)
    assert decode_message(encode(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb("Abort"),
        msgpack.packb(["Abort"]),
        msgpack.packb(["Abort", {"request_id": "r"}]),
        msgpack.packb(["Abort", {"request_id": 1, "attempt": 1}]),
        msgpack.packb(["Abort", {"request_id": "r", "attempt": "1"}]),
        msgpack.packb(["Abort", {"request_id": "r", "attempt": True}]),
        msgpack.packb(["Abort", {"request_id": b"r", "attempt": 1}]),
        msgpack.packb(["Abort", ["r", 1]]),
        msgpack.packb(["os.system", {"command": "true"}]),
        msgpack.packb([7, {}]),
        encode(Abort("r", 1)) + b"\x00",
        encode(Abort("r", 1))[:-1],
        b"\x92\xa5Abort\x81\xaarequest_id\xa2\xff\xfe",
        b"\x91" * 100_000,
        msgpack.packb(["Refused", {"worker": "w", "epoch": 1, "request_id": "r", "attempt": 1,
                                   "reason": "because", "detail": ""}]),
    ],
)  # fmt: skip
def test_what_is_no_message_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode_message(body)


def test_the_most_that_a_prompt_may_tell_fits_into_a_frame() -> None:
    best = tuple((2**32 - 1 - n, -1.2345678901) for n in range(MAX_PROMPT_LOGPROBS))
    row = TokenLogprobs(-1.2345678901, best)

    def num_bytes(num_tokens: int) -> int:
        prompt = PromptOutputs((row,) * num_tokens)
        delta = TokenDelta("r" * 64, 1, num_tokens, (5,), prompt=prompt)
        return len(encode(TokenDeltas("decode-0", 1, (delta,))))

    some, each = num_bytes(1000), num_bytes(1001) - num_bytes(1000)
    assert some + each * MAX_SCORED_TOKENS < WireLimits().max_frame_bytes
    assert some + each * MAX_SCORED_TOKENS * 1.2 > WireLimits().max_frame_bytes, "by a fifth"
