"""Whether engines have what they need beside their packages to serve what is set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvrelay.cluster.config import Config
from kvrelay.cluster.doctor.findings import Finding, fail, ok, skipped, warn
from kvrelay.decode_worker.vllm.form import Form, form_of
from kvrelay.engine.model.checkpoint.resolve import PACKAGED, resolve_config
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.support import Capability, engine_traits, model_traits, refusal_of
from kvrelay.worker.kv_plan import BuildError, model_config

CHECK = "vLLM"


def check_vllm(config: Config, *, on_gpu: bool) -> list[Finding]:
    """One finding for each model that vLLM runs: it is asked, which takes a minute the first
    time."""
    served = [each for each in config.by_model().values() if each.engine.runs == "vllm"]
    if not served:
        return [skipped(CHECK, "no model has engine.runs = 'vllm'")]
    return [_check(own, on_gpu and own.model.device != "cpu") for own in served]


def _check(own: Config, on_gpu: bool) -> Finding:
    section = own.model
    cache_dir = Path(section.cache_dir) if section.cache_dir else None
    try:
        path = resolve_config(
            section.name, section.revision, cache_dir=cache_dir, progress=lambda _: None
        )
        form = form_of(path, section, own.engine.sized(gpu=on_gpu), on_gpu=on_gpu)
    except (BuildError, ModelError) as error:
        return fail(CHECK, str(error), "docs/engines.md has what engine.python needs")
    return ok(CHECK, f"{section.name}: {_text(form)}")


def check_images(config: Config, versions: Mapping[str, str], *, on_gpu: bool) -> Finding:
    """Whether models that read images have what opens files of them."""
    check = "images"
    if "pillow" in versions:
        return ok(check, f"Pillow {versions['pillow']}")
    served = config.by_model().values()
    seeing = [each.model.name for each in served if _sees(each, on_gpu=on_gpu)]
    if not seeing:
        return skipped(check, "no model reads them in our own engine")
    text = f"Pillow is missing, which opens them: {', '.join(seeing)} answers texts alone"
    return warn(check, text, "pip install 'kvrelay[images]'")


def _sees(own: Config, *, on_gpu: bool) -> bool:
    section = own.model
    if own.engine.runs == "vllm" or section.name in PACKAGED or section.name.endswith(".gguf"):
        return False
    cache_dir = Path(section.cache_dir) if section.cache_dir else None
    try:
        path = resolve_config(
            section.name, section.revision, cache_dir=cache_dir, progress=lambda _: None
        )
        shape = model_config(path, own.engine)
    except ModelError:  # the start says it
        return False
    on_gpu = on_gpu and section.device != "cpu"
    traits = engine_traits(own.engine, on_gpu=on_gpu) | model_traits(shape)
    return not refusal_of(Capability.IMAGES, traits)


def _text(form: Form) -> str:
    if not form.bytes_per_block:
        return f"vLLM {form.version}: KV has a form that is not known before it is loaded"
    size = f"{form.bytes_per_block // form.block_size:,} bytes of KV a token"
    moved = "which stays in its memory" if form.why_not else "which is copied and handed over"
    return f"vLLM {form.version}, {size}, {moved}"
