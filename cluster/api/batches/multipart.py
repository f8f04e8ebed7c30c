"""A form in parts (RFC 7578), read as it arrives: one file to disk, the other fields to memory."""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvrelay.cluster.api.errors import ApiError, invalid

MAX_FIELD_BYTES = 16 * 1024
MAX_PARTS = 64


class FormReader:
    """Fed with the body. Invariant: it holds less than a field, and a head as long as the parser
    lets them be; `write` gets each byte of the part that is a file once and in order."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """Raises ApiError (415) for a body that is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(
                415,
                f"content-type {content_type[:60]!r} is not supported: send multipart/form-data "
                "with a boundary",
                code="unsupported_content_type",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # once its part has begun
        self.is_whole = False
        self._write = write
        self._take: Callable[[bytes], None] = lambda _: None  # the bytes of this part
        self._num_parts = 0
        self._header, self._value, self._about = b"", b"", b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_head,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body. Raises ApiError (400)."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise invalid(f"The form cannot be read: {error}") from None

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts")
        self._about, self._take = b"", lambda _: None

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.strip().lower() == b"content-disposition":
            self._about = self._value
        self._header, self._value = b"", b""

    def _on_head(self) -> None:
        """What is fed next is the content of the part."""
        _, options = parse_options_header(self._about)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise invalid("A part of the form has no name in its content-disposition")
        if name == "file":
            if self.filename is not None:
                raise invalid("'file': there are two, send one", param="file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace") or "upload"
            self.filename = filename.replace("\\", "/").rpartition("/")[2][:256]
            self._take = self._write
            return
        self.fields[name] = ""

        def take(data: bytes) -> None:
            self.fields[name] += data.decode("utf-8", "replace")
            if len(self.fields[name]) > MAX_FIELD_BYTES:
                raise invalid(f"{name[:40]!r} has more than {MAX_FIELD_BYTES} bytes", param=name)

        self._take = take

    def _end(self) -> None:
        self.is_whole = True
