"""Messages as bytes: `[tag, fields]` in MessagePack, where `tag` names the message's class.

`msgspec` writes the fields from the dataclass and, on the way in, builds the dataclass and checks
every type on the way; nothing that a peer sends can name a class or run code. What cannot be
decoded raises `FrameError`, and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.cluster.control import messages as control
from kvrelay.cluster.control import process_messages as process
from kvrelay.decode_worker import messages as decode
from kvrelay.engine import messages, stats
from kvrelay.engine.kv import events as kv_events
from kvrelay.kvtransfer import messages as kv
from kvrelay.prefill_worker import messages as prefill
from kvrelay.router import messages as router

MESSAGE_TYPES: tuple[type, ...] = (
    messages.Abort,
    messages.Probe,
    messages.TokenDeltas,
    messages.Refused,
    messages.Preempted,
    kv_events.KVEvents,
    kv_events.KVSnapshot,
    kv_events.KVSnapshotRequest,
    stats.WorkerStats,
    stats.RouterUp,
    stats.RouterDown,
    stats.ProgressRequest,
    stats.ProgressReport,
    stats.AuditRequest,
    stats.Audit,
    kv.KVConnect,
    kv.KVConnected,
    kv.KVFetch,
    kv.KVReady,
    kv.KVConfirmRequest,
    kv.KVRelease,
    kv.KVConfirmed,
    kv.KVRefused,
    kv.CacheOrder,
    kv.CacheOrderDone,
    prefill.Prefill,
    decode.Decode,
    router.Submit,
    router.Cancel,
    router.Output,
    router.Failed,
    router.WorkerUp,
    router.WorkerDown,
    router.RoleChanged,
    router.WorkerDraining,
    router.DrainReport,
    router.SessionCommand,
    router.SessionReply,
    router.PromptRouted,
    router.WorkerSuspected,
    control.Introduced,
    control.WorkerStarted,
    control.SetRole,
    control.ScalingReport,
    process.Meet,
    process.Adopt,
    process.End,
    process.RouterReport,
    process.LinkLost,
    process.ClusterView,
    process.AuditQuestion,
    process.AuditAnswer,
)
"""Every message that may cross a process boundary."""


class FrameError(Exception):
    """Bytes that are not a message of this version; the text says why."""


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    t.__name__: msgspec.msgpack.Decoder(t) for t in MESSAGE_TYPES
}


def encode(message: Any) -> bytes:
    """Bytes of a registered message. Raises FrameError if a field does not fit the format."""
    tag = type(message).__name__
    assert tag in _decoders, f"{tag} is not a message that crosses processes"
    try:
        return _encoder.encode((tag, message))
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise FrameError(f"{tag} cannot be encoded: {error}") from error


def decode_message(body: bytes | bytearray | memoryview) -> Any:
    """The message in `body`. Raises FrameError: unknown tag, wrong types, truncated, trailing."""
    try:
        tag, fields = _envelope.decode(body)
        decoder = _decoders.get(tag)
        if decoder is None:
            raise FrameError(f"unknown message {tag[:40]!r}")
        return decoder.decode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise FrameError(str(error)) from error
