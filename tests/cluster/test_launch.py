"""What `kvrelay serve` checks before it begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.cluster.config import ApiSection, Config, ModelSection
from kvrelay.cluster.processes import ray_access
from kvrelay.cluster.processes.launch import serve
from kvrelay.cluster.processes.ray_access import RayRefused, check_token
from kvrelay.cluster.processes.ready import ServeError
from kvrelay.cluster.processes.router_process import _load_tokenizer


def test_a_ray_cluster_that_asks_for_a_token_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_access, "asks_for_token", lambda address: True)
    check_token("10.0.0.1:6379")


def test_one_that_does_not_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_access, "asks_for_token", lambda address: False)
    with pytest.raises(RayRefused, match=r"10\.0\.0\.1:6379 asks for no token.*RAY_AUTH_MODE"):
        check_token("10.0.0.1:6379")


def test_one_that_does_not_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: str) -> bool:
        raise ray_access.TokenUnknown("no answer within 60 s")

    monkeypatch.setattr(ray_access, "asks_for_token", unknown)
    with pytest.raises(RayRefused, match=r"no answer within 60 s.*--insecure-ray"):
        check_token("10.0.0.1:6379")


def test_a_chat_template_that_is_not_jinja_is_refused() -> None:
    config = Config(model=ModelSection(chat_template="{{ bos_token }}\n{% for m in %}"))

    def unused(*_: object) -> None:
        raise AssertionError("it went on")

    with pytest.raises(ServeError, match=r"model\.chat_template: .*not valid Jinja, line 2"):
        asyncio.run(serve(config, unused, asyncio.Event(), unused))


def test_routers_tokenise_as_they_are_told(smollm2_dir: Path) -> None:
    said = [{"role": "user", "content": "<|im_end|>"}]
    model = ModelSection(chat_template="{{ messages[0].content }}")
    for parses, num_tokens in ((True, 1), (False, 7)):
        config = Config(model=model, api=ApiSection(parse_special_tokens_in_messages=parses))
        tokens = _load_tokenizer(smollm2_dir, config).chat_prompt(said).tokens
        assert len(tokens) == num_tokens


def test_whatever_ray_raises_when_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is busy, a bare Exception."""
    import ray

    from kvrelay.cluster.processes.ray import RayUnavailable, connect

    def slow(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(RayUnavailable, match=r"^cannot start Ray: The .* startup\.$"):
        connect("")
