"""Images of prompts, for vLLM: what tokens they are to the model, and prompts that have some.

Both take vLLM's processor of the model, which scales and cuts images, on a thread of its own: steps
go on meanwhile. What is said of a request that has images comes to the thread that steps in the
order in which it was said.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from kvrelay.decode_worker.vllm.messages import Begin, Expand, ExpandDone, NotBegun
from kvrelay.engine.host import Deliver, first_line
from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.model.vision.pictures import ImageError, read
from kvrelay.engine.node import Effect

log = logging.getLogger("kvrelay.vllm")

MAX_SEEN = 4096  # images, some tens of bytes each
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """Effect: begin what vLLM's processor has made of a prompt with images."""

    begin: Begin
    prompt: Any


class ImageThread:
    """Runs vLLM's processor. Invariant: of the effects about one request with images, each goes on
    to the thread that steps after those before it."""

    def __init__(self, renderer: Any, pass_on: Callable[[Effect], None]) -> None:
        """`pass_on`: to the thread that steps."""
        self._renderer, self._pass_on = renderer, pass_on
        self._deliver: Deliver = lambda message: None
        # Digests of images that vLLM's processor has seen, by the cache that has what it made of
        # them, unless it has dropped it.
        self._seen: dict[bool, dict[str, None]] = {False: {}, True: {}}
        self._begun: set[str] = set()  # keys of requests with images, until they have ended
        self._effects: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm-images", daemon=True)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._thread.start()

    def takes(self, effect: Effect) -> bool:
        """Whether `effect` is about images; it is taken then."""
        key = getattr(effect, "key", None)
        if isinstance(effect, Begin) and effect.images is not None:
            self._begun.add(effect.key)
        elif not isinstance(effect, Expand) and key not in self._begun:
            return False
        self._effects.put(effect)
        return True

    def end(self, key: str) -> None:
        """The request is not at vLLM any more."""
        self._begun.discard(key)

    def close(self) -> None:
        self._effects.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (effect := self._effects.get()) is not None:
            match effect:
                case Expand():
                    self._deliver(self._expand(effect))
                case Begin():
                    self._begin(effect)
                case _:
                    self._pass_on(effect)

    def _begin(self, begin: Begin) -> None:
        assert begin.images is not None
        try:
            prompt = self._render(begin.tokens, begin.images, begin.salt, skip_mm_cache=False)
        except Exception as error:  # what it refuses has classes of vLLM's own
            self.end(begin.key)
            self._deliver(NotBegun(begin.key, first_line(error)))
        else:
            self._pass_on(Rendered(begin, prompt))

    def _expand(self, expand: Expand) -> ExpandDone:
        images = expand.images
        try:
            # Kept apart from what is computed: that cache has pairs, here and where steps are run.
            found = self._render(images.tokens, images, "", skip_mm_cache=True)
            (ranges,) = found["mm_placeholders"].values()
        except ImageError as error:
            return ExpandDone(expand.key, why=str(error))
        except Exception as error:
            log.info("vLLM's processor refuses the images of %s: %r", expand.key, error)
            why = f"the model does not take these images: {first_line(error)}"
            return ExpandDone(expand.key, why=why)
        places = tuple((each.offset, each.length) for each in ranges)
        if len(places) != len(images.each):
            why = f"the chat template shows {len(places)} of {len(images.each)} images"
            return ExpandDone(expand.key, why=why)
        return ExpandDone(expand.key, Expanded(tuple(found["prompt_token_ids"]), places))

    def _render(
        self, tokens: tuple[int, ...], images: Images, salt: str, *, skip_mm_cache: bool
    ) -> Any:
        """Images that vLLM's cache has are not read again."""
        seen = self._seen[skip_mm_cache]
        names = [image.digest.hex() for image in images.each]
        prompt: dict[str, Any] = {
            "prompt_token_ids": list(tokens),
            "multi_modal_uuids": {"image": names},
            **({"cache_salt": salt} if salt else {}),
        }

        def rendered(known: Container[str]) -> Any:
            data = [
                None if name in known else read(index, image)
                for index, (name, image) in enumerate(zip(names, images.each, strict=True))
            ]
            asked = prompt | {"multi_modal_data": {"image": data}}
            (found,) = self._renderer.render_cmpl([asked], skip_mm_cache=skip_mm_cache)
            return found

        try:
            found = rendered(seen)
        except Exception:  # vLLM's have classes of their own
            if not any(name in seen for name in names):
                raise
            for name in names:
                seen.pop(name, None)
            return rendered(())  # what is wrong with them comes again
        seen.update(dict.fromkeys(names))
        while len(seen) > MAX_SEEN:
            del seen[next(iter(seen))]
        return found
