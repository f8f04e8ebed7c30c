"""A tiny model run step by step: by the GPU's kernels, and by plain torch for the answers.

Kernels are interpreted where there is no GPU: import this module before any of engine.model.gpu.
"""

from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.sampling.sampler import read_prompts, sample
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.request import PromptOutputs
from kvrelay.engine.step import ScheduledSeq, Step
from tests.engine.model.paged import DEVICE
from tests.engine.model.tiny import BLOCK_SIZE

from kvrelay.engine.model.gpu.flashinfer.ops import gpu_ops  # isort: skip
from kvrelay.engine.model.gpu.linear import fp8  # isort: skip
from kvrelay.engine.model.gpu.ops import FULL_ROLES  # isort: skip
from kvrelay.engine.model.gpu.steps import GpuSteps  # isort: skip

NUM_BLOCKS, MAX_NUM_SEQS = 12, 4
MAX_LEN = 64 if DEVICE.type == "cpu" else 512  # contexts that an interpreter splits take long


class RoundedOps(TorchOps):
    """The reference for int8 weights on a GPU: the head and the inputs of products are as they
    were."""

    def matrix(self, weight, bias, role):
        if role in FULL_ROLES:
            return self.table(weight), bias, 0
        return super().matrix(weight, bias, role)

    def _inputs(self, x, bits):
        return x


class Fp8Ops(TorchOps):
    """Computes what FP8 on a GPU should."""

    def matrix(self, weight, bias, role):
        wide = self.table(weight)
        if role not in FULL_ROLES and fp8.fits(weight):
            made = fp8.fp8_matrix(weight.to(DEVICE), None)
            return made.numbers.float() * made.scales.view(-1, 1), bias, 1
        return wide, bias, 0

    def linear(self, x, matrix):
        weight, bias, is_fp8 = matrix
        if not is_fp8:
            return super().linear(x, matrix)
        scale = (x.float().abs().amax(1, keepdim=True) / fp8.E4M3_MAX).clamp_(min=1e-12)
        rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
        return torch.nn.functional.linear(rounded, weight, bias).to(x.dtype)

    def add_linear(self, hidden, x, matrix):
        hidden += self.linear(x, matrix)


REFERENCES = {"": TorchOps, "int8": RoundedOps, "fp8": Fp8Ops}


class World:
    """One model over a pool of its own. `run` is a step; its answers are (first, *more)."""

    def __init__(self, path: Path, kind: str, kv_dtype="float32", graphs=False, dtype="float32"):
        """kind: "torch", "triton" or "flashinfer", with "-int8" or "-fp8" for such weights."""
        name, _, weights = kind.partition("-")
        config = read_config(path)
        number = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        spec = config.kv_spec(BLOCK_SIZE, kv_dtype)
        self.num_groups, num_blocks = spec.num_groups, NUM_BLOCKS * spec.num_groups
        shape = (num_blocks, spec.num_layers, spec.num_planes, spec.num_kv_heads)
        if kv_dtype == "float8_e4m3":
            self.pool = torch.zeros((*shape, spec.bytes_per_head), dtype=torch.uint8, device=DEVICE)
        else:
            tail = (BLOCK_SIZE, spec.head_dim)
            self.pool = torch.zeros((*shape, *tail), dtype=number, device=DEVICE)
        groups = spec.windows if spec.num_groups > 1 else ()
        self.limits = Limits(
            num_blocks, BLOCK_SIZE, MAX_LEN, config.vocab_size, group_windows=groups
        )
        with torch.inference_mode():
            if name == "torch":
                made = REFERENCES[weights](config, self.pool, number, MAX_LEN, weights or "none")
            else:
                asked = EngineSection(attention_backend=name, moe_backend=name)
                self.notices: list[str] = []
                rest = (MAX_LEN, weights or "none", asked, self.notices)
                made = gpu_ops(config, self.pool, number, *rest)
            parameters = load_weights(path, config, made, lambda _: None)
            self.decoder = Decoder(config, parameters, made)
            self.steps = None
            if name != "torch":
                self.steps = GpuSteps(
                    self.decoder,
                    self.limits,
                    DEVICE,
                    max_num_seqs=MAX_NUM_SEQS,
                    graphs=graphs,
                    progress=lambda _: None,
                )
                assert self.steps.notices == []

    def spread(self, seq: ScheduledSeq) -> ScheduledSeq:
        """With a block of each group of layers where `seq` has one."""
        groups = range(0, NUM_BLOCKS * self.num_groups, NUM_BLOCKS)
        return replace(seq, block_ids=[block + at for block in seq.block_ids for at in groups])

    def run(self, *seqs: ScheduledSeq, repeats: int = 1) -> list:
        step = Step(0, [self.spread(seq) for seq in seqs], repeats=repeats)
        with torch.inference_mode():
            if self.steps is not None:
                return self.steps.execute(step)[0]
            batch = Batch.from_step(step, self.limits, DEVICE)
            asked = iter(sample(self.decoder.forward(batch), [seq for seq in seqs if seq.sample]))
        return [next(asked) if seq.sample else None for seq in seqs]

    def outputs(self, *seqs: ScheduledSeq) -> dict[int, PromptOutputs]:
        """What prompts gave in one step."""
        step = Step(0, [self.spread(seq) for seq in seqs])
        with torch.inference_mode():
            if self.steps is not None:
                return self.steps.execute(step)[1]
            hidden = self.decoder.hidden_states(Batch.from_step(step, self.limits, DEVICE))
            return read_prompts(step, hidden, self.decoder.logits, sample)[1]
