"""What a step should take on an H100, beside what its memory and tensor cores allow: an estimate.

    python -m benchmarks.gpu.limits

Products reach 82 % of the memory's bytes a second or 62 % of the tensor cores' rate, decode
attention 85 % of the bytes, of which results of its splits are some, and each other kernel of a
captured step takes 2.2 us, an all-reduce of a few rows 12 us. The tile of prompts takes what
`benchmarks.gpu.compile` says of its loop: softmax and products follow one another there. No device
has been asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.model.device_memory import most_splits, splits_of

BYTES_PER_S, FLOPS_PER_S, CLOCK_HZ, NUM_SMS = 3.35e12, 989e12, 1.755e9, 132
OF_BYTES, OF_FLOPS, OF_KV_BYTES = 0.82, 0.62, 0.85
KERNEL_S, ALL_REDUCE_S = 2.2e-6, 12e-6
KERNELS, KERNELS_OF_RANKS = 6, 8  # a layer has beside products: two more add what ranks summed
KERNELS_OF_EXPERTS = 7  # more: the router's product, its inputs, choice, order, and the sum
TILE, HEAD_DIM, SOFTMAX_CYCLES = 128, 128, 1_100  # for a tile of 128 queries and keys


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    width: int
    vocab: int
    ranks: int = 1
    num_experts: int = 1  # each of `width`
    num_chosen: int = 1

    def weights(self, num_mlps: float) -> float:
        """Counts those of a rank, of so many MLPs, or experts, a layer."""
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * HEAD_DIM
        layer = attention + num_mlps * 3 * self.hidden * self.width
        return (self.num_layers * layer + self.hidden * self.vocab) / self.ranks

    def num_read(self, num_tokens: int) -> float:
        """How many experts of a layer tokens choose together, if each is as likely."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)

    def step_s(self, contexts: list[int]) -> tuple[float, float]:
        """Returns the limit and the estimate for a step of decodes over such contexts."""
        num_seqs, heads = len(contexts), self.num_heads // self.ranks
        each = self.num_layers * 2 * self.num_kv_heads * HEAD_DIM * 2 / self.ranks
        kv_s = sum(contexts) * each / BYTES_PER_S
        most = most_splits(heads, HEAD_DIM)
        splits = sum(count for c in contexts if (count := splits_of(c, most)) > 1)
        results = 2 * splits * heads * (HEAD_DIM + 1) * 4 * self.num_layers  # written and read
        bytes_s = 2 * self.weights(self.num_read(num_seqs)) / BYTES_PER_S
        flops_s = 2 * self.weights(self.num_chosen) * num_seqs / FLOPS_PER_S
        kernels = KERNELS if self.ranks == 1 else KERNELS_OF_RANKS
        kernels += KERNELS_OF_EXPERTS if self.num_experts > 1 else 0
        others_s = (self.num_layers * kernels + 1) * KERNEL_S  # and one lists the splits
        if self.ranks > 1:
            others_s += self.num_layers * 2 * ALL_REDUCE_S
        products_s = max(bytes_s / OF_BYTES, flops_s / OF_FLOPS)
        attention_s = (kv_s + results / BYTES_PER_S) / OF_KV_BYTES
        return max(bytes_s, flops_s) + kv_s, products_s + attention_s + others_s


MODELS = (
    Model("8B", 32, 4096, 32, 8, 14336, 128256),
    Model("70B, 4 ranks", 80, 8192, 64, 8, 28672, 128256, ranks=4),
    Model("30B, 128 experts", 48, 2048, 32, 4, 768, 151936, num_experts=128, num_chosen=8),
)
STEPS = {  # contexts
    "1 of 1,024": [1024],
    "1 of 131,072": [131072],
    "64 of 1,024": [1024] * 64,
    "256 of 1,024": [1024] * 256,
    "1 of 131,072, 63 of 2,048": [131072] + [2048] * 63,
}


def prefill_share() -> float:
    """Returns the share of the tensor cores' rate that attention over prompts reaches."""
    flops = 2 * 2 * TILE * TILE * HEAD_DIM
    cycles = flops / (FLOPS_PER_S / NUM_SMS / CLOCK_HZ)
    return cycles / (cycles + SOFTMAX_CYCLES)


def main() -> None:
    print("| model | contexts | limit, ms | estimate, ms | share |")
    print("|---|---|---|---|---|")
    for model in MODELS:
        for name, contexts in STEPS.items():
            limit, estimate = model.step_s(contexts)
            print(
                f"| {model.name} | {name} | {1000 * limit:.1f} | {1000 * estimate:.1f} |"
                f" {limit / estimate:.0%} |"
            )
    print(f"attention over prompts: at most {prefill_share():.0%} of the tensor cores' rate")


if __name__ == "__main__":
    main()
