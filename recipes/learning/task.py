"""A task for a model that starts from nothing: count on. Data, rewards and the model of the recipes here.

    python recipes/learning/task.py [--seed 0] [--folder runs/learning/model]

writes `count.jsonl` beside this file, the same bytes every time, and a model of 1.7 million random parameters with a
tokenizer of one token a digit.

A prompt is three digits; the answer counts on from the last one to 4 and ends: `302` asks for `34`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

from limes.records import Sample

DATA = Path(__file__).parent / "count.jsonl"
DIGITS = "01234"
END = "<end>"


def write_data() -> None:
    """All prompts whose last digit leaves something to count, in an order that is always the same."""
    prompts = ["".join(digits) for digits in itertools.product(DIGITS, DIGITS, DIGITS[:-1])]
    random.Random(0).shuffle(prompts)
    rows = [{"prompt": prompt, "label": DIGITS[DIGITS.index(prompt[-1]) + 1 :]} for prompt in prompts]
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def share_right(sample: Sample) -> float:
    """Share of digits that are right and in their place; missing and surplus ones are wrong."""
    right = sum(answered == asked for answered, asked in zip(sample.response, sample.label, strict=False))
    return right / max(len(sample.response), len(sample.label))


def share_right_in_steps(sample: Sample) -> float:
    """`share_right`, with each token as a step of its own: 1 where it is the right digit or a timely end."""
    scores = [float(digit == asked) for digit, asked in itertools.zip_longest(sample.response, sample.label)]
    scores = scores[: len(sample.response)]
    if sample.response_length > len(sample.response):  # the end token, which is no text
        scores.append(float(len(sample.response) == len(sample.label)))
    spans = [[step, step + 1] for step in range(len(scores))]
    sample.metadata["step_wise"] = {"step_scores": scores, "step_token_spans": spans}
    return share_right(sample)


def save_model(folder: Path, seed: int) -> None:
    """Write a random Llama of 2 layers and its tokenizer as a plain model folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([END, *DIGITS])}
    hidden_size = 256
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=vocab[END],
        bos_token_id=None,
        eos_token_id=vocab[END],
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(vocab, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=END, eos_token=END).save_pretrained(folder)


def main() -> None:
    """Write data and model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/learning/model"))
    options = parser.parse_args()
    write_data()
    save_model(options.folder, options.seed)
    print(f"{DATA} and {options.folder}")


if __name__ == "__main__":
    main()
