"""Configuration: what is right is taken, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cluster.config import Config, ConfigError, build_config, load_config
from tests.docs.example import example_toml

EXAMPLE = Path(__file__).parents[2] / "kvrelay.example.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvrelay.toml"
    path.write_text(text)
    return path


def test_without_a_file_everything_has_a_default() -> None:
    assert load_config(None, {}) == Config()


def test_the_example_says_what_the_defaults_are() -> None:
    assert load_config(EXAMPLE, {}) == Config()


def test_the_example_is_written_from_the_settings() -> None:
    """If this fails: `make example`."""
    assert EXAMPLE.read_text() == example_toml()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nname = "a"\n[cluster]\nprefill = 2\ndecode = 3\n')
    config = load_config(path, {"cluster.prefill": 0, "cluster.decode": None, "model.name": "b"})
    assert (config.model.name, config.cluster.prefill, config.cluster.decode) == ("b", 0, 3)


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[engine]\nkv_cache_gib = 2\n"), {})
    assert config.engine.kv_cache_gib == 2.0
    assert isinstance(config.engine.kv_cache_gib, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nblock_sice = 16", "engine.block_sice is not a setting; did you mean block_siz"),
        (
            "[motor]\nx = 1",
            "motor is not a setting; there are adapters, api, cluster, engine, log, model",
        ),
        ("engine = 3", "engine = 3: expected a table"),
        ('[engine]\nblock_size = "16"', "engine.block_size = '16': expected a whole number"),
        ("[engine]\nblock_size = 1.5", "engine.block_size = 1.5: expected a whole number"),
        ("[engine]\nblock_size = true", "engine.block_size = True: expected a whole number"),
        ("[engine]\nblock_size = 0", "engine.block_size = 0: expected at least 1"),
        ("[engine]\nkv_cache_gib = nan", "engine.kv_cache_gib = nan: expected a finite number"),
        ("[engine]\nlease_s = inf", "engine.lease_s = inf: expected a finite number"),
        ("[api]\nport = 65536", "api.port = 65536: expected at most 65535"),
        ("[model]\nname = 7", "model.name = 7: expected a text"),
        ('[model]\ndtype = "int8"', "model.dtype = 'int8': expected one of auto, float32"),
        ('[model]\ndevice = "tpu"', "model.device = 'tpu': expected one of auto, cpu, cuda"),
        ('[cluster]\naddress = "here"', "cluster.address = 'here': expected auto or HOST:PORT"),
        ("[tiers]\nhost_gib = -1", "tiers.host_gib = -1: expected at least 0.0"),
        ("[tiers]\nhost_gib = 'all'", "tiers.host_gib = 'all': expected a number or auto"),
        ("[tiers]\nhost_gib = [1]", "tiers.host_gib = [1]: expected a number"),
        ("[tiers]\ndisk_gib = inf", "tiers.disk_gib = inf: expected a finite number"),
        ("[tiers]\ndisk_path = 7", "tiers.disk_path = 7: expected a text"),
        ("[tiers]\nretention_s = -0.5", "tiers.retention_s = -0.5: expected at least 0.0"),
        ("[tiers]\nram_gib = 1", "tiers.ram_gib is not a setting; "),
        ("[cluster]\ndecode = 0", "cluster.decode = 0: expected at least 1"),
        ("[router]\npolicy = 'best'", "router.policy = 'best': expected one of prefix, random"),
        ("[router]\nmax_attempts = 0", "router.max_attempts = 0: expected at least 1"),
        ("[router]\nmax_queue = -1", "router.max_queue = -1: expected at least 0"),
        ("[router]\ntick_s = 0.0", "router.tick_s = 0.0: expected more than 0.0"),
        (
            "[router]\nlow_priority_share = 0.6",
            "router.low_priority_share = 0.6: expected at most 0.5",
        ),
        (
            "[scaling]\nenabled = true\n[cluster]\nprefill_tensor_parallel_size = 4",
            "scaling.enabled counts workers, and prefill workers have 4 rank(s), decode workers 1:"
            " give them one tensor_parallel_size, or set scaling.enabled = false",
        ),
        ("[engine", "not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_command_line_is_checked_like_the_file() -> None:
    with pytest.raises(ConfigError, match=r"command line: api.port = -1: expected at least 0"):
        load_config(None, {"api.port": -1})


def test_a_file_that_is_not_there_or_not_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml", {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "bytes.toml", {})


def test_a_chat_template_is_jinja_or_a_file_with_it(tmp_path: Path) -> None:
    def given(text: str) -> str:
        return load_config(
            write(tmp_path, f"[model]\nchat_template = '{text}'\n"), {}
        ).model.chat_template

    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(source)
    (tmp_path / "empty.jinja").write_text("\n")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    assert given(source) == given("chat.jinja") == given(str(tmp_path / "chat.jinja")) == source
    wrong = (
        ("chat.jinjo", "No such file"),
        (".", "Is a directory"),
        ("empty.jinja", "it is empty"),
        ("bytes.jinja", "it is not UTF-8"),
    )
    for name, reason in wrong:
        with pytest.raises(
            ConfigError, match=f"model.chat_template .*'{tmp_path / name}': {reason}"
        ):
            given(name)


def test_the_most_workers_are_those_of_the_limits() -> None:
    cluster = {"prefill": 2, "decode": 3}
    assert build_config({"cluster": cluster}, "x").most_workers == 5
    scaling: dict[str, object] = {"enabled": True, "max_workers": 4}
    assert build_config({"cluster": cluster, "scaling": scaling}, "x").most_workers == 5
    scaling |= {"schedules": ["mon-fri 08:00-18:00 4-12"]}
    assert build_config({"cluster": cluster, "scaling": scaling}, "x").most_workers == 12
