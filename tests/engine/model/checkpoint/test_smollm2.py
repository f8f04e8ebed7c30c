"""The default model, from the GGUF file in its package to an answer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.engine.model.checkpoint.families import read_config
from tests.engine.model.runners import model_runner
from tests.engine.model.test_runner import generate

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = 24


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text)


def test_the_tokenizer_keeps_special_tokens_and_splits_digits(tokenizer, smollm2_dir):
    assert read_config(smollm2_dir).eos_token_ids == (2,)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]
    assert len(tokenizer.encode("2024")) == 4
    for text in ("naïve café 北京 🙂\n\n\tx=1", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_answers_paris_with_the_tokens_of_transformers(smollm2_dir, tokenizer, prompt):
    runner = model_runner(smollm2_dir, num_blocks=16, dtype="float32", threads=2)
    got = generate(runner, prompt, [11, 3, 8, 5, 14, 0], COUNT, temperature=0.0)
    assert "Paris" in tokenizer.decode(got)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=49151
        )
    assert got == expected[0, len(prompt) :].tolist()
