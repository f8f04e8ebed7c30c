"""What `kvrelay serve` checks before it begins."""

from __future__ import annotations

import pytest

import cluster.runtime.ray_token as ray_token
from cluster.serve.ray_access import RayRefused, check_token


def test_a_ray_cluster_that_asks_for_a_token_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_token, "asks_for_token", lambda address: True)
    check_token("10.0.0.1:6379")


def test_one_that_does_not_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_token, "asks_for_token", lambda address: False)
    with pytest.raises(RayRefused, match=r"10\.0\.0\.1:6379 asks for no token.*RAY_AUTH_MODE"):
        check_token("10.0.0.1:6379")


def test_one_that_does_not_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: str) -> bool:
        raise ray_token.TokenUnknown("no answer within 60 s")

    monkeypatch.setattr(ray_token, "asks_for_token", unknown)
    with pytest.raises(RayRefused, match=r"no answer within 60 s.*--insecure-ray"):
        check_token("10.0.0.1:6379")
