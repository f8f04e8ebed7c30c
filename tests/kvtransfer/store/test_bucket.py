"""Who may use a bucket, and what it lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.kvtransfer.store.bucket import (
    Bucket,
    BucketError,
    Credentials,
    key_prefix,
    name_in,
    sign,
)
from tests.support.s3 import ACCESS_KEY, PAGE, SECRET_KEY, S3StandIn, s3_standin

FILE = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"


@pytest.fixture
def server() -> Iterator[S3StandIn]:
    with s3_standin() as server:
        yield server


@pytest.fixture
def bucket(server: S3StandIn, tmp_path: Path) -> Bucket:
    file = tmp_path / "credentials"
    file.write_text(FILE)
    return Bucket("kv", server.url, credentials_file=str(file))


def test_a_list_has_what_begins_with_the_prefix_in_pages(server: S3StandIn, bucket: Bucket) -> None:
    names = [f"a/{number:05}" for number in range(PAGE + 3)]
    server.objects |= dict.fromkeys([*names, "b/1"], b"")
    keys, more = bucket.list("a/")
    assert (keys, more) == (names[:PAGE], True)
    assert bucket.list("a/", after=keys[-1]) == (names[PAGE:], False)
    assert bucket.list("c/") == ([], False)


def test_names_are_found_in_keys_and_other_objects_are_not_ours() -> None:
    prefix = key_prefix("/team/kv/", b"\xab" * 16)
    assert prefix == f"team/kv/{'ab' * 16}/"
    assert key_prefix("", b"\xab" * 16) == f"{'ab' * 16}/"
    name = bytes(range(16))
    assert name_in(prefix + name.hex(), prefix) == name
    for other in (
        name.hex(),
        prefix,
        prefix + "readme",
        prefix + name.hex().upper(),
        prefix + "00",
    ):
        assert name_in(other, prefix) is None


def test_what_is_refused_says_why_and_what_to_do(server: S3StandIn, bucket: Bucket) -> None:
    server.access_key = "another"
    with pytest.raises(BucketError, match=r"403 InvalidAccessKeyId; the credentials are not known"):
        bucket.list("")
    server.access_key, server.bucket = ACCESS_KEY, "another"
    with pytest.raises(BucketError, match=r"404 NoSuchBucket; make the bucket, or correct"):
        bucket.list("")


def test_a_server_that_is_gone_is_an_error(server: S3StandIn, bucket: Bucket) -> None:
    server.close()
    with pytest.raises(BucketError, match=r"bucket kv at http://127\.0\.0\.1:"):
        bucket.list("")


def test_credentials_come_from_the_environment_or_a_file(bucket: Bucket, tmp_path: Path) -> None:
    expected = Credentials(ACCESS_KEY, SECRET_KEY)
    assert bucket.credentials({}) == expected
    assert SECRET_KEY not in repr(expected)
    there = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    assert Bucket("kv").credentials(there) == Credentials("a", "s", "t")
    with pytest.raises(BucketError, match="no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the"):
        Bucket("kv").credentials({})
    with pytest.raises(BucketError, match=r"cannot be read \(No such file or directory\)"):
        Bucket("kv", credentials_file=str(tmp_path / "none")).credentials({})
    with pytest.raises(BucketError, match="set both there"):
        bucket.credentials({"AWS_PROFILE": "other"})


def test_a_signature_is_that_of_the_specification() -> None:
    """The example "GET Bucket (List Objects)" of AWS's documentation of Signature Version 4."""
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    headers = sign(
        Credentials("AKIAIOSFODNN7EXAMPLE", secret),
        "us-east-1",
        "examplebucket.s3.amazonaws.com",
        "/",
        "max-keys=2&prefix=J",
        now=lambda: 1369353600.0,
    )
    expected = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    assert headers["authorization"].endswith(f"Signature={expected}")
