"""Text to token ids, for the API: the tokenizer, the chat template and public prompts.

A `Tokenizer` is built once from a Hugging Face model directory: `tokenizer.json` (library:
`tokenizers`), the chat template (library: `jinja2`), the end-of-sequence ids, and how the model's
authors would have it sampled. `encode` and `apply_chat_template` are slow for long texts and
release the interpreter's lock: call them in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from cluster.api.text.chat_template import ChatTemplate, read_chat_template
from cluster.api.text.detokenizer import Decoder
from cluster.api.text.tool_prompt import TemplateError
from engine.request import Pooling

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
_FOLLOWERS = ("a", " b", "\n", ".")


MANY_CHARS = 32  # of a token, on average: a text that has more is looked at before
PIECE_CHARS = 16 * 1024
CUT_TOKENS = 64  # more, at the most, where a piece is cut off


class TooLong(Exception):
    """A text has more tokens than it may; `num_tokens`: at least so many."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TokenizerError(Exception):
    """The model directory has no tokenizer that can be used; one clear line."""


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table); its inverse."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


class Tokenizer:
    """The tokenizer of one model. Immutable; may be used from any thread."""

    def __init__(self, model_dir: str | Path) -> None:
        """Raises `TokenizerError`."""
        self.directory = directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"no tokenizer: {path} does not exist")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"{path} cannot be used: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        special = {name: _content(config.get(name)) for name in _SPECIAL_NAMES}
        self._special = {name: text for name, text in special.items() if text is not None}
        source = read_chat_template(directory, config)
        self.chat_template = ChatTemplate(source, self._special) if source else None
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = self._eos_token_ids(directory)
        generation = _read_json(directory / "generation_config.json")
        self.sampling_defaults: dict[str, float] = {
            name: generation[name] for name in _SAMPLING if generation.get(name) is not None
        }
        pooling = _read_json(directory / "1_Pooling" / "config.json")  # sentence-transformers'
        is_mean = bool(pooling.get("pooling_mode_mean_tokens"))
        self.pooling = Pooling.MEAN if is_mean else Pooling.LAST  # of embeddings
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        state = (
            json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder else {}
        )
        parts = [state, *state.get("decoders", [])]
        is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._byte_of_char = _byte_of_char() if is_byte_level else None

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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch call without offsets is the one that lets go of the interpreter lock.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of the whole conversation, as of `ChatTemplate.render`. Raises
        `TemplateError`, and TooLong where it is plain that they are more than `most`."""
        if self.chat_template is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        text = self.chat_template.render(messages, tools, options, continues=continues)
        self.check_length(text, most)
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves it out."""
        return token in self._special_ids

    def token_id(self, text: str) -> int | None:
        """Of exactly this token; None: there is none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    @cached_property
    def num_start_tokens(self) -> int:
        """Special tokens that every prompt begins with."""
        return len([*takewhile(self.is_special, self.encode("a"))])

    def special_id(self, text: str) -> int | None:
        """Of a special token; None: `text` is none."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self._special_ids else None

    def showing(self, texts: Iterable[str]) -> Decoder:
        """This one's text, with those special tokens that are among `texts`."""
        shown = {self.special_id(text) for text in texts} - {None}
        return _Showing(self, frozenset(shown)) if shown else self

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; of a special token, its name."""
        text = self._added.get(token)
        if text is not None:
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
    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int | None]) -> None:
        self._tokenizer, self._shown = tokenizer, shown

    def decode(self, tokens: Sequence[int]) -> str:
        """None of `tokens` is special to `is_special`."""
        text: str = self._tokenizer._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def is_special(self, token: int) -> bool:
        return self._tokenizer.is_special(token) and token not in self._shown


def _content(token: Any) -> str | None:
    """A special token in `tokenizer_config.json` is a string or an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


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
    return tokenizer.apply_chat_template(messages)


def _common(sequences: Sequence[Sequence[int]]) -> Sequence[int]:
    """Their longest common beginning."""
    first = sequences[0]
    length = min(map(len, sequences))
    for other in sequences[1:]:
        length = next((i for i in range(length) if first[i] != other[i]), length)
    return first[:length]
