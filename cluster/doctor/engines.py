"""Whether the environments of other engines can serve what is set."""

from __future__ import annotations

from pathlib import Path

from kvrelay.cluster.config import Config
from kvrelay.cluster.doctor.findings import Finding, fail, ok, skipped
from kvrelay.decode_worker.vllm.form import Form, form_of
from kvrelay.engine.model.checkpoint.resolve import resolve_config
from kvrelay.engine.model.errors import ModelError
from kvrelay.worker.kv_plan import BuildError

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


def _text(form: Form) -> str:
    if not form.bytes_per_block:
        return f"vLLM {form.version}: KV has a form that is not known before it is loaded"
    size = f"{form.bytes_per_block // form.block_size:,} bytes of KV a token"
    moved = "which stays in its memory" if form.why_not else "which is copied and handed over"
    return f"vLLM {form.version}, {size}, {moved}"
