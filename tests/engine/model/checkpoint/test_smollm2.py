"""The default model's tokenizer, from the GGUF file in its package."""

from transformers import AutoTokenizer

from kvrelay.engine.model.checkpoint.families import read_config


def test_the_tokenizer_keeps_special_tokens_and_splits_digits(smollm2_dir):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert read_config(smollm2_dir).eos_token_ids == (2,)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]
    assert len(tokenizer.encode("2024")) == 4
    for text in ("naïve café 北京 🙂\n\n\tx=1", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
