"""Who may use a bucket, and what it lists."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvrelay.kvtransfer.store import bucket as buckets
from kvrelay.kvtransfer.store.bucket import Bucket, BucketError, Credentials, key_prefix, name_in
from tests.support.s3 import (
    ACCESS_KEY,
    PAGE,
    SECRET_KEY,
    S3StandIn,
    find_no_credentials,
    s3_standin,
)

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


def test_credentials_come_from_the_environment_or_a_file(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_no_credentials(monkeypatch)
    expected = Credentials(ACCESS_KEY, SECRET_KEY)
    assert bucket.credentials() == expected
    assert SECRET_KEY not in repr(expected)
    with pytest.raises(BucketError, match="no credentials can be read in the environment"):
        Bucket("kv").credentials()
    with pytest.raises(BucketError, match=r"can be read in /none; set AWS_ACCESS_KEY_ID"):
        Bucket("kv", credentials_file="/none").credentials()
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(BucketError, match="for AWS_PROFILE"):
        bucket.credentials()
    monkeypatch.delenv("AWS_PROFILE")
    Path(bucket.credentials_file).write_text(FILE.replace(SECRET_KEY, "new"))
    assert bucket.credentials() == Credentials(ACCESS_KEY, "new")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "t")):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert Bucket("kv").credentials() == Credentials("a", "s", "t")


class Role(BaseHTTPRequestHandler):
    """Whoever asks for the credentials of a pod's role gets the next ones."""

    num_asked = 0
    lasts = timedelta(hours=1)

    def do_GET(self) -> None:
        Role.num_asked += 1
        until = datetime.now(UTC) + self.lasts
        found = {"AccessKeyId": f"k{Role.num_asked}", "SecretAccessKey": "s", "Token": "t"}
        body = json.dumps(found | {"Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("hours", [1, 0])
def test_a_role_of_a_pod_is_used_and_renewed_before_its_keys_expire(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    find_no_credentials(monkeypatch)
    monkeypatch.setattr(Role, "num_asked", 0)
    monkeypatch.setattr(Role, "lasts", timedelta(hours=hours, seconds=30))
    with HTTPServer(("127.0.0.1", 0), Role) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/role"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        first, second = Bucket("kv").credentials(), Bucket("kv").credentials()
        server.shutdown()
    assert (first.secret_key, first.session_token) == ("s", "t")
    assert (first == second) == (hours == 1)


def test_requests_are_signed_and_name_the_bucket_as_the_settings_say(
    server: S3StandIn, bucket: Bucket
) -> None:
    server.objects |= {"a/1": b"12", "a/empty": b""}
    assert [bucket.has(key) for key in ("a/1", "a/empty", "a/2")] == [True, False, False]
    assert server.requests == ["GET /kv/a/1", "GET /kv/a/empty", "GET /kv/a/2"]
    in_host = Bucket("kv-blocks", region="eu-west-1", credentials_file=bucket.credentials_file)
    client = buckets._client(in_host, in_host.credentials())
    url = client.generate_presigned_url("get_object", {"Bucket": "kv-blocks", "Key": "a/1"})
    assert url.startswith(f"{in_host.url}/a/1?")
