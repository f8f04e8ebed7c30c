"""A stand-in for an object store: enough of S3 to put, get and list, with faults on demand."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from kvrelay.kvtransfer.store import bucket

ACCESS_KEY, SECRET_KEY = "standin", "standin-secret"
PAGE = 1000
PACKET = 4096


class S3StandIn:
    """Serves the bucket `bucket` at `url`. `objects` may be changed by the test at any time."""

    def __init__(self, bucket: str = "kv") -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.access_key = ACCESS_KEY  # another one is refused
        self.refuse_with: HTTPStatus | None = None  # every request, from now on
        self.requests: list[str] = []  # method and path of each
        self.bytes_per_s = 0.0  # all answers share it; 0: as fast as it goes
        self.link = threading.Lock()
        self.goes_on = threading.Event()  # cleared: no request is answered
        self.goes_on.set()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (Handler,), {"store": self})
        )
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def freeze(self) -> None:
        self.goes_on.clear()

    def thaw(self) -> None:
        self.goes_on.set()

    def close(self) -> None:
        self.thaw()
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    store: S3StandIn  # set by a subclass of each
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two writes: the second waited for an ACK

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        body = self._read_body()
        if key := self._begin():
            self.store.objects[key] = body
            self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        self._read_body()
        if key := self._begin():
            self._get(key)

    do_HEAD = do_GET

    def _begin(self) -> str:
        """The key; empty: the request was refused, or answered."""
        self.store.requests.append(f"{self.command} {self.path}")
        self.store.goes_on.wait()
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if self.store.refuse_with is not None:
            self._refuse(self.store.refuse_with, "SlowDown")
        elif f"={self.store.access_key}/" not in self.headers.get("Authorization", ""):
            self._refuse(HTTPStatus.FORBIDDEN, "InvalidAccessKeyId")
        elif bucket != self.store.bucket:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchBucket")
        elif not key:
            self._list(parse_qs(url.query))
        else:
            return key
        return ""

    def _get(self, key: str) -> None:
        body = self.store.objects.get(key)
        if body is None:
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
            return
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(HTTPStatus.OK, body)
            return
        first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        if not part:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
            return
        where = f"bytes {first}-{first + len(part) - 1}/{len(body)}"
        self._answer(HTTPStatus.PARTIAL_CONTENT, part, {"Content-Range": where})

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        names = sorted(n for n in list(self.store.objects) if n.startswith(prefix) and n > after)
        page, more = names[:PAGE], len(names) > PAGE
        entries = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(self.store.objects[n])}</Size></Contents>"
            for n in page
        )
        body = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{entries}</ListBucketResult>"
        )
        self._answer(HTTPStatus.OK, body.encode())

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{status.phrase}</Message></Error>"
        self._answer(status, body.encode())

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for first in range(0, len(body) if self.store.bytes_per_s else 0, PACKET):
            with self.store.link:
                time.sleep(len(body[first : first + PACKET]) / self.store.bytes_per_s)
        with suppress(BrokenPipeError, ConnectionResetError):  # who asked has given up
            self.wfile.write(b"" if self.command == "HEAD" else body)

    def _read_body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


def find_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine and of the tests before are not found."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(bucket, "_session", cache(bucket._session.__wrapped__))


@contextmanager
def s3_standin() -> Iterator[S3StandIn]:
    store = S3StandIn()
    try:
        yield store
    finally:
        store.close()
