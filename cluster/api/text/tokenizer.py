"""Text to token ids, for the API: the tokenizer, the chat template and public prompts.

A `Tokenizer` is built once from a Hugging Face model directory: `tokenizer.json`, or what stands
for it (library: `tokenizers`), the chat template (library: `jinja2`), the end-of-sequence ids, and
how the model's authors would have it sampled. `encode` and `chat_prompt` are slow for long texts
and release the interpreter's lock: call them in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.cluster.api.output.events import ALL_TAGS
from kvrelay.cluster.api.text.chat_template import (
    ChatTemplate,
    ControlStrings,
    TemplateOptions,
    pattern_of,
    private_text,
    read_chat_template,
)
from kvrelay.cluster.api.text.detokenizer import Decoder
from kvrelay.cluster.api.text.tool_prompt import TemplateError
from kvrelay.engine.images import Images
from kvrelay.engine.model.checkpoint.tokenizer import BYTE_CHARS, content_of, read_tokenizer
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.sampling.vocabulary import rename
from kvrelay.engine.request import NUMBERS, Pooling

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
# How sentence-transformers' configuration says that texts become embeddings.
POOLINGS = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_cls_token": Pooling.CLS}
_FOLLOWERS = ("a", " b", "\n", ".")
_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_WORD = re.compile(r"\w*")


MANY_CHARS = 32  # of a token, on average: a text that has more is looked at before
PIECE_CHARS = 16 * 1024
_SHIFTS = (0, 61, 158)  # characters
CUT_TOKENS = 64  # more, at the most, where a piece is cut off


class TooLong(Exception):
    """A text has more tokens than it may; `num_tokens`: at least so many."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TokenizerError(Exception):
    """The model directory has no tokenizer that can be used; one clear line."""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _state(directory: Path) -> dict[str, Any]:
    try:
        return read_tokenizer(directory)
    except ModelError as error:
        raise TokenizerError(str(error)) from error


def _built(state: dict[str, Any], directory: Path) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"the tokenizer in {directory} cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Keep:
    """How much of a prompt is kept: its last tokens, or its first ones."""

    num_tokens: int
    from_end: bool


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    tokens: list[int]
    end: str  # what the template adds after the last message, where a model may reason
    images: Images | None = None
    shown: Sequence[int] = ()  # where there are images, the model's tokens; `tokens` names them


class Tokenizer:
    """The tokenizer of one model. Immutable; may be used from any thread."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        chat_template: str = "",
        parse_special_tokens_in_messages: bool = False,
    ) -> None:
        """`chat_template`: instead of the model's own. Raises `TokenizerError`."""
        self.directory = directory = Path(model_dir)
        self._tokenizer: Any = _built(_state(directory), directory)
        config = _read_json(directory / "tokenizer_config.json")
        special = {name: content_of(config.get(name)) for name in _SPECIAL_NAMES}
        self._special = {name: text for name, text in special.items() if text is not None}
        self.info = {"tokenizer_class": config.get("tokenizer_class"), **special}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = self._eos_token_ids(directory)
        generation = _read_json(directory / "generation_config.json")
        self.sampling_defaults: dict[str, float] = {
            name: generation[name]
            for name, number in NUMBERS.items()
            if number.recommended and generation.get(name) is not None
        }
        pooling = _read_json(directory / "1_Pooling" / "config.json")  # sentence-transformers'
        said = [kind for name, kind in POOLINGS.items() if pooling.get(name)]
        self.pooling = said[0] if said else Pooling.LAST
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        self._added_ids = {text: token for token, text in self._added.items()}
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        source = chat_template or read_chat_template(directory, config) or ""
        controls = [entry for entry in added.values() if _is_control(entry, source)]
        self._control_strings = frozenset(entry.content for entry in controls)
        self._forbidden: ControlStrings | None = None
        if not parse_special_tokens_in_messages:
            normalizer = self._tokenizer.normalizer
            is_normalized = normalizer and any(entry.normalized for entry in controls)
            normalize = normalizer.normalize_str if is_normalized else None
            self._forbidden = ControlStrings(self._control_strings, source, normalize)
        try:
            self.chat_template = (
                ChatTemplate(source, self._special, self._forbidden) if source else None
            )
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        state = (
            json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder else {}
        )
        parts = [state, *state.get("decoders", [])]
        is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        of_bytes = {char: byte for byte, char in enumerate(BYTE_CHARS)}
        self._byte_of_char = of_bytes if is_byte_level else None

    def _eos_token_ids(self, directory: Path) -> tuple[int, ...]:
        """All that any file of the model names as the end of a sequence, ascending."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        token = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if token is not None:
            found.add(token)
        return tuple(sorted(found))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, is_prompt: bool = True
    ) -> list[int]:
        """Special tokens in `text` are parsed if it `is_prompt`, else as in messages. One that
        every prompt begins with (BOS) comes once, also where `text` begins with it."""
        tokenizer = self._tokenizer if is_prompt else self._without_controls(text)
        tokens = _encode(tokenizer, text, add_special_tokens)
        num_start = self.num_start_tokens if add_special_tokens else 0
        is_doubled = num_start and tokens[:num_start] == tokens[num_start : 2 * num_start]
        return tokens[num_start:] if is_doubled else tokens

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        options: TemplateOptions = TemplateOptions(),
        most: int | None = None,
        keep: Keep | None = None,
    ) -> ChatPrompt:
        """The whole conversation, as of `ChatTemplate.render`; only what the template writes makes
        control tokens. `most`, `keep`: as of `encode_bounded`. Raises `TemplateError`, and TooLong
        where it is plain that its tokens are more than `most`."""
        if self.chat_template is None:
            raise TemplateError(
                "this model has no chat template: set model.chat_template, or use /v1/completions"
            )
        found = self.chat_template.prompt(messages, options)

        def encode(text: str) -> list[int]:
            if not found.mark:
                return _encode(self._tokenizer, text, False)
            renamed = self._renamed
            text = renamed.pattern.sub(lambda control: renamed.prefix + control[0], text)
            return _encode(renamed.tokenizer, text.replace(found.mark, ""), False)

        return ChatPrompt(self.encode_bounded(found.text, most, keep, encode), found.end)

    def _without_controls(self, text: str) -> Any:
        """One that parses no special token in `text`, unless messages may have some."""
        is_found = self._forbidden is not None and self._forbidden.are_in(text)
        return self._renamed.tokenizer if is_found else self._tokenizer

    @cached_property
    def _renamed(self) -> _Renamed:
        return _Renamed(self.directory, self._control_strings)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves it out."""
        return token in self._special_ids

    def token_id(self, text: str) -> int | None:
        """Of exactly this token; None: there is none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def added_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the ids of those among `texts` that are added tokens: what a text has of them
        becomes one token, whether it is special or not."""
        return {text: self._added_ids[text] for text in texts if text in self._added_ids}

    @cached_property
    def num_start_tokens(self) -> int:
        """Special tokens that every prompt begins with."""
        return len([*takewhile(self.is_special, _encode(self._tokenizer, "a", True))])

    def showing(self, texts: Iterable[str] | None) -> Decoder:
        """This one's text, with those special tokens that are among `texts`, or with all (None)."""
        if texts is None:
            return _Showing(self, self._special_ids)
        shown = self._special_ids.intersection(map(self.token_id, texts))
        return _Showing(self, shown) if shown else self

    def token_str(self, token: int) -> str:
        """How the vocabulary writes a token: of bytes too that are no characters."""
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; of a special token, its name."""
        text = self._added.get(token)
        if text is not None and (self._byte_of_char or self.is_special(token)):
            return text.encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_of_char is not None:
            return bytes(self._byte_of_char[char] for char in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        plain: str = text.replace("▁", " ")
        return plain.encode()

    def beginning(self, text: str, most: int) -> str:
        """What `text` begins with and has at most `most` tokens, special ones not counted."""
        text = text[: MANY_CHARS * most]
        tokenizer = self._without_controls(text)
        while True:
            (found,) = tokenizer.encode_batch([text], add_special_tokens=False)
            if len(found) <= most:
                return text
            # A character of several tokens may have more of them behind the last one.
            end = min(found.offsets[most - 1][1], found.offsets[most][0])
            text = text[: min(end, len(text) - 1)]

    def encode_bounded(
        self,
        text: str,
        most: int | None,
        keep: Keep | None,
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """What `encode` makes of `text`, or of one that is plainly longer than `most` tokens, what
        `keep` says and one more. Raises TooLong, as `check_length`."""
        if keep and most and keep.num_tokens < most and len(text) > MANY_CHARS * most:
            found = _cut(text, Keep(keep.num_tokens + 1, keep.from_end), encode)
            if found is not None:
                return found
        self.check_length(text, most)
        return encode(text)

    def check_length(self, text: str, most: int | None) -> None:
        """Raises TooLong where `text` has plainly more than `most` tokens, after work that depends
        on `most` and not on the text."""
        if most is None or len(text) <= MANY_CHARS * most:
            return
        count = 0
        for at in range(0, len(text), PIECE_CHARS):
            piece = self.encode(text[at : at + PIECE_CHARS], add_special_tokens=False)
            count += max(0, len(piece) - CUT_TOKENS)
            if count > most:
                raise TooLong(count)


class _Showing:
    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int]) -> None:
        self._tokenizer, self._shown = tokenizer, shown

    def decode(self, tokens: Sequence[int]) -> str:
        """None of `tokens` is special to `is_special`."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def is_special(self, token: int) -> bool:
        return self._tokenizer.is_special(token) and token not in self._shown


class _Renamed:
    """The tokenizer with another name for each control token: `prefix`, then its own. So a text
    can have both the token and the characters of its name, and everything else (normalizer,
    white space around tokens) is as it is without. Made when the first text needs it."""

    def __init__(self, directory: Path, control_strings: Iterable[str]) -> None:
        controls = frozenset(control_strings)
        self.prefix = private_text(8)  # no client can write it
        self.pattern = re.compile(pattern_of(controls) or "(?!)")

        def name(text: str) -> str:
            return self.prefix + text if text in controls else text

        state = _state(directory)
        rename(state, name)
        self.tokenizer: Any = _built(state, directory)


def _cut(text: str, keep: Keep, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The tokens of `text` that are kept, after work that depends on their number. None: they have
    too many characters, or depend on what is left out.

    A token depends on a few characters around it, but for texts such as one letter a million times.
    So what is kept is tokenised three times with more beyond it, each time from another place;
    their distances have no common period. It has to come out the same."""
    num, wanted = keep.num_tokens, keep.num_tokens + CUT_TOKENS
    size = 8 * wanted
    while size <= min(len(text), MANY_CHARS * wanted):
        sizes = [size - shift for shift in _SHIFTS]
        parts = [encode(text[-n:] if keep.from_end else text[:n]) for n in sizes]
        if all(len(part) >= wanted for part in parts):
            first, *others = [part[-num:] if keep.from_end else part[:num] for part in parts]
            return first if all(other == first for other in others) else None
        size *= 2
    return None


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    # The batch call without offsets is the one that lets go of the interpreter lock.
    batch = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = batch[0].ids
    return ids


def _is_control(entry: Any, source: str) -> bool:
    """Whether an added token is more than a frequent text. Many models have white space and HTML
    tags among them, and marks of reasoning and calls that are not called special."""
    text: str = entry.content
    if entry.special:
        return True
    if _WORD.fullmatch(text.replace("▁", "").strip()):
        return False
    return text in source or text in ALL_TAGS or bool(_MARKER.fullmatch(text))


class PublicPrompts:
    """Beginnings of prompts that an operator has declared, whose KV all tenants share. A text
    becomes tokens in two ways: as the system message of a chat, and as the beginning of a
    completion. Of each, only those tokens count that are the same whatever follows.

    Immutable; the prefixes are sorted, the longest first."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        found = {tuple(prefix) for prefix in prefixes}
        self._prefixes = sorted((prefix for prefix in found if prefix), key=len, reverse=True)

    @classmethod
    def of_texts(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> PublicPrompts:
        """Slow for long texts."""
        prefixes: list[Sequence[int]] = []
        for text in texts:
            prefixes.append(_common([tokenizer.encode(text + more) for more in _FOLLOWERS]))
            try:
                prefixes.append(_common([_chat(tokenizer, text, user) for user in ("a", "b")]))
            except TemplateError:
                continue  # the model has no chats with a system message
        return cls(prefixes)

    def num_public_tokens(self, tokens: tuple[int, ...]) -> int:
        """Length of the longest declared beginning that `tokens` has."""
        for prefix in self._prefixes:
            if tokens[: len(prefix)] == prefix:
                return len(prefix)
        return 0


def _chat(tokenizer: Tokenizer, system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.chat_prompt(messages).tokens


def _common(sequences: Sequence[Sequence[int]]) -> Sequence[int]:
    """Their longest common beginning."""
    first = sequences[0]
    length = min(map(len, sequences))
    for other in sequences[1:]:
        length = next((i for i in range(length) if first[i] != other[i]), length)
    return first[:length]


# For prompts of text between a beginning and an end (fill-in-the-middle; Bavarian et al. 2022):
# what goes before the beginning, before the end, and after both; by the models that know them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_END_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


class NoInfill(ValueError):
    """The model knows no tokens for it."""


def infill_prompt(tokenizer: Tokenizer, before: Sequence[int], after: str) -> list[int]:
    """before: tokens of the beginning, with what every prompt begins with. Raises NoInfill."""
    end = tokenizer.encode(after, add_special_tokens=False, is_prompt=False)
    start = tokenizer.num_start_tokens
    for names in _MARKS:
        marks = [tokenizer.token_id(name) for name in names]
        if None not in marks:
            prefix, suffix, middle = (mark for mark in marks if mark is not None)
            return [*before[:start], prefix, *before[start:], suffix, *end, middle]
    marks = [tokenizer.token_id(name) for name in _END_FIRST]
    if None not in marks:
        suffix, prefix = (mark for mark in marks if mark is not None)
        return [*before[:start], suffix, *end, prefix, *before[start:]]
    raise NoInfill("this model has no tokens for text in the middle")
