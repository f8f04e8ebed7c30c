"""A form in parts (RFC 7578), read as it arrives: one file to disk, the other fields to memory."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message

from kvrelay.cluster.api.errors import ApiError, invalid

MAX_HEAD_BYTES = 16 * 1024  # a part's
MAX_FIELD_BYTES = 16 * 1024
MAX_PARTS = 64


class FormReader:
    """Fed with the body. Invariant: it holds less than a boundary, a head and a field, and `write`
    gets each byte of the part that is a file once and in order."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """Raises ApiError (415) for a body that is no form."""
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary()
        if message.get_content_type() != "multipart/form-data" or not boundary:
            raise ApiError(
                415,
                f"content-type {content_type[:60]!r} is not supported: send multipart/form-data "
                "with a boundary",
                code="unsupported_content_type",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # once its part has begun
        self.is_whole = False
        self._delimiter = b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
        self._write = write
        self._rest = b"\r\n"  # what is before the first boundary may be nothing
        self._take: Callable[[bytes], None] = lambda _: None  # the bytes of this part
        self._num_parts = 0
        self._in_head = False

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body. Raises ApiError (400)."""
        rest = self._rest + data
        while not self.is_whole:
            if self._in_head:
                head, end, after = rest.partition(b"\r\n\r\n")
                if len(head) > MAX_HEAD_BYTES:
                    raise invalid(f"A part of the form has a head over {MAX_HEAD_BYTES} bytes")
                if not end:
                    break
                self._begin(head)
                rest, self._in_head = after, False
                continue
            at = rest.find(self._delimiter)
            after_at = at + len(self._delimiter)
            if at < 0 or len(rest) < after_at + 2:
                keep = len(rest) - len(self._delimiter) if at < 0 else at
                if keep > 0:
                    self._take(rest[:keep])
                    rest = rest[keep:]
                break
            self._take(rest[:at])
            self._take = lambda _: None
            self.is_whole = rest[after_at : after_at + 2] == b"--"
            rest, self._in_head = rest[after_at:], True
        self._rest = b"" if self.is_whole else rest

    def _begin(self, head: bytes) -> None:
        """Begins the part that has `head`, and what is fed next is its content."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts")
        message = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            header, _, value = line.partition(":")
            if header.strip().lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        named = message.get_param("name", header="content-disposition")
        name = named if isinstance(named, str) else ""
        if not name:
            raise invalid("A part of the form has no name in its content-disposition")
        if name == "file":
            if self.filename is not None:
                raise invalid("'file': there are two, send one", param="file")
            filename = message.get_filename()
            self.filename = (filename or "upload").replace("\\", "/").rpartition("/")[2][:256]
            self._take = self._write
            return
        self.fields[name] = ""

        def take(data: bytes) -> None:
            self.fields[name] += data.decode("utf-8", "replace")
            if len(self.fields[name]) > MAX_FIELD_BYTES:
                raise invalid(f"{name[:40]!r} has more than {MAX_FIELD_BYTES} bytes", param=name)

        self._take = take
