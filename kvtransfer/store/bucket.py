"""A bucket of an object store (S3): who may use it, and what it lists.

Blocks go there and come from there by NIXL (`kvtransfer.movers.object`). NIXL cannot list, so that
is done here: signed requests (AWS Signature Version 4) over the standard library's HTTP.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import http.client
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from kvrelay.engine.kv.block_hash import HASH_BYTES

REQUEST_S = 5.0  # a request that is not answered by then has failed
MAX_BODY = 8 << 20  # bytes of a page of a list; a page of 1,000 keys has 0.4 MB
PAGE = 1000
EMPTY = hashlib.sha256(b"").hexdigest()
ABSENT = ("NoSuchKey", "InvalidRange")  # the other: it is empty
PROFILE = "AWS_PROFILE"
CA_BUNDLE = "AWS_CA_BUNDLE"
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class BucketError(Exception):
    """The bucket cannot be used, or not now. One line: which, why, what to do."""


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"  # no secret in a log


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where objects are, as in the settings (`tiers.object_...`)."""

    name: str
    endpoint: str = ""  # a URL; "": that of AWS in the region
    region: str = "us-east-1"
    credentials_file: str = ""  # in the format of ~/.aws/credentials; "": the environment

    @property
    def url(self) -> str:
        return self.endpoint or f"https://{self.name}.s3.{self.region}.amazonaws.com"

    @property
    def is_in_host(self) -> bool:
        """Whether the bucket is named by the host, not by the path."""
        return not self.endpoint

    def __str__(self) -> str:
        return f"bucket {self.name} at {self.url}"

    def credentials(self, environment: Mapping[str, str] = os.environ) -> Credentials:
        """As they are now: a file may be written anew. Raises BucketError."""
        if not self.credentials_file:
            found = [environment.get(name, "") for name in VARIABLES]
            where = "the environment"
        else:
            path = Path(self.credentials_file).expanduser()
            profile, where = environment.get(PROFILE, "default"), str(path)
            parser = configparser.ConfigParser(interpolation=None)
            try:
                parser.read_string(path.read_text())
            except (OSError, UnicodeDecodeError, configparser.Error) as error:
                why = getattr(error, "strerror", None) or type(error).__name__
                raise BucketError(
                    f"{self}: {path} cannot be read ({why}); it has to be a file in the format of"
                    " ~/.aws/credentials, readable for this user"
                ) from error
            section = parser[profile] if parser.has_section(profile) else {}
            found = [section.get(name.lower(), "").strip() for name in VARIABLES]
        if not (found[0] and found[1]):
            raise BucketError(
                f"{self}: no {VARIABLES[0]} and {VARIABLES[1]} in {where}; set both there, or name"
                " a file that has them in tiers.object_credentials"
            )
        return Credentials(*found)

    def list(self, prefix: str, after: str = "", limit: int = PAGE) -> tuple[list[str], bool]:
        """Keys that begin with `prefix` and come after `after`, in their order, and whether there
        are more. Raises BucketError."""
        query = {"list-type": "2", "max-keys": str(limit), "prefix": prefix, "start-after": after}
        body = self._get({name: value for name, value in query.items() if value})
        try:
            root = ElementTree.fromstring(body)
        except ElementTree.ParseError as error:
            raise BucketError(f"{self} does not speak S3: {error}; see the endpoint") from error
        keys = [each.text or "" for each in root.iterfind("{*}Contents/{*}Key")]
        return keys, root.findtext("{*}IsTruncated") == "true"

    def has(self, key: str) -> bool:
        """Whether there is an object of this key. Raises BucketError."""
        return self._ask(key, {}, {"Range": "bytes=0-0"}, absent=True) is not None

    def _get(self, query: Mapping[str, str]) -> bytes:
        body = self._ask("", query, {})
        assert body is not None
        return body

    def _ask(
        self, key: str, query: Mapping[str, str], fields: Mapping[str, str], *, absent: bool = False
    ) -> bytes | None:
        """`absent`: that there is no such key is an answer, None."""
        at = urlsplit(self.url)
        path = at.path.rstrip("/") + ("" if self.is_in_host else f"/{quote(self.name)}")
        path += f"/{quote(key)}" if key or self.is_in_host else ""
        sent = "&".join(f"{name}={quote(query[name], safe='-_.~')}" for name in sorted(query))
        headers = sign(self.credentials(), self.region, at.netloc, path, sent)
        try:
            connection = _connect(at.scheme, at.netloc)
            try:
                target = f"{path}?{sent}" if sent else path
                connection.request("GET", target, headers={**headers, **fields})
                answer = connection.getresponse()
                body = answer.read(MAX_BODY)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise BucketError(f"{self}: {error or type(error).__name__}") from error
        if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
            says = error_code(body) or answer.reason
            if absent and says in ABSENT:
                return None
            raise BucketError(f"{self}: {answer.status} {says}{_ADVICE.get(says, '')}")
        return body


_ADVICE = {
    "NoSuchBucket": "; make the bucket, or correct tiers.object_bucket",
    "AccessDenied": "; it must be allowed to list, read and write there",
    "InvalidAccessKeyId": "; the credentials are not known there",
    "SignatureDoesNotMatch": "; the secret key is another one",
    "ExpiredToken": "; the session token has expired: renew the credentials",
}


def error_code(body: bytes) -> str:
    """What an error's XML says that it is; "": it says nothing."""
    found = re.search(rb"<Code>([A-Za-z0-9]{1,64})</Code>", body)
    return found.group(1).decode() if found else ""


def key_prefix(prefix: str, fingerprint: bytes) -> str:
    """What all keys of these blocks begin with. Blocks of another model, dtype or layout never have
    the same."""
    return f"{prefix.strip('/')}/{fingerprint.hex()}/".lstrip("/")


def name_in(key: str, prefix: str) -> bytes | None:
    """The block hash in a key; None: it is not one of ours."""
    try:
        name = bytes.fromhex(key.removeprefix(prefix))
    except ValueError:
        return None
    return name if key == prefix + name.hex() and len(name) == HASH_BYTES else None


def sign(
    credentials: Credentials,
    region: str,
    host: str,
    path: str,
    query: str,
    now: Callable[[], float] = time.time,
) -> dict[str, str]:
    """Headers of a GET without a body: AWS Signature Version 4."""
    at = time.gmtime(now())
    day, instant = time.strftime("%Y%m%d", at), time.strftime("%Y%m%dT%H%M%SZ", at)
    headers = {"host": host, "x-amz-content-sha256": EMPTY, "x-amz-date": instant}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = "\n".join(["GET", path, query, lines, names, EMPTY])
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{instant}\n{scope}\n{digest}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope},"
        f" SignedHeaders={names}, Signature={key.hex()}"
    )
    return headers


def _connect(scheme: str, netloc: str) -> http.client.HTTPConnection:
    if scheme == "https":
        context = ssl.create_default_context(cafile=os.environ.get(CA_BUNDLE))
        return http.client.HTTPSConnection(netloc, timeout=REQUEST_S, context=context)
    return http.client.HTTPConnection(netloc, timeout=REQUEST_S)
