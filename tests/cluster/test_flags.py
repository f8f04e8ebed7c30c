"""Settings on the command line: `--set`, and flags, also those of `vllm serve`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from kvrelay.cluster.api.tenants import load_tenants
from kvrelay.cluster.cli import main
from kvrelay.cluster.cli.flags import ALLOWED, FLAGS, HARMLESS, REFUSED, SHORT
from kvrelay.cluster.config import Config, ConfigError, TenantsSection, load_config, parse_override
from kvrelay.cluster.prepare import served_names
from tests.docs.flags import PAGE, with_flags

Serve = Callable[..., tuple[Result, Config | None]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Runs `kvrelay serve` up to its settings, which it would serve."""
    found: list[Config] = []
    os.umask(before := os.umask(0o022))

    async def check(path: Path | None, overrides: dict[str, Any], _: Any) -> None:
        found.append(load_config(path, overrides))

    monkeypatch.setattr(main, "_check", check)

    def run(*words: str) -> tuple[Result, Config | None]:
        found.clear()
        result = CliRunner().invoke(main.main, ["serve", "--check", *words])
        return result, (found[0] if found else None)

    yield run
    os.umask(before)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("engine.max_model_len=32768", "engine.max_model_len", 32768),
        ("engine.guard=false", "engine.guard", False),
        ("router.silent_after_s = 2", "router.silent_after_s", 2),
        ("tiers.host_gib=auto", "tiers.host_gib", "auto"),
        ("tiers.host_gib=0.5", "tiers.host_gib", 0.5),
        ("model.name=7b", "model.name", "7b"),
        ("model.name=7", "model.name", "7"),
        ('model.name="7"', "model.name", "7"),
        ("api.key=0123456789abcdef", "api.key", "0123456789abcdef"),
        ("api.key=", "api.key", ""),
        ("model.chat_template={{ a == b }}", "model.chat_template", "{{ a == b }}"),
        ('tenants.public_prompts=["a", "b"]', "tenants.public_prompts", ["a", "b"]),
        ("model.name=a\n[engine]\nsinks = 3", "model.name", "a\n[engine]\nsinks = 3"),
    ],
)
def test_a_value_is_as_in_the_file_and_a_text_needs_no_quotes(
    text: str, key: str, value: Any
) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "engine.max_model_len=32k"], "engine.max_model_len = '32k': expected a whole"),
        (["--set", "engine.max_model_lem=3"], "engine.max_model_lem is not a setting; did you mea"),
        (["--set", "motor.x=3"], "motor is not a setting; there are adapters, api, cluster"),
        (["--set", "tenant.name=x"], "tenant is a list of tables: write it in a file"),
        (["--set", "tls.cert=[1]", "--set", "tls.api=maybe"], "tls.api = 'maybe': expected true"),
        (["--max-model-len", "32x"], "engine.max_model_len = '32x': expected a whole number"),
        (["--port", "eighty"], "api.port = 'eighty': expected a whole number"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization = 90: expected at most 1.0"),
        (["--kv-cache-dtype", "fp8_e5m2"], "engine.kv_dtype = 'fp8_e5m2': expected one of auto, f"),
        (["--chat-template", "none.jinja"], "neither Jinja nor a file with it: 'none.jinja'"),
    ],
)
def test_values_are_checked_as_the_file_is(serve: Serve, words: list[str], said: str) -> None:
    result, _ = serve(*words)
    assert said in result.output
    assert result.output.startswith("error: command line: ")
    assert result.exit_code == 1


def test_a_secret_that_is_wrong_is_not_shown(serve: Serve) -> None:
    for words in (["--api-key", "hunter2"], ["--set", "api.key=hunter2"]):
        result, _ = serve(*words)
        assert "api.key = ...: expected 16 characters or more" in result.output
        assert "hunter2" not in result.output


def test_the_command_line_wins_over_the_file(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "settings" / "k.toml"
    file.parent.mkdir()
    file.write_text('[engine]\nmax_model_len = 512\nsinks = 4\nwindow = 64\n[tls]\nca = "ca.pem"\n')
    words = ["--set", "engine.max_model_len=1024", "--set", "engine.window=0", "--decode", "3"]
    result, config = serve("--config", str(file), *words, "--ssl-certfile", "own.pem")
    assert config is not None, result.output
    assert (config.engine.max_model_len, config.engine.window, config.engine.sinks) == (1024, 0, 4)
    assert config.cluster.decode == 3
    # What a file names lies beside it; what the command line names, where that was given.
    assert (config.tls.ca, config.tls.cert) == (str(file.parent / "ca.pem"), "own.pem")


def test_flags_of_vllm_set_what_they_set_there(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    words = f"""Qwen/Qwen3-8B --max-model-len 32k --max_num_seqs=128 --max-num-batched-tokens 8K
        -tp 2 --gpu-memory-utilization 0.85 --served-model-name q -q awq --kv-cache-dtype fp8
        --enforce-eager --kv-cache-memory-bytes 2G --tool-call-parser glm45 --dtype float
        --reasoning-parser deepseek_r1 --api-key sk-0123456789abcdef --host 0.0.0.0 --port 81
        --ssl-keyfile k.pem --ssl-certfile c.pem -asc 2 --chat-template {template}
        --attention-backend FLASHINFER --kv-offloading-size 8 --uvicorn-log-level debug"""
    result, found = serve(*words.split(), "--allowed-origins", '["https://a.b", "https://c.d"]')
    assert found is not None, result.output
    engine, model, api = found.engine, found.model, found.api
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (
        *(32_000, 128, 8192),
    )
    assert (engine.tensor_parallel_size, engine.gpu_memory_utilization) == (2, 0.85)
    assert (engine.kv_dtype, engine.cuda_graphs, engine.kv_cache_gib) == ("float8_e4m3", False, 2.0)
    assert engine.attention_backend == "flashinfer"
    assert (model.name, model.served_name, model.dtype) == ("Qwen/Qwen3-8B", "q", "float32")
    assert (model.quantization, model.chat_template) == ("none", "{{ messages }}")
    assert (api.tool_parser, api.reasoning_parser) == ("glm", "think")
    assert (api.key, api.host, api.port) == ("sk-0123456789abcdef", "0.0.0.0", 81)
    assert api.cors_origins == "https://a.b https://c.d"
    assert (found.tls.api, found.tls.key, found.tls.cert) == (True, "k.pem", "c.pem")
    assert (found.cluster.routers, found.tiers.host_gib, found.log.level) == (2, 8.0, "debug")


KEYS = "sk-0123456789abcdef", "sk-fedcba9876543210"


def test_flags_with_several_values_take_them_as_vllm_does(serve: Serve) -> None:
    words = ["x/y", "--served-model-name", "gpt-4o", "gpt-4o-mini", "--async-scheduling", "true"]
    words += ["--cudagraph-capture-sizes", "1", "2", "4", "--api-key", *KEYS, "--port", "81"]
    result, found = serve(*words)
    assert found is not None, result.output
    assert (found.model.name, found.models, found.api.port) == ("x/y", (), 81)
    assert served_names(found.model) == ["gpt-4o", "gpt-4o-mini"]
    tenants = load_tenants(replace(found, tenants=TenantsSection(salt_secret=16 * "s")))
    assert {tenants.find(key) is None for key in KEYS} == {False}
    assert tenants.find(" ".join(KEYS)) is tenants.find("") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key", *KEYS], "--api-key takes the 2 words behind it, and no MODEL is left"),
        (["--served-model-name", "a", "x/y"], "put MODEL before it"),
        (["x", "--async-scheduling", "false"], "--async-scheduling false: the next step always"),
        (["x", "y", "--served-model-name", "a"], "--served-model-name names one model"),
        (["x", "--api-key", KEYS[0], "hunter2"], "api.key = ...: expected 16 characters or more"),
    ],
)
def test_what_several_values_leave_open_is_told_without_a_key(
    serve: Serve, words: list[str], said: str
) -> None:
    result, _ = serve(*words)
    assert result.exit_code
    assert said in " ".join(result.output.split())
    assert not any(key in result.output for key in (*KEYS, "hunter2"))


@pytest.mark.parametrize("given", ["auto", "-1"])
def test_the_length_of_the_model_is_the_default(serve: Serve, given: str) -> None:
    result, found = serve("--model", "x", "--max-model-len", given)
    assert found is not None, result.output
    assert (found.model.name, found.engine.max_model_len) == ("x", 0)


def test_what_is_so_anyway_is_accepted_and_said(serve: Serve) -> None:
    words = "--enable-prefix-caching --trust-remote-code --swap-space 4 --max-model-len 512 -O3"
    words += " --kernel-config.moe_backend x --limit-mm-per-prompt.image 0 -dp 3 -ep"
    result, found = serve(*words.split(), "--pipeline-parallel-size=1", "--no-fully-sharded-loras")
    assert found is not None, result.output
    assert found.engine.max_model_len == 512
    assert (found.cluster.prefill, found.cluster.decode) == (0, 3)
    for line in (
        "--enable-prefix-caching: prefixes are always cached\n",
        "--trust-remote-code: code of a checkpoint is never run",
        "--swap-space: sequences that are preempted",
        "--no-fully-sharded-loras: that is the default\n",
    ):
        assert line in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--enable-lora --lora-modules a=b c=d",
            "--lora-modules: name adapters in [[adapters]] of the settings file",
        ),
        ("-pp 2", "-pp: layers are not divided: --tensor-parallel-size divides heads"),
        ("--data_parallel_rank=4", "every worker is a replica: --prefill 0 --decode N"),
        ("-dp 4 --prefill 1", "cluster.prefill has two values"),
        ("--limit-mm-per-prompt.image 2", "set it in engine.arguments"),
        ("--seed 7", "--seed: draws follow the 'seed' of a request"),
        ("--no-enable-prefix-caching", "requests with a 'cache_salt' keep theirs apart"),
        ("--no-async-scheduling", "one that runs, and that cannot be changed"),
        ("--load-format dummy", "--load-format: weights are read from safetensors or GGUF"),
        ("--max-modle-len 4", "no such option: --max-modle-len; did you mean --max-model-len?"),
        ("--enable-prefix-cahing", "did you mean --enable-prefix-caching?"),
        ("--max-waiting 4", "no such option: --max-waiting; --set engine.max_waiting=VALUE"),
        ("--prefil 4", "did you mean --prefill?"),
        ("--cofnig x", "did you mean --config?"),
        ("--frobnicate", "--set SECTION.KEY=VALUE takes any setting"),
        ("--dtype float32 --set model.dtype=auto", "model.dtype has two values: --dtype is one"),
        ("--set engine.max_model_len", "expected SECTION.KEY=VALUE"),
    ],
)
def test_what_is_not_there_says_what_to_do(serve: Serve, words: str, said: str) -> None:
    result, found = serve(*words.split())
    assert (result.exit_code, found) == (2, None)
    assert said in result.stderr


def test_each_flag_is_listed_once_and_sets_what_there_is() -> None:
    plain = [name.rstrip("=") for name in (*FLAGS, *HARMLESS, *REFUSED)]
    assert len(plain) == len({*plain})
    assert {*ALLOWED} <= {*REFUSED}
    assert {*SHORT.values()} <= {*plain}
    for flag in FLAGS.values():
        section, _, key = flag.setting.partition(".")
        assert hasattr(getattr(Config(), section), key), flag
        for value in {*flag.values.values()}:  # each is one that the setting takes
            load_config(None, {flag.setting: value})
    with pytest.raises(ConfigError):
        load_config(None, {"model.quantization": "awq"})


def test_settings_that_flags_name_in_words_are_there() -> None:
    """What is told instead of a flag."""
    texts = " ".join((*HARMLESS.values(), *REFUSED.values()))
    named = set(re.findall(r"\b([a-z]+)\.(?!json)([a-z_]+)\b", texts))
    assert ("tiers", "host_gib") in named
    for section, key in named:
        assert hasattr(getattr(Config(), section, None), key), f"{section}.{key}"
    assert {*re.findall(r"--([a-z-]+)", texts)} <= {*FLAGS, "set"}


def test_the_page_has_the_lists() -> None:
    """If this fails: `python -m tests.docs.flags`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_flags(page) == page
