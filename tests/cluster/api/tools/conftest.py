"""A server whose model knows tools and reasons, beside the one that does neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api.conftest import Served
from tests.cluster.api.tools.templates import MISTRAL, THINKING, as_new, serve_template


@pytest.fixture(scope="session")
def thinking_server(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serve_template(smollm2_dir, tmp_path_factory.mktemp("thinking"), THINKING) as served:
        yield served


@pytest.fixture
def thinking(thinking_server: Served) -> Iterator[Served]:
    with as_new(thinking_server) as served:
        yield served


@pytest.fixture(scope="session")
def mistral_server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_template(smollm2_dir, tmp_path_factory.mktemp("mistral"), MISTRAL) as served:
        yield served


@pytest.fixture
def mistral(mistral_server: Served) -> Iterator[Served]:
    with as_new(mistral_server) as served:
        yield served
