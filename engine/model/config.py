"""The configuration of a model: the shape of the decoder, whatever family it is from.

`checkpoint.families.read_config` makes one from a Hugging Face directory. Neither torch nor
transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from itertools import count as count_from
from math import ceil, gcd
from pathlib import Path
from typing import Any

from kvrelay.engine.cache_dir import version_of
from kvrelay.engine.kv.spec import DTYPE_BYTES, STATE_WINDOW, KVHeads, KVSpec
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.kv_layout import Layers, kv_groups, mixed_spec
from kvrelay.engine.model.state_layout import Recurrent, StateLayout
from kvrelay.engine.model.vision.config import Vision

INT8_GROUP, INT4_GROUP = 64, 32  # inputs that share a scale
PACKED_BYTES = {"mxfp4": 17 / 32, "fp8": 1.001}  # a number takes, with its part of a scale

# What a digest always tells, beside fields without a default. Others, which came later, count where
# they are not at their default: a further field leaves the KV of models without it as it was.
ALWAYS_DIGESTED = {
    name: frozenset(names.split())
    for name, names in {
        "Rope": "scaling",
        "RopeScaling": "low_freq_factor high_freq_factor original_max_position beta_fast beta_slow"
        " truncate short_factors long_factors attention_factor",
        "Latent": "interleaved",
        "Experts": "normalize scoring scale num_groups num_chosen_groups has_bias shared_size"
        " first_layer has_biases",
        "ModelConfig": "layer_ropes windows num_sinks activation learned_sinks attention_scale"
        " attention_softcap logits_softcap embed_scale sandwich_norms norm_offset norms_all_heads"
        " query_growth query_growth_length latent experts",
    }.items()
}
ATTENTION = "attention"
MLP, EXPERTS = "mlp", "experts"  # layers that mix no tokens


def _digested(value: Any) -> Any:
    """As `dataclasses.asdict`, without fields that came later and are at their default."""
    if isinstance(value, (tuple, list)):
        return [_digested(each) for each in value]
    if not is_dataclass(value):
        return value
    always = ALWAYS_DIGESTED.get(type(value).__name__, frozenset())
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {
        field.name: _digested(own)
        for field, own in pairs
        if field.name in always or field.default is MISSING or own != field.default
    }


def versions_of(files: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    return {file: version_of(file.stat()) for file in files}


def check_unchanged(before: dict[Path, tuple[int, ...]], files: Iterable[Path]) -> None:
    """Called when files and their digests have been read, with what `versions_of` gave before: a
    digest of a file that was written, replaced, added or removed meanwhile may be of other bytes
    than those that were read. Raises ModelError."""
    after = versions_of(files)
    for file in sorted(before | after):
        if before.get(file) != after.get(file):
            raise ModelError(f"{file} was changed while the model was loaded: start again")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled. `linear` uses `factor` alone, `llama3` the two bounds,
    `yarn` the two betas, `longrope` the two lists of factors, `proportional` the number of those
    that turn at all."""

    kind: str  # "linear" | "llama3" | "yarn" | "longrope" | "proportional"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    turning: int = 0  # the first ones

    def is_long(self, max_model_len: int) -> bool:
        """Whether longrope uses its long factors. The same for every position: a cached key is
        read by all later queries, so it cannot be rotated again when a sequence grows long."""
        return self.kind == "longrope" and max_model_len > self.original_max_position


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding. Layers name theirs by its index in `ModelConfig.ropes`."""

    theta: float
    dim: int  # leading dimensions of a head that are rotated, first with second half (NeoX style)
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Indexer:
    """DeepSeek sparse attention (V3.2): a token attends to those `topk` positions up to its own
    that score highest. A score is the sum over heads of weight * relu(query * key); a position has
    one key for all heads, which is kept beside its latent."""

    num_heads: int  # index_n_heads
    head_dim: int  # index_head_dim
    topk: int  # index_topk
    interleaved: bool  # rotated rows are stored in pairs, and reordered
    # Layers that score. Others attend to what the last one before them chose. (): all do.
    layers: tuple[int, ...] = ()

    def scores_in(self, layer: int) -> bool:
        return not self.layers or layer in self.layers


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2/V3): what is cached of a token is one latent of
    `rank` numbers and one rotated key of `rope_dim`, shared by all heads."""

    rank: int  # kv_lora_rank
    q_rank: int | None  # q_lora_rank; None: queries are projected at once
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True  # rotated rows are stored in pairs (GPT-J style), and reordered
    scale: float = 1.0  # multiplies latents before their norms, whose epsilon may be another
    indexer: Indexer | None = None  # None: attention to all positions


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP, in layers from `first_layer` on."""

    num_experts: int
    num_per_token: int
    intermediate_size: int  # one expert's
    normalize: bool  # the chosen experts' weights are made to sum to one
    scoring: str = "softmax"  # or "sigmoid"
    scale: float = 1.0  # multiplies the chosen weights
    num_groups: int = 1  # experts are chosen from the best `num_chosen_groups` groups
    num_chosen_groups: int = 1
    has_bias: bool = False  # a correction that counts for the choice, not for the weight
    shared_size: int = 0  # intermediate size of the experts that every token passes; 0: none
    shared_gate: bool = False  # sigmoid of a product with the token multiplies their output
    first_layer: int = 0
    step: int = 1  # from `first_layer` on, every so many layers; the others have an MLP
    has_biases: bool = False  # the router, and both projections of each expert
    packed: str = ""  # "mxfp4" or "fp8": as they are stored, and as a GPU keeps them
    scales_inputs: bool = False  # the one chosen expert's weight multiplies what goes in (Llama 4)
    # Gemma 4: beside an MLP, with norms of its own before and behind, and one before the router.
    # Each expert's weight is multiplied by a number more.
    has_norms: bool = False

    def sparse_layers(self, num_layers: int) -> range:
        return range(self.first_layer, num_layers, self.step)


ALL_BUT_FIRST = 1  # in place of a chunk: of one position it would be no attention
UNIT_ALIGNMENT = 16  # bytes, for vectors of float32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know. Checked: a value of this type can be computed."""

    architecture: str  # a key of families.FAMILIES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # 1 with latent attention
    head_dim: int  # with latent attention: of what is cached, rank + rope_dim
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    tie_word_embeddings: bool
    attention_bias: bool  # query, key and value projections have one
    output_bias: bool  # the attention's output projection has one
    qk_norm: bool  # RMSNorm of queries and keys, of each head
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # config.json's and generation_config.json's together
    layer_ropes: tuple[int, ...] = ()  # for each layer, into `ropes`; -1: none. (): all the first
    windows: tuple[int, ...] = ()  # for each layer: positions it attends to, itself among them; 0:
    # all. (): all layers attend to all
    num_sinks: int = 0  # first positions that windowed layers attend to as well
    # Layers that rotate attend to positions of their own chunk, of so many, alone. 0: to all;
    # ALL_BUT_FIRST: to all but the first one.
    attention_chunk: int = 0
    # Or "gelu_tanh", "clamped_swish" (gpt-oss): what the gate passes; or "squared_relu": no gate.
    activation: str = "silu"
    learned_sinks: bool = False  # each head has a score more, of nothing, in every softmax
    sinks_in_windows: bool = False  # only layers with a window have them
    # For each layer, where they differ. Then num_kv_heads is what divides all of theirs, and
    # head_dim the size of the largest key.
    layer_heads: tuple[KVHeads, ...] = ()
    kv_owners: tuple[int, ...] = ()  # for each layer, whose keys and values it reads. (): its own
    sharing_mlp: int = 1  # so many times as wide an MLP in layers that read another's
    value_norm: bool = False  # RMSNorm of each head's value, without a weight
    layer_inputs: int = 0  # numbers of each token that a layer has beside its input (Gemma 3n, 4)
    layer_scales: bool = False  # a layer's output is multiplied by a number
    value_scale: float = 1.0
    attention_scale: float = 0.0  # multiplies scores; 0: head_dim**-0.5
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: they do not
    logits_softcap: float = 0.0
    embed_scale: float = 1.0
    sandwich_norms: bool = False  # a norm after attention and MLP too, before the residual
    norm_offset: float = 0.0  # added to the weights of norms as they are loaded
    norms_all_heads: bool = False  # with qk_norm: one norm over all heads of queries, one of keys
    plain_qk_norm: bool = False  # RMSNorm of each head without a weight, in layers that rotate
    interleaved: bool = False  # queries' and keys' rows are stored in pairs (GPT-J), and reordered
    # Queries are multiplied by 1 + query_growth * ln(1 + position // query_growth_length).
    query_growth: float = 0.0
    query_growth_length: int = 0
    growth_unrotated: bool = False  # in layers that do not rotate alone, with positions from 1 on
    latent: Latent | None = None
    experts: Experts | None = None
    output_gate: bool = False  # sigmoid(gate), a projection of its own, multiplies attention
    recurrent: Recurrent | None = None
    layer_kinds: tuple[str, ...] = ()  # for each layer ATTENTION or recurrent.kind; (): the first
    # A layer is one of what others have two of: its kind may be MLP or EXPERTS too, and what mixes
    # tokens has neither behind it.
    single_blocks: bool = False
    weight_scales: tuple[tuple[str, float], ...] = ()  # matrices are multiplied as they are loaded
    num_mtp_layers: int = 0  # behind the last one, in the checkpoint: they draft tokens
    vision: Vision | None = None  # None: text alone is read

    def kind(self, layer: int) -> str:
        """Returns ATTENTION, the kind of a recurrent layer, or MLP or EXPERTS."""
        return self.layer_kinds[layer] if self.layer_kinds else ATTENTION

    def mixes(self, layer: int) -> bool:
        """Whether tokens read others in it: it has attention, is recurrent, or both."""
        return self.kind(layer) not in (MLP, EXPERTS)

    def has_experts(self, layer: int) -> bool:
        if self.single_blocks:
            return self.kind(layer) == EXPERTS
        return self.experts is not None and layer in self.experts.sparse_layers(self.num_layers)

    def has_mlp(self, layer: int) -> bool:
        """Whether it has an MLP that is no expert."""
        if self.single_blocks:
            return self.kind(layer) == MLP
        return not self.has_experts(layer)

    @property
    def is_gated(self) -> bool:
        """Whether what comes into an MLP is projected twice, and one multiplies the other."""
        return self.activation != "squared_relu"

    def attends(self, layer: int) -> bool:
        """Whether a layer has keys and values; a recurrent one may, too."""
        beside = self.recurrent is not None and self.recurrent.beside_attention
        return beside or self.kind(layer) == ATTENTION

    def kv_owner(self, layer: int) -> int:
        return self.kv_owners[layer] if self.kv_owners else layer

    def keeps_kv(self, layer: int) -> bool:
        """Whether it has keys and values of its own."""
        return self.attends(layer) and self.kv_owner(layer) == layer

    @property
    def last_kv_layer(self) -> int:
        """In layers behind it, rows after which nothing is sampled leave nothing."""
        layers = range(self.num_layers - 1, 0, -1)
        return next((layer for layer in layers if self.kv_owner(layer) == layer), 0)

    def kv_heads(self, layer: int) -> KVHeads:
        """Those of a tensor-parallel rank, where the model is a rank's."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return KVHeads(self.num_kv_heads, self.head_dim, self.head_dim)

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size * (1 if self.keeps_kv(layer) else self.sharing_mlp)

    @property
    def recurrent_layers(self) -> list[int]:
        kind = None if self.recurrent is None else self.recurrent.kind
        return [layer for layer, each in enumerate(self.layer_kinds) if each == kind]

    @property
    def num_state_units(self) -> int:
        """Into how many parts blocks are cut where there are states: the most that divide the heads
        of attention and of recurrent layers, and of which each is a part of a KV head, or several.
        A number of ranks that divides them divides the states."""
        own, kv_heads = self.recurrent, self.num_kv_heads
        if own is None:
            return 1
        most = gcd(self.num_heads, own.num_heads or own.conv_channels)
        fits = (n for n in range(most, 0, -1) if not (most % n or (n % kv_heads and kv_heads % n)))
        return next(filter(own.splits, fits))

    @property
    def state_layout(self) -> StateLayout | None:
        """Where each recurrent layer has its state; None: there are no such layers."""
        return None if self.recurrent is None else self.recurrent.layout(self.num_state_units)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope(self, layer: int) -> Rope | None:
        index = self.layer_ropes[layer] if self.layer_ropes else 0
        return None if index < 0 else self.ropes[index]

    def chunk(self, layer: int) -> int:
        return 0 if self.rope(layer) is None else self.attention_chunk

    def kv_window(self, layer: int) -> int:
        """Positions whose keys and values a query may read, its own among them; 0: all. That of a
        chunk is as wide as at the chunk's end."""
        return self.window(layer) or self.chunk(layer)

    def window_or_chunk(self, layer: int) -> int:
        """As kernels take it: a window, or a chunk as a negative number."""
        return self.window(layer) or -self.chunk(layer)

    def rotated_half(self, layer: int) -> int:
        """Half of the rotated dimensions of a head, or of all if none is rotated."""
        rope = self.rope(layer)
        return (self.kv_heads(layer).key_dim if rope is None else rope.dim) // 2

    @property
    def indexer(self) -> Indexer | None:
        return None if self.latent is None else self.latent.indexer

    @property
    def score_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def changes_queries(self) -> bool:
        """Whether queries are changed as a whole, before each head's norm and rotation."""
        return self.norms_all_heads or self.query_growth != 0.0

    @property
    def is_layerwise(self) -> bool:
        """Whether a step runs layer by layer where it would run through all of them at once."""
        has_norms = self.experts is not None and self.experts.has_norms
        return self.changes_queries or self.single_blocks or has_norms or self.layer_inputs > 0

    @property
    def cpu_lacks(self) -> str:
        """What of it the kernels of CPUs do not compute, so that torch does; "": nothing."""
        if self.learned_sinks:
            return "learned attention sinks"
        if self.experts is not None and self.experts.has_biases:
            return "biases of experts"
        return ""

    @property
    def max_window(self) -> int:
        """The widest window, if every layer has one: tokens before it have no effect any more. 0:
        some layer attends to all."""
        return max(self.windows) if self.windows and all(self.windows) else 0

    def kv_groups(self) -> tuple[tuple[int, Layers], ...]:
        """Layers whose KV shares a block, with the window that they all have; the last of each
        window may have fewer layers. First those that attend to most."""
        classes: dict[tuple[int, KVHeads], Layers] = {}
        for layer in filter(self.keeps_kv, range(self.num_layers)):
            key = self.kv_window(layer), self.kv_heads(layer)
            classes[key] = (*classes.get(key, ()), layer)
        return kv_groups(classes)

    def kv_places(self) -> dict[int, tuple[int, int]]:
        """For each layer with keys and values, its own or another's, the group that has them, and
        where they are in the group's blocks."""
        places = {
            layer: (group, index)
            for group, (_, layers) in enumerate(self.kv_groups())
            for index, layer in enumerate(layers)
        }
        layers = filter(self.attends, range(self.num_layers))
        return {layer: places[self.kv_owner(layer)] for layer in layers}

    def attention_spec(self, block_size: int, dtype: str) -> KVSpec:
        """The shape of KV, without states."""
        groups = self.kv_groups()
        if self.layer_heads:
            sizes = ((window, self.kv_heads(layers[0]), len(layers)) for window, layers in groups)
            return mixed_spec(tuple(sizes), block_size, dtype)
        planes = 2 if self.latent is None else 1
        layers = max(len(layers) for _, layers in groups)
        windows = tuple(window for window, _ in groups)
        shape = (layers, self.num_kv_heads, self.head_dim, block_size)
        return KVSpec(*shape, dtype, planes, windows)

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        """Blocks have more tokens than `block_size` where they have to hold the state of a
        recurrent layer. Such layers are in groups after the others, as many in a block as fit."""
        spec, layout = self.attention_spec(block_size, dtype), self.state_layout
        if layout is None:
            return spec
        units, size = layout.num_units, 4 * layout.unit_size
        whole = next(  # numbers in a unit have to be aligned
            count
            for count in count_from(-(-units * size // spec.bytes_per_block))
            if count * spec.bytes_per_block % (UNIT_ALIGNMENT * units) == 0
        )
        spec = replace(spec, block_size=block_size * whole)
        in_block = spec.bytes_per_block // units // size
        num_groups = -(-len(self.recurrent_layers) // in_block)
        windows = (*spec.windows, *(STATE_WINDOW for _ in range(num_groups)))
        return replace(spec, windows=windows, num_state_groups=num_groups, num_units=units)

    def state_places(self, spec: KVSpec) -> dict[int, tuple[int, int]]:
        """For each recurrent layer its group of those that hold states, and the first float32 of
        its state in each unit of the group's blocks."""
        layout = self.state_layout
        if layout is None:
            return {}
        size = layout.unit_size
        in_block = spec.layer_bytes // layout.num_units // (4 * size)
        return {
            layer: (index // in_block, index % in_block * size)
            for index, layer in enumerate(self.recurrent_layers)
        }

    def digest(
        self,
        path: Path,
        max_model_len: int | None = None,
        quantization: str = "none",
        *,
        dtype: str = "",
    ) -> bytes:
        """32 bytes; differs between two checkpoints that compute different KV from the same tokens.
        That depends on how weights are quantized (named by `quantize.scheme`), with longrope on the
        length that is served, and on `dtype`, where KV has another one than what computes it.

        Every byte of the weights, of config.json and of the vocabulary counts (see `file_digest`
        for what is kept of an earlier start). Chat templates and generation_config.json do not:
        they decide which tokens are sent, not what KV these have.
        """
        from kvrelay.engine.identity import files_of, identity_of  # reads files: not for a shape

        shape = _digested(self)
        del shape["bos_token_id"], shape["eos_token_ids"]
        shape.pop("num_mtp_layers", None)
        length = max_model_len or self.max_position_embeddings
        shape["long"] = [rope.scaling.is_long(length) for rope in self.ropes if rope.scaling]
        if quantization != "none":
            shape["quantization"] = quantization
        if dtype:
            shape["dtype"] = dtype
        return identity_of(files_of(path), shape)

    @property
    def num_parameters(self) -> int:
        """Counts all matrices, tables and norms; biases are left out."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        each, projections = self.layer_inputs, (2 + self.is_gated) * self.hidden_size
        total = tables + self._norm_parameters + self._mixer_parameters
        total += (self.vocab_size + 3 * self.hidden_size) * self.num_layers * each
        dense = filter(self.has_mlp, range(self.num_layers))
        total += sum(projections * self.mlp_width(layer) for layer in dense)
        if (expert := self.experts) is not None:
            width = expert.num_experts * expert.intermediate_size + expert.shared_size
            choice = self.hidden_size * (expert.num_experts + expert.shared_gate)
            each_layer = projections * width + choice + self._expert_norms
            total += self._count(self.has_experts) * each_layer
        return total

    @property
    def num_routed(self) -> int:
        """Counts those of all experts that tokens choose among."""
        if (experts := self.experts) is None:
            return 0
        width = experts.num_experts * experts.intermediate_size
        return self._count(self.has_experts) * (2 + self.is_gated) * self.hidden_size * width

    @property
    def _norm_parameters(self) -> int:
        """Counts those of the residual stream's norms, and of a layer's inputs."""
        each = 4 if self.sandwich_norms else 1 if self.single_blocks else 2
        each += 1 if self.layer_inputs else 0
        return (self.num_layers * each + 1) * self.hidden_size + self.layer_inputs

    @property
    def _expert_norms(self) -> int:
        experts = self.experts
        has = experts is not None and experts.has_norms
        return 4 * self.hidden_size + experts.num_experts if experts and has else 0

    def _count(self, which: Callable[[int], bool]) -> int:
        return sum(map(which, range(self.num_layers)))

    @property
    def num_float32(self) -> int:
        """Counts those of `num_parameters` that are kept in float32 whatever the dtype: norms,
        choices of experts, and the second projection of a latent."""
        total = self._norm_parameters
        if self.experts is not None:
            each = self.hidden_size * self.experts.num_experts + self._expert_norms
            total += self._count(self.has_experts) * each
        if (latent := self.latent) is not None:
            up = self.num_heads * latent.rank * (latent.nope_dim + latent.value_dim)
            total += self._count(self.attends) * up
        if (indexer := self.indexer) is not None:
            each = self.hidden_size * indexer.num_heads + 2 * indexer.head_dim
            total += self._count(indexer.scores_in) * each
        if self.recurrent is not None:
            total += self.layer_kinds.count(self.recurrent.kind) * self.recurrent.num_float32
        return total

    @property
    def _mixer_parameters(self) -> int:
        """Counts those of all layers' attention, or of what they have in place of it."""
        attending, recurrent = filter(self.attends, range(self.num_layers)), self.recurrent
        total = sum(map(self._attention_parameters, attending))
        if recurrent is None:
            return total
        count = self.layer_kinds.count(recurrent.kind)
        matrices = recurrent.num_matrices(self.hidden_size)
        return total + count * (matrices + recurrent.num_float32)

    def _attention_parameters(self, layer: int) -> int:
        if (latent := self.latent) is None:
            kv = self.kv_heads(layer)
            heads = (1 + self.output_gate) * kv.key_dim + kv.value_dim  # queries and outputs
            width = self.num_heads * heads
            norms = kv.key_dim if self.qk_norm else 0
            if self.keeps_kv(layer):
                width += kv.num_heads * (kv.key_dim + kv.value_dim)
                norms *= 2
            if self.norms_all_heads:
                norms = (self.num_heads + kv.num_heads) * kv.key_dim
            return self.hidden_size * width + norms
        queries = self.num_heads * (latent.nope_dim + latent.rope_dim)
        q_rank = latent.q_rank or 0
        total = (self.hidden_size + 1) * q_rank + queries * (q_rank or self.hidden_size)
        total += self.hidden_size * self.head_dim + latent.rank
        total += self.num_heads * latent.rank * (latent.nope_dim + latent.value_dim)
        if (indexer := latent.indexer) is not None and indexer.scores_in(layer):
            total += self.hidden_size * (indexer.num_heads + indexer.head_dim)
            total += q_rank * indexer.num_heads * indexer.head_dim + 2 * indexer.head_dim
        return total + self.hidden_size * self.num_heads * latent.value_dim


def with_window(config: ModelConfig, window: int, sinks: int) -> ModelConfig:
    """`config` with every layer attending to at most the last `window` positions, itself among
    them, and to the first `sinks` ones (StreamingLLM). window 0: `config` as it is. Raises
    ModelError."""
    if window < 0 or sinks < 0 or (sinks and not window):
        raise ModelError(
            f"a window of {window} positions and {sinks} sinks is not possible; "
            "both are 0 or more, and sinks need a window"
        )
    if window == 0:
        return config
    if config.attention_chunk or config.indexer:
        what = "sparse attention" if config.indexer else "attention chunks"
        raise ModelError(f"a window of {window} positions is not possible with {what}")
    own = (config.window(layer) for layer in range(config.num_layers))
    return replace(config, windows=tuple(min(w or window, window) for w in own), num_sinks=sinks)


def _depths(config: ModelConfig) -> list[int]:
    """Lists how many inputs each matrix has."""
    depths = [config.hidden_size, config.intermediate_size]
    if config.experts is not None:
        depths += [config.experts.intermediate_size, config.experts.shared_size]
    if (latent := config.latent) is not None:
        depths += [latent.q_rank or 0, config.num_heads * latent.value_dim]
    else:
        depths.append(config.num_heads * config.head_dim)
    if config.recurrent is not None:
        depths += [config.recurrent.width, config.recurrent.value_dim]
    return [depth for depth in depths if depth]


def weights_bytes(
    config: ModelConfig, dtype: str, quantization: str = "none", on_gpu: bool = False
) -> int:
    """Bytes of the weights in memory, without biases and padding: a tied table is held twice, on a
    CPU once packed; with "int8" every matrix is one byte a number and the scales of its groups, but
    not the table whose rows are read; with "int4" half a byte, scales and offsets, but for the
    head; with "fp8" one byte, and a scale for each row, but for experts. On a GPU the head is never
    quantized, and experts in MXFP4 or FP8 stay so; where torch computes in place of a CPU's kernels
    nothing is."""
    table, wide = config.vocab_size * config.hidden_size, config.num_float32
    total = config.num_parameters + (table if config.tie_word_embeddings else 0)
    quantization = "none" if config.cpu_lacks and not on_gpu else quantization
    each: float = DTYPE_BYTES[dtype]
    depths, left = _depths(config), 0
    head = each
    if quantization != "none":
        head = each = 1 + 2 * max(-(-depth // INT8_GROUP) / depth for depth in depths)
    if quantization == "int4":
        each = 0.5 + 4 * max(-(-depth // INT4_GROUP) / depth for depth in depths)
    if quantization == "fp8":
        each, left = 1 + 4 / min(depths), config.num_routed
    packed = 0.0
    if on_gpu:
        head = DTYPE_BYTES[dtype]
        if config.experts is not None and config.experts.packed:
            packed = config.num_routed * PACKED_BYTES[config.experts.packed]
            total, left = total - config.num_routed, 0
    rest = total - 2 * table - wide - left
    whole = table + left
    return ceil(whole * DTYPE_BYTES[dtype] + table * head + wide * 4 + rest * each + packed)
