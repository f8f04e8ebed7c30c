"""The 24 prompts that every way of serving has to answer with the same tokens, and these tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.checkpoint.families import read_config
from tests.cluster.api.text.families import GEMMA

Message = dict[str, str]

SYSTEM = (
    "You are a careful assistant for the staff of a small public library. Answer briefly, name the"
    " shelf where a book is found, never invent a title, and say so when you do not know. Opening"
    " hours are nine to six on weekdays and ten to two on Saturdays. Loans last three weeks."
)

SINGLE = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three prime numbers greater than 50.",
    "Explain recursion to a child.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Schreibe einen Satz über Zürich, Füße und Äpfel.",
    "请用一句话介绍北京。",
    "Что такое компьютер?",
    "What does 🦙🚀 mean? Answer with emoji.",
    "اكتب جملة قصيرة عن البحر.",
]

SHARED_QUESTIONS = [
    "When are you open on Saturday?",
    "How long may I keep a book?",
    "Where do I find books about birds?",
    "May I bring my dog?",
    "Who wrote Moby Dick?",
    "Can I print a document?",
]

TURNS: list[Message] = [
    {"role": "user", "content": "My name is Ada. Remember it."},
    {"role": "assistant", "content": "Hello Ada, I will remember your name."},
    {"role": "user", "content": "I have two cats and a dog."},
    {"role": "assistant", "content": "That sounds like a lively home, Ada."},
    {"role": "user", "content": "How many animals do I have?"},
]

LONG_PROMPT_TOKENS = 1500


def blocks_for(model_dir: Path, num_tokens: int) -> int:
    """How many blocks of 16 tokens a pool needs for one sequence of this length."""
    windows = read_config(model_dir).kv_spec(16, "float32").windows
    return Windows.of(16, windows).max_blocks(num_tokens)


def tokenizer_of(model_dir: Path) -> Tokenizer:
    """With Gemma's chat template, where the model is a base model that has none."""
    own = Tokenizer(model_dir)
    return own if own.chat_template else Tokenizer(model_dir, chat_template=GEMMA)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of all 24: single questions, a shared system prompt, several turns, one token,
    unicode, and one of 3,000 tokens."""
    chats: list[list[Message]] = [[{"role": "user", "content": text}] for text in SINGLE]
    chats += [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in SHARED_QUESTIONS
    ]
    chats += [TURNS[:1], TURNS[:3], TURNS]
    tokens = [tokenizer.chat_prompt(chat).tokens for chat in chats]
    story = " ".join(f"On day {day} the ship sailed {day * 7 % 31} miles." for day in range(500))
    tokens.append(tokenizer.encode(story)[:LONG_PROMPT_TOKENS])
    tokens.append(tokenizer.encode("Hello")[:1])
    tokens.append(tokenizer.encode("def fibonacci(n):\n"))
    tokens.append(tokenizer.encode("1, 2, 3, 4, 5, 6, 7,"))
    assert len(tokens) == 24
    assert len(tokens[20]) == LONG_PROMPT_TOKENS
    return tokens


def greedy(
    model_dir: Path, dtype: torch.dtype, prompts: Iterable[list[int]], max_tokens: int
) -> list[list[int]]:
    """What `transformers` says: up to `max_tokens` tokens for each prompt, alone, in `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers
