"""Trains a draft head for a model, from its own answers: `kvrelay draft train`.

Life: the model answers questions that are held out, then others, for a third of the time; what it
has said is kept with its hidden states, a file for each few dozen answers. Then the head is trained
to predict the model's distributions at its own drafts, with a number of steps that fills the time.
Everything is in a folder beside the head until that is written, so that a run that was stopped goes
on: the same seeds and steps give the same head, however often that was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.training.draft.data import (
    TEMPERATURES,
    Answers,
    Batch,
    answer,
    ask,
    batches,
    frequent,
)
from kvrelay.training.draft.head import Head, HeadShape
from kvrelay.training.draft.prompts import Questions
from kvrelay.training.draft.target import Target

WORK = "unfinished"  # the folder beside the head
PLAN_FILE, STATE_FILE = "plan.json", "state.pt"
ANSWERS_SHARE = 1 / 3  # what they may take of the time; the rest is for the steps
TRIAL_STEPS = 8  # after which it is known what a step takes
SAVE_STEPS = 50
WARMUP_STEPS, COOLDOWN = 20, 0.6  # COOLDOWN: part of the steps with a falling rate
RIDGE = 1e-3
WORDS_RATE = 0.05  # part of the rate that rows of words have: they are the model's own
LATER_WEIGHT = 0.8  # what a pass counts, beside the one before it

Tell = Callable[[str, float], None]  # what is done, and which part of all is done


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides which head comes out."""

    minutes: float = 45.0
    seed: int = 48
    draft_vocab_size: int = 4096
    intermediate_size: int = 0  # 0: the model's
    max_tokens: int = 200  # in an answer
    num_prompts: int = 48  # answered at once, and kept in a file
    num_files: int = 0  # 0: as many as are answered in their share of the time
    num_steps: int = 0  # 0: as many as fill the time
    step_tokens: int = 2048
    passes: int = 2  # drafts of a round that are trained
    rate: float = 2e-3


class Unfinished:
    """The folder with what a run has done so far. Owned by one run."""

    def __init__(self, out: Path, recipe: Recipe, model: str, prompts: Sequence[str]) -> None:
        """Goes on with what is there. Raises ValueError if that is of another recipe."""
        self.path = out / WORK
        self.path.mkdir(parents=True, exist_ok=True)
        plan = {"recipe": asdict(recipe), "model": model, "prompts": [*prompts]}
        place = self.path / PLAN_FILE
        if place.is_file():
            begun = json.loads(place.read_text())
            for name, value in plan.items():
                if begun.get(name) != value:
                    raise ValueError(
                        f"{self.path} was begun with another {name}: go on with the same options,"
                        " or remove the folder"
                    )
        else:
            place.write_text(json.dumps(plan))

    def answers_at(self, index: int, held_out: bool) -> Path:
        return self.path / f"{'held-out' if held_out else 'answers'}-{index:05d}.safetensors"

    def save_state(self, state: dict[str, Any]) -> None:
        fresh = self.path / f"{STATE_FILE}.part"
        torch.save(state, fresh)
        fresh.rename(self.path / STATE_FILE)

    def state(self) -> dict[str, Any] | None:
        place = self.path / STATE_FILE
        return torch.load(place, weights_only=True) if place.is_file() else None

    def remove(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True, slots=True)
class Trained:
    head: Head
    held_out: list[Answers]  # one file for each temperature
    coverage: float  # share of the answers' tokens that the draft vocabulary has
    num_tokens: int  # that answers have
    num_steps: int
    answers_s: float
    steps_s: float


def train(
    target: Target,
    tokenizer: Tokenizer,
    out: Path,
    recipe: Recipe,
    tell: Tell,
    *,
    digest: str = "",
    prompts: Sequence[str] = (),
) -> Trained:
    """Write the head to folder `out`. digest: of the model. prompts: to ask in place of those that
    are put together here. Raises ValueError for a folder with another run, ModelError."""
    unfinished = Unfinished(out, recipe, digest, prompts)
    collected = _Collecting(target, tokenizer, recipe, unfinished, prompts)
    held_out = [collected.get(index, True) for index in range(len(TEMPERATURES))]
    answers: list[Answers] = []
    limit_s = 60.0 * recipe.minutes * ANSWERS_SHARE
    seconds = sum(each.seconds for each in held_out)
    while len(answers) < recipe.num_files or (not recipe.num_files and seconds < limit_s):
        part = len(answers) / recipe.num_files if recipe.num_files else seconds / limit_s
        tell(f"{sum(len(each.samples) for each in answers):,} answers", ANSWERS_SHARE * part)
        answers.append(collected.get(len(answers), False))
        seconds += answers[-1].seconds
    training = Training(target, answers, recipe, unfinished, digest)
    training.run(60.0 * recipe.minutes - seconds, tell)
    training.head.save(out)
    unfinished.remove()
    counts = [len(s.tokens) - s.num_prompt_tokens for each in answers for s in each.samples]
    return Trained(
        head=training.head,
        held_out=held_out,
        coverage=training.coverage,
        num_tokens=sum(counts),
        num_steps=training.num_steps,
        answers_s=seconds,
        steps_s=training.seconds,
    )


class _Collecting:
    """Gives files of answers by their index, as they were kept or made now."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        recipe: Recipe,
        unfinished: Unfinished,
        prompts: Sequence[str],
    ) -> None:
        self._target, self._tokenizer, self._recipe = target, tokenizer, recipe
        self._unfinished = unfinished
        self._questions = {
            held_out: Questions(recipe.seed, held_out, prompts) for held_out in (True, False)
        }

    def get(self, index: int, held_out: bool) -> Answers:
        recipe, path = self._recipe, self._unfinished.answers_at(index, held_out)
        prompts = ask(self._questions[held_out], self._tokenizer, recipe.num_prompts)
        if path.is_file():
            return Answers.load(path)
        began, temperature = perf_counter(), TEMPERATURES[index % len(TEMPERATURES)]
        seed = (index * 2 + held_out) * recipe.num_prompts
        made = answer(self._target, prompts, temperature, seed, recipe.max_tokens)
        made.save(path, perf_counter() - began)
        return Answers.load(path)


class Training:
    """Owns the head and its optimizers."""

    def __init__(
        self,
        target: Target,
        answers: Sequence[Answers],
        recipe: Recipe,
        unfinished: Unfinished,
        digest: str = "",
    ) -> None:
        """Goes on from a state that was kept."""
        c, self._target, self._recipe = target.config, target, recipe
        torch.manual_seed(recipe.seed)
        self._unfinished, self.device = unfinished, target.device
        self._pairs = [pair for each in answers for pair in each]
        d2t, self.coverage = frequent(answers, c.vocab_size, recipe.draft_vocab_size)
        rope = c.rope(c.num_layers - 1) or c.ropes[0]
        shape = HeadShape(
            hidden_size=c.hidden_size,
            intermediate_size=recipe.intermediate_size or c.intermediate_size or 4 * c.hidden_size,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            rope_theta=rope.theta,
            draft_vocab_size=len(d2t),
            model_digest=digest,
        )
        self._rows = target.head[d2t].to(self.device)
        self.head = Head(shape, d2t, target.norm, self._rows.cpu()).to(self.device)
        self._optimizers = _optimizers(self.head, recipe.rate)
        self.step, self.num_steps, self.seconds = 0, recipe.num_steps, 0.0
        self._per_epoch = len(batches(self._pairs, recipe.step_tokens, 0))
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        state = unfinished.state()
        if state is None:
            self._fit()
        else:
            self.head.load_state_dict(state["head"])
            for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step, self.num_steps, self.seconds = (
                state[name] for name in ("step", "num_steps", "seconds")
            )

    def _fit(self) -> None:
        """Begins where no step has to go: `fc` is what gives the model's next state best by least
        squares, without any layer."""
        head, target = self.head, self._target
        width = head.fc.in_features
        products = torch.zeros(width, width + head.fc.out_features, device=self.device)
        with torch.inference_mode():
            for pair in self._pairs:
                batch = Batch.of([pair])
                asked = batch.is_answer.to(self.device)
                hidden, after = (
                    target.unnormed(each).to(self.device) for each in (batch.hidden, batch.after)
                )
                x = head.inputs(target.table[batch.tokens].to(self.device).float(), hidden)[asked]
                wanted = F.rms_norm(after[asked], after.shape[-1:])
                products += x.T @ torch.cat((x, wanted), dim=1)
            squares, wanted = products[:, :width], products[:, width:]
            ridge = RIDGE * squares.diagonal().mean() * torch.eye(width, device=self.device)
            head.fc.weight.copy_(torch.linalg.solve(squares + ridge, wanted).T)

    def run(self, limit_s: float, tell: Tell) -> None:
        """limit_s: for all steps, those of a state that was kept included."""
        while not self.num_steps or self.step < self.num_steps:
            began = perf_counter()
            loss = self._train_on(self._batch())
            self.step += 1
            self.seconds += perf_counter() - began
            is_save = self.step % SAVE_STEPS == 0
            if not self._recipe.num_steps and (is_save or self.step == TRIAL_STEPS):
                fit = max(self.step, int(limit_s * self.step / self.seconds))
                self.num_steps = min(self.num_steps or fit, fit)  # others may slow it down
            if is_save:
                self._save()
            part = self.step / self.num_steps if self.num_steps else 0.0
            what = f"step {self.step:,} of {self.num_steps or '?'}, loss {loss:.2f}"
            tell(what, ANSWERS_SHARE + (1 - ANSWERS_SHARE) * part)

    def _save(self) -> None:
        self._unfinished.save_state(
            {
                "head": self.head.state_dict(),
                "optimizers": [each.state_dict() for each in self._optimizers],
                "step": self.step,
                "num_steps": self.num_steps,
                "seconds": self.seconds,
            }
        )

    def _batch(self) -> Batch:
        """What comes is decided by the number of the step."""
        epoch, at = divmod(self.step, self._per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, batches(self._pairs, self._recipe.step_tokens, epoch)
        places = self._epoch[1]
        return Batch.of([self._pairs[place] for place in places[at % len(places)]])

    def _train_on(self, batch: Batch) -> float:
        head, device = self.head, self.device
        asked = batch.is_answer.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            outputs = head.unroll(
                self._target.table[batch.tokens].to(device).float(),
                self._target.unnormed(batch.hidden).to(device),
                self._recipe.passes,
            )
            wanted = (batch.after.to(device)[asked] @ self._rows.T).float().softmax(-1)
            loss = torch.zeros((), device=device)
            for number, hidden in enumerate(outputs):
                logits = head.logits(hidden[asked]).float()
                loss = loss + LATER_WEIGHT**number * F.cross_entropy(logits, wanted)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["most"] * self._share_of_rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _share_of_rate(self) -> float:
        rising = min(1.0, (self.step + 1) / WARMUP_STEPS)
        if not self.num_steps:
            return rising
        return min(rising, (self.num_steps - self.step) / (COOLDOWN * self.num_steps))


def _optimizers(head: Head, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [*head.fc.parameters(), *(p for p in head.layer.parameters() if p.dim() == 2)]
    norms = [each for each in head.parameters() if each.dim() == 1]
    words = [*head.lm_head.parameters()]
    groups = [{"params": norms, "most": rate}, {"params": words, "most": rate * WORDS_RATE}]
    return [
        torch.optim.Muon(
            [{"params": matrices, "most": rate}],
            rate,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
