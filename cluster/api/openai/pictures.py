"""Images in messages: from the parts of three APIs to what the model reads.

A message keeps its images beside its text, in which a mark stands where each was. Only when the
model is known is it decided whether they are read, refused, or replaced by words that say so. What
they are to the model follows from their sizes, or is asked of one of its workers (of vLLM).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from kvrelay.cluster.api.errors import invalid, refused
from kvrelay.cluster.api.text.tokenizer import ChatPrompt
from kvrelay.engine.images import Expanded, Image, Images
from kvrelay.engine.model.vision.pictures import ImageError
from kvrelay.router.messages import Failed, Submit

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvrelay.cluster.api.context import ApiContext

IMAGE_KINDS = ("image_url", "input_image", "image")
MAX_IMAGES = 128  # a request may have so many
MAX_IMAGE_BYTES = 20 << 20
FETCH_S = 10.0
MARK = "\ue002"  # in a text, where an image is; of no script
_NOT_BESIDE = ("prompt_logprobs", "return_token_ids", "truncate_prompt_tokens")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MARKS = re.compile(f"\n?{MARK}\n?")
# What stands for a part that a model of text cannot read, where it is not refused.
UNREAD = "[{}: not shown, this model reads text only]"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that is part of a message. `kind`: of its part. `unread`: the text for a
    model that reads no images; "": the request is refused."""

    url: str
    kind: str
    unread: str


def take_pictures(content: Any, role: Any) -> tuple[Any, tuple[Picture, ...]]:
    """`content` of a message of this role, with a mark in place of each image, and the images;
    or as it is, where one of them is none."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return content, ()
    found: list[Picture] = []
    parts: list[Any] = []
    for part in content:
        if not is_image(part):
            is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
            parts.append(part | {"text": part["text"].replace(MARK, "")} if is_text else part)
            continue
        kind = part["type"]
        # Tools decide what they return, and a result stays in the history: refusing an image would
        # refuse every later turn too.
        unread = UNREAD.format(kind) if role == "tool" or kind == "input_image" else ""
        try:
            found.append(Picture(url_of(part), kind, unread))
        except ValueError:
            if not unread:
                return content, ()  # its texts are read next, which says what is wrong
            parts.append({"type": "text", "text": unread})
        else:
            parts.append({"type": "text", "text": MARK})
    return parts, tuple(found)


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS


def url_of(part: dict[str, Any], place: str = "") -> str:
    """What is said of an image. place: for errors. Raises ValueError."""
    if part["type"] == "image":  # Anthropic's
        source = part.get("source")
        about = source if isinstance(source, dict) else {}
        given, kind = about.get("data"), about.get("media_type")
        if about.get("type") == "base64" and isinstance(given, str) and isinstance(kind, str):
            return f"data:{kind};base64,{given}"
        url = about.get("url") if about.get("type") == "url" else None
        if not isinstance(url, str):
            raise ValueError(
                f"{place}an image has a 'source' of type base64, with 'media_type' and 'data', or"
                " of type url, with 'url'"
            )
        return url
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise ValueError(
            f"{place}an {part['type']} has an 'image_url': a data URL, or an object with one as"
            " 'url'"
        )
    return url


def shown(text: str) -> list[dict[str, str]]:
    """Text and images in their order, as chat templates know them."""
    found: list[dict[str, str]] = []
    for i, piece in enumerate(_MARKS.split(text)):
        found += [{"type": "image"}] if i else []
        found += [{"type": "text", "text": piece}] if piece else []
    return found


def unread(text: str, pictures: Sequence[Picture]) -> str:
    """Returns the text for a model that reads no images."""
    for picture in pictures:
        text = text.replace(MARK, picture.unread, 1)
    return text


def has_vision(model_dir: Path) -> bool:
    """Whether a checkpoint's files are those of a model that reads images."""
    if any((model_dir / name).is_file() for name in _PROCESSORS):
        return True
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vision_config" in config


async def read_pictures(ctx: ApiContext, pictures: Sequence[Picture]) -> tuple[Image, ...]:
    """Returns their bytes. Raises `ApiError`."""
    if len(pictures) > MAX_IMAGES:
        raise invalid(
            f"'messages': {len(pictures)} images are more than {MAX_IMAGES}", param="messages"
        )
    found = []
    for i, picture in enumerate(pictures):
        try:
            if picture.url[:5].lower() == "data:":
                found.append(await ctx.in_thread(len(picture.url), _of_data, picture.url))
            else:
                found.append(Image.of(await _fetched(picture.url, ctx.settings.image_hosts)))
        except ValueError as error:
            raise invalid(f"'messages': image {i}: {error}", param="messages") from None
    return tuple(found)


def _of_data(url: str) -> Image:
    """Returns what a data URL holds. Raises ValueError."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"a data URL begins with 'data:image/png;base64,', got {url[:40]!r}")
    try:
        found = base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError("what follows 'base64,' is not base64") from None
    if not 0 < len(found) <= MAX_IMAGE_BYTES:
        raise ValueError(f"an image has 1 to {MAX_IMAGE_BYTES} bytes, got {len(found)}")
    return Image.of(found)


async def _fetched(url: str, hosts: str) -> bytes:
    """hosts: from which images may come. Raises ValueError."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = None, ""
    if parts is None or parts.scheme not in ("http", "https") or not host:
        raise ValueError(
            f"expected a data URL, such as 'data:image/png;base64,...', got {url[:80]!r}"
        )
    if host not in hosts.split():
        raise ValueError(
            f"this server fetches no images from {host!r:.80} (api.image_hosts): send a data URL"
        )
    try:
        async with (
            httpx.AsyncClient(timeout=FETCH_S, follow_redirects=False) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise ValueError(f"{host} answers {answer.status_code}")
            data = b""
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > MAX_IMAGE_BYTES:
                    raise ValueError(f"{host} sends more than {MAX_IMAGE_BYTES} bytes")
            return data
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise ValueError(f"{host} cannot be read from: {what}") from None


def readable(ctx: ApiContext, request: BaseModel, found: list[Picture]) -> list[Picture]:
    """Those of a request's that the model reads. Raises `ApiError`."""
    if not ctx.reads_images:
        for picture in (each for each in found if not each.unread):
            what = f"this model reads text, no part of type {picture.kind!r}"
            raise invalid(f"'messages': {what}", param="messages")
        return []
    template = ctx.tokenizer.chat_template
    if found and template is not None and "image" not in template.source:
        raise invalid("this model's chat template has no place for images", param="messages")
    for name in _NOT_BESIDE if found else ():
        if getattr(request, name) not in (None, False):
            raise invalid(f"'{name}' is not supported where messages have images", param=name)
    return found


async def with_images(
    ctx: ApiContext,
    prompt: ChatPrompt,
    pictures: Sequence[Picture],
    asking: Callable[[Images], Submit],
) -> ChatPrompt:
    """The prompt as the model reads it. asking: a worker for the tokens of images, where they are
    not known here. Raises `ApiError`."""
    images = Images(tuple(prompt.tokens), await read_pictures(ctx, pictures))
    if ctx.expand is None:
        expanded = await _asked(ctx, asking(images))
    else:
        size = sum(len(image.data) for image in images.each)
        try:
            expanded = await ctx.in_thread(size, ctx.expand, images)
        except ImageError as error:
            raise invalid(f"'messages': {error}", param="messages") from None
    return ChatPrompt([*expanded.named(images.each)], prompt.end, images, expanded.tokens)


async def _asked(ctx: ApiContext, submit: Submit) -> Expanded:
    """What a worker says that the images of `submit` are. Raises `ApiError`."""
    stream = ctx.client.submit(submit)
    try:
        async for message in stream:
            if isinstance(message, Failed):
                raise refused(message)
    finally:
        ctx.client.cancel(stream.request_id)
    assert stream.prompt.expanded is not None, stream.request_id
    return stream.prompt.expanded
