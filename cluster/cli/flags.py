"""Flags of `kvrelay serve` for single settings: its own, and those that `vllm serve` has.

A flag of vLLM's that people type is obeyed: it sets one of our settings, which checks its value; or
harmless: what it asks for is so anyway, which is said; or refused: what it asks for is not there,
and the error says what to do instead. Help, docs/command-line.md and what is accepted come from the
lists here.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvrelay.cluster.parser_names import REASONING_OF_VLLM, TOOLS_OF_VLLM

GIB = 1 << 30
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def count(text: str) -> str:
    """Writes 32k or 32K out, as vLLM does."""
    number, unit = text[:-1], _UNITS.get(text[-1:], 0)
    try:
        return f"{float(number) * unit:.0f}" if unit else text
    except ValueError:
        return text


def length(text: str) -> str:
    return "0" if text in ("auto", "-1") else count(text)


def gib(text: str) -> str:
    """Reads a number of bytes as GiB."""
    found = count(text)
    return f"{int(found) / GIB}" if found.isdigit() else text


def folder(text: str) -> str:
    """Makes a path absolute, if there is such a folder: workers have a directory of their own."""
    path = Path(text).expanduser()
    return str(path.absolute()) if path.is_dir() else text


def origins(text: str) -> str:
    """Reads a list in JSON as our setting has it."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return " ".join(map(str, found)) if isinstance(found, list) else text


@dataclass(frozen=True, slots=True)
class Flag:
    """Sets `setting` to what is given, as `read` and `values` (theirs -> ours) have it."""

    setting: str
    about: str = ""
    short: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], str] = str
    switch: Any = None  # what it sets, where it is given without a value
    also: Mapping[str, Any] = field(default_factory=dict)  # what it sets beside it
    takes_several: bool = False  # all words up to the next flag, as nargs="+" of argparse


OWN = {
    "prefill": Flag("cluster.prefill", "Prefill workers; 0: decode workers do both."),
    "decode": Flag("cluster.decode", "Decode workers."),
    "host": Flag("api.host", "Address to serve at."),
    "port": Flag("api.port", "Port to serve at; 0: any that is free."),
    "address": Flag("cluster.address", 'A running Ray cluster to join: "auto" or HOST:PORT.'),
    "insecure-ray": Flag(
        "cluster.insecure_ray", "Join a Ray cluster that asks for no token.", switch=True
    ),
    "insecure": Flag(
        "api.insecure", "Serve without a key at an address that others reach.", switch=True
    ),
    "engine": Flag("engine.runs", "What computes: kvrelay, or vllm (docs/engines.md)."),
    "dtype": Flag("model.dtype", "auto, float32 or bfloat16.", values={"float": "float32"}),
    "drafter": Flag(
        "engine.drafter", "A head's folder, a smaller model, or mtp: it drafts tokens.", read=folder
    ),
}
_IN_CHECKPOINT = dict.fromkeys(
    (
        *("None", "awq", "awq_marlin", "gptq", "gptq_marlin", "auto_gptq", "auto_awq"),
        *("compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "fbgemm_fp8"),
    ),
    "none",
)
_E4M3 = "float8_e4m3"
VLLM = {
    "served-model-name": Flag("model.served_name", takes_several=True),
    "revision": Flag("model.revision"),
    "quantization": Flag("model.quantization", short="q", values=_IN_CHECKPOINT),
    "device": Flag("model.device"),
    "max-model-len": Flag("engine.max_model_len", read=length),
    "max-num-seqs": Flag("engine.max_num_seqs", read=count),
    "max-num-batched-tokens": Flag("engine.max_num_batched_tokens", read=count),
    "gpu-memory-utilization": Flag("engine.gpu_memory_utilization"),
    "tensor-parallel-size": Flag("engine.tensor_parallel_size", short="tp"),
    "data-parallel-size": Flag("cluster.decode", short="dp", also={"cluster.prefill": 0}),
    "block-size": Flag("engine.block_size"),
    "kv-cache-dtype": Flag("engine.kv_dtype", values={"fp8": _E4M3, "fp8_e4m3": _E4M3}),
    "kv-cache-memory-bytes": Flag("engine.kv_cache_gib", read=gib),
    "num-gpu-blocks-override": Flag("engine.num_blocks"),
    "num-speculative-tokens": Flag("engine.num_speculative_tokens"),
    "enforce-eager": Flag("engine.cuda_graphs", switch=False),
    "attention-backend": Flag(
        "engine.attention_backend", values={"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer"}
    ),
    "moe-backend": Flag("engine.moe_backend"),
    "kv-offloading-size": Flag("tiers.host_gib"),
    "chat-template": Flag("model.chat_template"),
    "tool-call-parser": Flag("api.tool_parser", values=TOOLS_OF_VLLM),
    "reasoning-parser": Flag("api.reasoning_parser", values=REASONING_OF_VLLM),
    "api-key": Flag("api.key", takes_several=True),
    "allowed-origins": Flag("api.cors_origins", read=origins),
    "ssl-certfile": Flag("tls.cert", also={"tls.api": True}),
    "ssl-keyfile": Flag("tls.key", also={"tls.api": True}),
    "api-server-count": Flag("cluster.routers", short="asc"),
    "shutdown-timeout": Flag("cluster.drain_s"),
    "max-num-queued-reqs": Flag("router.max_queue"),
    "otlp-traces-endpoint": Flag("tracing.endpoint"),
    "uvicorn-log-level": Flag("log.level"),
}
FLAGS = OWN | VLLM
SHORT = {"pp": "pipeline-parallel-size", "n": "nnodes"}
SHORT |= {"ep": "enable-expert-parallel", "sc": "speculative-config", "cc": "compilation-config"}
SHORT |= {"O": "optimization-level", "r": "node-rank", "dcp": "decode-context-parallel-size"}


def _names(listed: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in listed.items() for name in names.split()}


# By why: those that are so anyway. With "=" they have a value, with "=+" one or more.
HARMLESS = _names(
    {
        "prefixes are always cached": "enable-prefix-caching prefix-caching-hash-algo=",
        "prompts are always computed in chunks": "enable-chunked-prefill",
        "the next step always waits behind the one that runs": "async-scheduling",
        "code of a checkpoint is never run, and none is needed": "trust-remote-code",
        "tools are always read, api.tool_parser says how": "enable-auto-tool-choice",
        "it follows from the chat template": "chat-template-content-format=",
        "a usage always has cached_tokens": "enable-prompt-tokens-details",
        "/tokenizer_info is always there": "enable-tokenizer-info-endpoint",
        "prompts are not logged, unless log.prompts says so": "disable-log-requests",
        "statistics are metrics, at /metrics": "disable-log-stats",
        "log.access says whether requests are logged": "disable-uvicorn-access-log",
        "requests with a lower 'priority' go first, others are served fairly": "scheduling-policy=",
        "Ray places workers, and their ranks are processes": "distributed-executor-backend="
        " data-parallel-backend=",
        "ranks add up by NCCL on GPUs": "disable-custom-all-reduce",
        "ranks divide experts by their width, so all are equally busy": "enable-expert-parallel"
        " enable-eplb eplb-config= all2all-backend= expert-placement-strategy=",
        "only the language model of a checkpoint is loaded": "language-model-only"
        " mm-encoder-tp-mode= mm-encoder-attn-backend= mm-processor-cache-gb="
        " mm-processor-cache-type= disable-chunked-mm-input skip-mm-profiling",
        "config.json and params.json are both read": "config-format=",
        "states are kept where prefixes part": "mamba-cache-mode= mamba-block-size=",
        "kernels are chosen for the GPU": "linear-backend= mamba-backend= gdn-prefill-backend="
        " kernel-config=",
        "grammars are llguidance's": "structured-outputs-config= guided-decoding-backend=",
        "each token and head has a scale": "calculate-kv-scales",
        "decode steps are captured in every size, and nothing else is compiled": "max-seq-len"
        "-to-capture= cudagraph-capture-sizes=+ max-cudagraph-capture-size= compilation-config="
        " optimization-level= disable-cascade-attn enable-flashinfer-autotune"
        " O0 O1 O2 O3",
        "sequences that are preempted keep KV in the host tier (tiers.host_gib)": "swap-space=",
        "an event has what a step gave": "stream-interval=",
        "on CPUs adapters of any rank are served, engine.adapter_bytes at once": "enable-lora"
        " max-loras= max-lora-rank= max-cpu-loras=",
    }
)
# By what to do instead.
REFUSED = _names(
    {
        "name adapters in [[adapters]] of the settings file, or by POST /v1/adapters": "lora"
        "-modules",
        "adapters are computed in the dtype of the model": "lora-dtype",
        "each rank has its part of an adapter anyway": "fully-sharded-loras",
        "prefixes are always cached; requests with a 'cache_salt' keep theirs apart": "no-enable"
        "-prefix-caching",
        "prompts are always computed in chunks, of engine.max_num_batched_tokens": "no-enable"
        "-chunked-prefill long-prefill-token-threshold max-num-partial-prefills",
        "draws follow the 'seed' of a request; without one they are new each time": "seed",
        "every worker is a replica: --prefill 0 --decode N": "data-parallel-size-local"
        " data-parallel-address data-parallel-rank"
        " data-parallel-start-rank data-parallel-rpc-port data-parallel-hybrid-lb"
        " data-parallel-external-lb",
        "the tokens of a sequence are not divided among GPUs: --tensor-parallel-size": "decode"
        "-context-parallel-size prefill-context-parallel-size",
        "states are float32": "mamba-ssm-cache-dtype mamba-cache-dtype",
        "layers are always in groups": "disable-hybrid-kv-cache-manager",
        "requests have chat_template_kwargs": "default-chat-template-kwargs",
        "requests have a thinking_budget": "reasoning-config",
        "tools are run by clients": "tool-server",
        "--attention-backend sets it": "attention-config",
        "layers are not divided: --tensor-parallel-size divides heads": "pipeline-parallel-size",
        "machines join a Ray cluster: --address, or kvrelay up": "nnodes node-rank master-addr"
        " master-port headless",
        "prefill and decode workers exchange KV by themselves: --prefill N --decode N": "kv"
        "-transfer-config kv-events-config",
        "weights are not offloaded; KV is: --set tiers.host_gib=N": "cpu-offload-gb"
        " offload-backend",
        "--drafter names a head or a model, --num-speculative-tokens N bounds drafts": "speculative"
        "-config speculative-model spec-model spec-method spec-tokens",
        "the checkpoint's own is used": "tokenizer tokenizer-mode hf-config-path",
        "--revision names that of the whole checkpoint": "tokenizer-revision code-revision",
        "weights are read from safetensors or GGUF": "load-format",
        "change config.json in a copy of the checkpoint": "hf-overrides rope-scaling rope-theta"
        " disable-sliding-window",
        "set HF_TOKEN in the environment": "hf-token",
        "set HF_HOME in the environment": "download-dir",
        "generation_config.json of the checkpoint gives defaults": "generation-config"
        " override-generation-config",
        'there is no sleep: kvrelay drain with cluster.on_stop = "keep-workers"': "enable-sleep"
        "-mode",
        "set it in engine.arguments of a model that vLLM runs": "limit-mm-per-prompt"
        " mm-processor-kwargs media-io-kwargs",
        "set api.image_hosts": "allowed-media-domains",
        "images come in requests; sound is not supported": "allowed-local-media-path omni",
        "/v1/embeddings, /v1/score and /v1/rerank are there beside it": "task runner convert",
        "set log.access and log.prompts in a file, or by --set": "enable-log-requests max-log-len",
        "clients ask for it: stream_options.include_usage": "enable-force-include-usage",
        "clients ask for it: return_tokens_as_token_ids": "return-tokens-as-token-ids",
        "/status and /metrics tell the load": "enable-server-load-tracking",
        "clients show keys, no certificates: --api-key": "ssl-ca-certs ssl-cert-reqs",
        "a proxy has to take it off": "root-path",
        "it is served at a port: --host and --port": "uds",
        "code of others is not loaded into the server": "middleware tool-parser-plugin"
        " reasoning-parser-plugin logits-processors worker-cls scheduler-cls",
        "responses have the role assistant": "response-role",
        "log probabilities of up to 20 tokens are given": "max-logprobs",
    }
)
# Values of refused ones that ask for what is so.
ALLOWED = {
    **dict.fromkeys(("pipeline-parallel-size", "nnodes"), ("1",)),
    **dict.fromkeys(("runner", "convert"), ("auto",)),
    "tokenizer-mode": ("auto", "hf", "mistral"),
    "limit-mm-per-prompt": ("0",),
    **dict.fromkeys(("mamba-ssm-cache-dtype", "mamba-cache-dtype"), ("auto", "float32")),
    "load-format": ("auto", "safetensors", "mistral"),
    "generation-config": ("auto",),
    "cpu-offload-gb": ("0",),
    "response-role": ("assistant",),
    "max-logprobs": tuple(map(str, range(21))),
    "task": ("auto", "generate"),
}


def spelled(word: str) -> str:
    """The name of a flag, however it is written; without the key of a value in JSON."""
    name = re.split(r"[=.]", word, maxsplit=1)[0].lstrip("-").replace("_", "-")
    return SHORT.get(name, name)


def shown_secrets(words: Iterable[str]) -> list[str]:
    """Settings that these words of a command line give, and that no other user is to read; all
    users of a machine read the command lines of all processes."""
    from kvrelay.cluster.config import secret_settings

    secrets, found = secret_settings(), set()
    for word in words:
        flag = FLAGS.get(spelled(word)) if word.startswith("--") else None
        for name in (flag.setting if flag else "", word.removeprefix("--set=").partition("=")[0]):
            found.update({name} & secrets)
    return sorted(found)


def warn_of_secrets(console: Any) -> None:
    """console: rich's, on which it says which secrets the command line of this process shows."""
    for name in shown_secrets(sys.argv[1:]):
        text = (
            f"warning: {name} is in the command line, which every user of this machine can read:"
            " give it in the settings' file, in a JSON file by --set @FILE, or, where there is one,"
            " by its variable (KVRELAY_API_KEY, KVRELAY_OPERATIONS_KEY)"
        )
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def _answer(name: str) -> tuple[str, bool]:
    """What is said of a flag that sets nothing, and whether that is all; "": it is another one."""
    if found := [HARMLESS[n] for n in (name, f"{name}=", f"{name}=+") if n in HARMLESS]:
        return found[0], True
    if why := REFUSED.get(name):
        return why, False
    off = name.removeprefix("no-")
    if off != name and (why := HARMLESS.get(off)):
        return f"{why}, and that cannot be changed", False
    is_off = off in REFUSED or (off in FLAGS and FLAGS[off].switch is not None)
    return ("that is the default", True) if off != name and is_off else ("", True)


def known(words: Iterable[str], tell: Callable[[str], None]) -> Iterator[str]:
    """Those of `words` that are for click: without the harmless ones, of which `tell` hears, and
    with several values of a flag as one, which has spaces. Raises click.UsageError for one that is
    refused, and for one that nobody knows."""
    left = deque(words)
    while left:
        word = left.popleft()
        name, (given, sign, value) = spelled(word), word.partition("=")
        why, is_harmless = _answer(name)
        if word == "--":
            yield from (word, *left)
            return
        if name == "model" and word.startswith("--"):
            yield value if sign else left.popleft() if left else word
        elif name in FLAGS and FLAGS[name].takes_several and word.startswith("-") and not sign:
            yield from (word, *([" ".join(found)] if (found := _values(left)) else []))
        elif not why or not word.startswith("-"):
            yield word
            if word.startswith("-") and name in FLAGS and FLAGS[name].switch is not None:
                _check_switched_on(given, "it has no value", left)
        elif is_harmless:
            if f"{name}=+" in HARMLESS and not sign:
                _values(left)
            elif f"{name}=" in HARMLESS and not sign and left:
                left.popleft()
            elif not sign:
                _check_switched_on(given, why, left)
            tell(f"{given}: {why}")
        else:
            if not sign and name in ALLOWED and left:
                value = left.popleft()
            if value not in ALLOWED.get(name, ()):
                raise click.UsageError(f"{given}: {why}")


def _values(left: deque[str]) -> list[str]:
    """Takes the words up to the next flag."""
    found = []
    while left and not left[0].startswith("-"):
        found.append(left.popleft())
    return found


def _check_switched_on(given: str, why: str, left: deque[str]) -> None:
    """A switch may have a word that says so, and may not have one that says otherwise. Raises
    click.UsageError."""
    if left and left[0].lower() in ("true", "false") and left.popleft().lower() == "false":
        raise click.UsageError(f"{given} false: {why}; leave it out")


def nearest(name: str, further: Iterable[str] = ()) -> str:
    """What somebody who typed `name` may have meant."""
    from kvrelay.cluster.config import Config

    settings = [
        f"{section}.{key}"
        for section in Config.__struct_fields__
        for key in getattr(type(getattr(Config(), section)), "__struct_fields__", ())
    ]
    key = name.replace("-", "_")
    if exact := [each for each in settings if each.partition(".")[2] == key]:
        return " or ".join(f"--set {each}=VALUE" for each in exact)
    flags = [*FLAGS, *(each.rstrip("=+") for each in (*HARMLESS, *REFUSED)), *further]
    if close := difflib.get_close_matches(name, flags, n=1):
        return f"did you mean --{close[0]}?"
    keys = {each.partition(".")[2]: each for each in settings}
    if close := difflib.get_close_matches(key, keys, n=1):
        return f"did you mean --set {keys[close[0]]}=VALUE?"
    return "--set SECTION.KEY=VALUE takes any setting"


def settings_of(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides`, and what the flags among `options`, by click's names, set. Raises
    click.UsageError where one setting gets two values."""
    from kvrelay.cluster.config import parse_override

    found = dict(overrides)
    for option, given in options.items():
        flag = FLAGS[option.replace("_", "-")]
        if given is None:
            continue
        value = flag.switch
        if value is None and flag.takes_several:
            value = given
        elif value is None:
            text = flag.read(flag.values.get(given, given))
            _, value = parse_override(f"{flag.setting}={text}")
        for key, wanted in {flag.setting: value, **flag.also}.items():
            if found.setdefault(key, wanted) != wanted:
                raise click.UsageError(f"{key} has two values: --{option.replace('_', '-')} is one")
    return found


def _option(name: str, flag: Flag) -> click.Option:
    spellings = [f"--{name}", *([f"-{flag.short}"] if flag.short else [])]
    is_flag, hidden = flag.switch is not None, name in VLLM
    return click.Option(spellings, help=flag.about, is_flag=is_flag, default=None, hidden=hidden)


class FlagsCommand(click.Command):
    """Has the flags as options, and knows what to say of those of vLLM that it has not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [_option(name, flag) for name, flag in FLAGS.items()]
        self.context_settings["token_normalize_func"] = lambda name: name.replace("_", "-")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            words = [*known(args, lambda line: click.echo(line, err=True))]
            rest = super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            own = [name.lstrip("-") for param in self.params for name in param.opts]
            meant = nearest(spelled(error.option_name), own)
            raise click.UsageError(f"no such option: {error.option_name}; {meant}", ctx) from None
        self._check_model_is_left(ctx)
        return rest

    def _check_model_is_left(self, ctx: click.Context) -> None:
        """A flag that takes several values takes a MODEL behind it too. Raises click.UsageError,
        which shows no key."""
        if ctx.params.get("models") or ctx.params.get("model") or ctx.params.get("config_path"):
            return
        for name in (name for name, flag in FLAGS.items() if flag.takes_several):
            count = len((ctx.params.get(name.replace("-", "_")) or "").split())
            if count > 1:
                why = f"--{name} takes the {count} words behind it, and no MODEL is left"
                raise click.UsageError(f"{why}: put MODEL before it", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("As in vllm serve (docs/command-line.md)"):
            formatter.write_dl([(f"--{name}", flag.setting) for name, flag in VLLM.items()])
