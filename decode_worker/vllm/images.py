"""Images of prompts, for vLLM: what tokens they are to the model, and prompts that have some.

Both take vLLM's processor of the model, which scales and cuts images, on a thread of its own: steps
go on meanwhile. What is said of a request that has images comes to the thread that steps in the
order in which it was said.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.decode_worker.vllm.messages import Begin, Expand, ExpandDone, NotBegun
from kvrelay.engine.host import Deliver, first_line
from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.model.vision.pictures import ImageError, read
from kvrelay.engine.node import Effect

log = logging.getLogger("kvrelay.vllm")

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
        prompt: dict[str, Any] = {
            "prompt_token_ids": list(tokens),
            "multi_modal_data": {"image": [read(i, image) for i, image in enumerate(images.each)]},
            "multi_modal_uuids": {"image": [image.digest.hex() for image in images.each]},
        }
        if salt:
            prompt["cache_salt"] = salt
        (found,) = self._renderer.render_cmpl([prompt], skip_mm_cache=skip_mm_cache)
        return found
