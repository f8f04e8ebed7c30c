"""A hybrid of 5 million parameters (Qwen3.5's layers): trained on two cores in a few minutes, it
says what it has read, so that a state that is lost shows as a wrong answer, not as other noise.

Attention comes first, where it reads single words only: which thing belongs to which name has to
go through the states of the gated delta nets behind it. These begin as a memory of words: keys are
projected like queries, convolutions pass the word that names are away by, and little is forgotten.
From random weights the same takes a hundred times as many words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.training.corpus import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    NO_TARGET,
    SPECIAL,
    SYSTEM,
    USER,
    VOCAB_SIZE,
    Corpus,
    Sample,
    make_tokenizer,
)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index(END),
}
FROM_NAME, FROM_THING = 1, 2  # words from a name to what is asked after it, and to the thing
LEAST_STEP, MOST_STEP = 3e-4, 3e-3  # share that heads forget with each word, at first
STEPS, TOKENS = 60, 2048  # tokens of one step
STEPS_OF_FACTS = 16  # at first, when nothing but answers counts
LENGTHS = (256, 256, 256, 1024)  # a step has sequences of one length, by turns
RATE, WARMUP, COOLDOWN = 6e-3, 8, 0.5  # COOLDOWN: part of the steps with a falling rate
RATE_OF_MATRICES = 1e-3
SEED = 45


@dataclass(frozen=True, slots=True)
class Trained:
    num_parameters: int
    num_tokens: int
    loss: float  # nats a token, of sentences that were held out
    recall: float  # share of answers that are right, of conversations that were not trained on
    seconds: float
    cpu_seconds: float


def train(path: Path, tell: Callable[[int, int, float], None], steps: int = STEPS) -> Trained:
    """Write the checkpoint to folder `path`. `tell`: steps done, of how many, the loss."""
    began, cpu_began = time.monotonic(), time.process_time()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    corpus, model = Corpus(tokenizer, SEED), _model()
    parameters = list(model.parameters())
    optimizer = _optimizer(model)
    for step in range(steps):
        fall = (steps - step) / max(1.0, COOLDOWN * steps)
        length = LENGTHS[step % len(LENGTHS)]
        if step < STEPS_OF_FACTS:
            logits, targets, is_answer = _logits(model, _facts(corpus))
            loss = F.cross_entropy(logits[is_answer], targets[is_answer])
        else:
            logits, targets, is_answer = _logits(model, _mixed(corpus, length))
            loss = F.cross_entropy(logits, targets)
            loss = loss + F.cross_entropy(logits[is_answer], targets[is_answer])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["most"] * min(1.0, (step + 1) / WARMUP, fall)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tell(step + 1, steps, loss.item())
    with torch.inference_mode():
        logits, targets, _ = _logits(model, [corpus.reference(256, True) for _ in range(16)])
        loss_of_others = F.cross_entropy(logits, targets)
        made = [corpus.conversation(512, 256) for _ in range(16)]
        logits, targets, is_answer = _logits(model, made)
        right = logits[is_answer].argmax(-1) == targets[is_answer]
    _save(path, model, tokenizer)
    return Trained(
        num_parameters=sum(each.numel() for each in parameters),
        num_tokens=steps * TOKENS,
        loss=loss_of_others.item(),
        recall=right.float().mean().item(),
        seconds=time.monotonic() - began,
        cpu_seconds=time.process_time() - cpu_began,
    )


def _model() -> Any:
    import transformers

    config = transformers.Qwen3_5TextConfig(**SHAPE)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                _make_memory(layer.linear_attn)
    return model.train()


def _make_memory(net: Any) -> None:
    """A delta net that recalls what came after a word when the word comes again."""
    keys, project, convolution = net.key_dim, net.in_proj_qkv.weight, net.conv1d.weight
    project[:keys] = project[keys : 2 * keys]
    convolution *= 0.1
    newest = convolution.shape[2] - 1
    convolution[:keys, 0, newest - FROM_NAME] += 1.0
    convolution[keys : 2 * keys, 0, newest - FROM_THING] += 1.0
    convolution[2 * keys :, 0, newest] += 1.0
    steps = torch.linspace(LEAST_STEP, MOST_STEP, len(net.dt_bias))
    net.A_log.zero_()
    net.dt_bias.copy_(steps.expm1().log())  # softplus makes the steps of it


def _optimizer(model: Any) -> torch.optim.Optimizer:
    """Matrices take small steps, which leave them the memory that they begin as."""
    groups: dict[float, list[torch.Tensor]] = {RATE: [], RATE_OF_MATRICES: []}
    for name, each in model.named_parameters():
        is_matrix = each.ndim > 1 and "embed" not in name
        groups[RATE_OF_MATRICES if is_matrix else RATE].append(each)
    made = [{"params": group, "most": rate} for rate, group in groups.items()]
    return torch.optim.AdamW(made, RATE, betas=(0.9, 0.95), weight_decay=0.0)


def _facts(corpus: Corpus) -> list[Sample]:
    return [corpus.conversation(128, before=0) for _ in range(TOKENS // 128)]


def _mixed(corpus: Corpus, length: int) -> list[Sample]:
    """Conversations, with more or less to read before the first question, and some reference."""
    count = TOKENS // length
    made = [corpus.conversation(length, length * (index % 4 + 1) // 6) for index in range(count)]
    if length < max(LENGTHS):
        made[0] = corpus.reference(length)
    return made


def _logits(model: Any, batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those at all places that have a target, [n, vocabulary], the targets [n], and which of them
    are answers."""
    tokens, targets = (torch.tensor([each[part] for each in batch]) for part in (0, 1))
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    for row, each in enumerate(batch):
        is_answer[row, each.answers] = True
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    known = targets != NO_TARGET
    return model.lm_head(hidden[known]), targets[known], is_answer[known]


def _save(path: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
