"""`limes eval` and `limes sample`: the table, the streamed text."""

import io

from tiny import tiny_tokenizer

from limes.evaluate import first_of_each, print_table
from limes.records import Sample
from limes.sampling import TextStream


def test_the_table_has_every_pass_at_k_with_its_interval() -> None:
    metrics = {
        "eval/prompts": 20.0,
        "eval/samples": 80.0,
        "eval/reward_mean": 0.35,
        "eval/reward_ci95": 0.1,
        "eval/pass_at_1": 0.35,
        "eval/pass_at_1_low": 0.25,
        "eval/pass_at_1_high": 0.45,
        "eval/pass_at_4": 0.7,
        "eval/pass_at_4_low": 0.5,
        "eval/pass_at_4_high": 0.85,
        "eval/truncated_frac": 0.125,
    }
    out = io.StringIO()
    print_table(metrics, out)
    assert out.getvalue().splitlines() == [
        "prompts          20",
        "answers          80",
        "pass@1       0.3500  [0.2500, 0.4500]",
        "pass@4       0.7000  [0.5000, 0.8500]",
        "mean reward  0.3500  +- 0.1000",
        "truncated     12.5%",
    ]


def test_a_run_without_any_reward_still_has_a_table() -> None:
    out = io.StringIO()
    print_table({"eval/prompts": 2.0, "eval/samples": 2.0, "eval/unscored": 2.0}, out)
    assert out.getvalue().splitlines() == ["prompts   2", "answers   2", "unscored  2"]


def test_the_first_answer_to_each_prompt_is_shown() -> None:
    samples = [Sample(index=i, group_index=i // 2) for i in range(6)]
    assert [sample.index for sample in first_of_each(samples)] == [0, 2, 4]


class Utf8Tokenizer:
    """One token a byte."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


def test_a_character_cut_between_tokens_is_written_whole() -> None:
    out = io.StringIO()
    stream = TextStream(Utf8Tokenizer(), out)
    seen = []
    for byte in "a\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}b".encode():
        stream.add(byte)
        seen.append(out.getvalue())
    assert seen == ["a", "a", "a\xe9", "a\xe9", "a\xe9", "a\xe9", "a\xe9\U0001f600", "a\xe9\U0001f600b"]


def test_what_is_held_back_is_written_at_the_end() -> None:
    out = io.StringIO()
    stream = TextStream(Utf8Tokenizer(), out)
    stream.add(0xC3)
    assert out.getvalue() == ""
    stream.end()
    assert out.getvalue() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_not_written() -> None:
    tokenizer, out = tiny_tokenizer(), io.StringIO()
    stream = TextStream(tokenizer, out)
    for token in [*tokenizer("hi")["input_ids"], tokenizer.eos_token_id]:
        stream.add(token)
    stream.end()
    assert out.getvalue() == "hi"
