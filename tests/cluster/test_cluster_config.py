"""Configuration: what is right is taken, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cluster.cli.main import _models
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
            "motor is not a setting; there are adapters, api, cluster, engine, events, log, model",
        ),
        ("engine = 3", "engine = 3: expected a table"),
        ('[engine]\nblock_size = "16"', "engine.block_size = '16': expected a whole number"),
        ("[engine]\nblock_size = 1.5", "engine.block_size = 1.5: expected a whole number"),
        ("[engine]\nblock_size = true", "engine.block_size = True: expected a whole number"),
        ("[engine]\nblock_size = 0", "engine.block_size = 0: expected at least 1"),
        ("[engine]\nkv_cache_gib = nan", "engine.kv_cache_gib = nan: expected a finite number"),
        ("[cluster]\nlease_s = inf", "cluster.lease_s = inf: expected a finite number"),
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
        ("[router]\nsilent_after_s = 0.0", "router.silent_after_s = 0.0: expected more than 0.0"),
        ("[router]\ntick_s = 1.0", "router.tick_s is not a setting; there are"),
        (
            "[router]\nlow_priority_share = 0.6",
            "router.low_priority_share = 0.6: expected at most 0.5",
        ),
        (
            "[scaling]\nenabled = true\n[cluster]\nprefill_tensor_parallel_size = 4",
            "scaling.enabled counts workers, and prefill workers have 4 rank(s), decode workers 1:"
            " give them one tensor_parallel_size, or set scaling.enabled = false",
        ),
        ("[engine]\npython = 'p'", "engine.python = 'p' is for engine.runs = 'vllm'"),
        (
            "[engine]\nruns = 'vllm'\npython = 'p'\narguments = {decode_context_parallel_size = 2}",
            "prefill = 1: vLLM's workers compute their own prompts where ranks of context"
            " parallelism have different tokens of a block: set it to 0",
        ),
        (
            "[engine]\nruns = 'vllm'\npython = 'p'\narguments = {data_parallel_size = 2}",
            "engine.arguments.data_parallel_size = 2: a worker is one replica: raise prefill or"
            " decode instead",
        ),
        (
            "[model]\nquantization = 'int8'\n[engine]\nruns = 'vllm'\npython = 'p'",
            "model.quantization = 'int8': vLLM does not obey it: it has other names for these:"
            " set it by engine.arguments, as vLLM calls it",
        ),
        (
            "[engine]\nruns = 'vllm'\npython = 'p'\nwindow = 512",
            "engine.window = 512: vLLM does not obey it: layers attend to what the model says:"
            " leave it out",
        ),
        (
            "[engine]\nruns = 'vllm'\npython = 'p'\nattention_backend = 'triton'",
            "engine.attention_backend = 'triton': vLLM does not obey it: it has other names for"
            " these: set it by engine.arguments, as vLLM calls it",
        ),
        (
            "[engine]\nruns = 'vllm'\npython = 'p'\n"
            "arguments = {prefill_context_parallel_size = 2}\n"
            "[cluster]\nprefill = 0\n[scaling]\nenabled = true",
            "scaling.enabled: vLLM's workers keep their role where ranks of context parallelism"
            " have different tokens of a block: set it to false",
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


TWO = """
[engine]
max_num_seqs = 16
[[models]]
name = "large"
checkpoint = "/models/large"
aliases = ["gpt-4o"]
[[models]]
name = "small"
checkpoint = "smollm2-135m"
prefill = 0
decode = 3
engine = {max_num_seqs = 4}
[models.router]
ttft_target_s = 0.5
[models.api]
tool_parser = "hermes"
"""


def test_each_of_several_models_has_settings_of_its_own(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, TWO), {})
    large, small = config.by_model()["large"], config.by_model()["small"]
    assert list(config.by_model()) == ["large", "small"]
    assert (large.model.name, large.model.served_name) == ("/models/large", "large")
    assert (large.engine.max_num_seqs, small.engine.max_num_seqs) == (16, 4)
    assert (large.router.ttft_target_s, small.router.ttft_target_s) == (0.0, 0.5)
    assert (large.api.tool_parser, small.api.tool_parser) == ("auto", "hermes")
    assert (small.cluster.prefill, small.cluster.decode) == (0, 3)
    assert (large.most_workers, small.most_workers, config.most_workers) == (2, 3, 5)


def test_models_whose_workers_come_and_go_have_no_more_than_all_may_have(tmp_path: Path) -> None:
    shared = TWO + "[scaling]\nenabled = true\nmax_workers = 6\n"
    assert load_config(write(tmp_path, shared), {}).most_workers == 6
    fixed = shared.replace("[models.router]", "[models.scaling]\nenabled = false\n[models.router]")
    assert load_config(write(tmp_path, fixed), {}).most_workers == 6 + 3


def test_without_models_there_is_one_with_all_settings() -> None:
    config = load_config(None, {"engine.max_num_seqs": 4})
    assert config.by_model() == {"": config}


def test_a_models_chat_template_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    own = TWO.replace("engine = {max_num_seqs = 4}", 'model = {chat_template = "chat.jinja"}')
    by_model = load_config(write(tmp_path, own), {}).by_model()
    assert by_model["small"].model.chat_template == "{{ messages }}"
    assert by_model["large"].model.chat_template == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "max_num_seqs = 4",
            "max_seqs = 4",
            "models.engine of small: max_seqs is not a setting; d",
        ),
        ("max_num_seqs = 4", "max_num_seqs = -4", "of small: max_num_seqs = -4: expected at least"),
        ("decode = 3", "decode = 0", "models 2.decode = 0: expected at least 1"),
        ("decode = 3", "decoders = 3", "models 2.decoders is not a setting; did you mean decode?"),
        (
            '"small"',
            '"large"',
            "'large' is the name of a model, twice: give each a name of its own",
        ),
        ('"small"', '"gpt-4o"', "'gpt-4o' is an alias of the model 'large', and the name"),
        ('"small"', '"a/b"', "models 2.name = 'a/b': expected letters, digits"),
        ('checkpoint = "smollm2-135m"', "", "models 2.checkpoint is missing"),
    ],
)
def test_what_is_wrong_with_one_of_several_models_is_named(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, TWO.replace(old, new)), {})
    assert said in str(error.value)


def test_a_model_on_the_command_line_beside_models_in_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    for given in ({"model.name": "a"}, {"models": [{"name": "a", "checkpoint": "a"}]}):
        with pytest.raises(
            ConfigError, match=r"a MODEL was given, and .* has \[\[models\]\]: leave one"
        ):
            load_config(path, given)


def test_several_models_on_the_command_line() -> None:
    options = {"cluster.prefill": 0}
    given = _models(("/models/a.gguf", "chat=smollm2-135m"), options)
    assert given == options | {
        "models": [
            {"name": "a", "checkpoint": "/models/a.gguf", "prefill": 0},
            {"name": "chat", "checkpoint": "smollm2-135m", "prefill": 0},
        ]
    }
    assert list(load_config(None, given).by_model()) == ["a", "chat"]
    named = {"name": "a", "checkpoint": "b", "prefill": 0}
    assert _models(("a=b",), options) == options | {"models": [named]}
    assert _models(("/a=b",), options) == options | {"model.name": "/a=b"}
    assert _models((), options) == options
