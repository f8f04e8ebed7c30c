"""A bucket of an object store (S3): who may use it, and what it lists.

Blocks go there and come from there by NIXL (`kvtransfer.movers.object`), which neither lists nor
finds credentials: botocore does, also those of a machine's or a pod's role, which it renews.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from kvrelay.engine.config import TiersSection
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.kvtransfer.store.errors import StoreError

REQUEST_S = 5.0  # a request that is not answered by then has failed
PAGE = 1000
MAX_CONNECTIONS = 16  # kept open: as many as ask at once, for a page and for names
ABSENT = ("NoSuchKey", "InvalidRange")  # the other: it is empty
_lock = threading.Lock()  # sessions and clients are made by one thread at a time


class BucketError(StoreError):
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
    credentials_file: str = ""  # in the format of ~/.aws/credentials; "": as AWS's tools find them

    @property
    def url(self) -> str:
        return self.endpoint or f"https://{self.name}.s3.{self.region}.amazonaws.com"

    @property
    def is_in_host(self) -> bool:
        """Whether the bucket is named by the host, not by the path."""
        return not self.endpoint

    def __str__(self) -> str:
        return f"bucket {self.name} at {self.url}"

    def credentials(self) -> Credentials:
        """As they are now: a file may be written anew, and a role's expire. Raises BucketError."""
        where = self.credentials_file or "the environment, in files of AWS's tools or by a role"
        try:
            found = _find(self.credentials_file)
            keys = None if found is None else found.get_frozen_credentials()
        except ImportError as error:
            why = "botocore is not installed: pip install 'kvrelay[object]'"
            raise BucketError(f"{self}: {why}") from error
        except Exception as error:  # its own, and those of whom it asks
            raise BucketError(f"{self}: credentials in {where}: {error}") from error
        if keys is None:
            raise BucketError(
                f"{self}: no credentials can be read in {where}; set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or name a file in the format of ~/.aws/credentials in"
                " tiers.object_credentials, which has them for AWS_PROFILE or as default"
            )
        return Credentials(keys.access_key, keys.secret_key, keys.token or "")

    def list(self, prefix: str, after: str = "", limit: int = PAGE) -> tuple[list[str], bool]:
        """Keys that begin with `prefix` and come after `after`, in their order, and whether there
        are more. Raises BucketError."""
        begin = {"StartAfter": after} if after else {}
        asked = {"Bucket": self.name, "Prefix": prefix, "MaxKeys": limit, **begin}
        page = self._ask(lambda s3: s3.list_objects_v2(**asked))
        return [each["Key"] for each in page.get("Contents", ())], bool(page.get("IsTruncated"))

    def has(self, key: str) -> bool:
        """Whether there is an object of this key. Raises BucketError."""
        byte = {"Bucket": self.name, "Key": key, "Range": "bytes=0-0"}
        found = self._ask(lambda s3: s3.get_object(**byte)["Body"].read(), absent=b"")
        return bool(found)

    def _ask(self, call: Callable[[Any], Any], absent: Any = None) -> Any:
        """What `call` returns, given a client; `absent`, if that is given and there is no such key.
        Raises BucketError."""
        credentials = self.credentials()
        from botocore.exceptions import ClientError

        try:
            with _lock:
                client = _client(self, credentials)
            return call(client)
        except ClientError as error:
            says = error.response["Error"]["Code"]
            if absent is not None and says in ABSENT:
                return absent
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise BucketError(f"{self}: {status} {says}{_ADVICE.get(says, '')}") from error
        except Exception as error:  # it has no one class for those of the network and of answers
            raise BucketError(f"{self}: {error}") from error


_ADVICE = {
    "NoSuchBucket": "; make the bucket, or correct tiers.object_bucket",
    "AccessDenied": "; it must be allowed to list, read and write there",
    "InvalidAccessKeyId": "; the credentials are not known there",
    "SignatureDoesNotMatch": "; the secret key is another one",
    "ExpiredToken": "; the session token has expired: renew the credentials",
}


@cache
def _session() -> Any:
    from botocore.session import get_session

    return get_session()


def _find(file: str) -> Any:
    """Credentials of botocore, None if there are none. Those of a role are always the same object,
    which renews them."""
    if file:
        from botocore.credentials import SharedCredentialProvider

        return SharedCredentialProvider(file, os.environ.get("AWS_PROFILE")).load()
    with _lock:
        return _session().get_credentials()


@lru_cache(maxsize=4)
def _client(bucket: Bucket, credentials: Credentials) -> Any:
    from botocore.config import Config

    style = "virtual" if bucket.is_in_host else "path"
    return _session().create_client(
        "s3",
        region_name=bucket.region,
        endpoint_url=bucket.endpoint or None,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        aws_session_token=credentials.session_token or None,
        config=Config(
            connect_timeout=REQUEST_S,
            read_timeout=REQUEST_S,
            retries={"total_max_attempts": 1},
            max_pool_connections=MAX_CONNECTIONS,
            ignore_configured_endpoint_urls=True,
            proxies={},  # NIXL uses none either
            s3={"addressing_style": style},
            # Not every store knows the checksums of AWS.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def error_code(body: bytes) -> str:
    """What an error's XML says that it is; "": it says nothing."""
    found = re.search(rb"<Code>([A-Za-z0-9]{1,64})</Code>", body)
    return found.group(1).decode() if found else ""


def bucket_of(tiers: TiersSection) -> Bucket:
    where = tiers.object_endpoint, tiers.object_region, tiers.object_credentials
    return Bucket(tiers.object_bucket, *where)


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
