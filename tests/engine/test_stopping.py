from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from limes.engine.embedded.sequence import Answer, Prompt
from limes.engine.embedded.stopping import finish_reason
from limes.engine.protocol import FinishReason, GenerateRequest, SampleKey, SamplingParams

EOS = 256


def byte_tokenizer():
    """One token a byte, and an end token: a character beyond ASCII takes two to four tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)} | {"<end>": EOS}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


TOKENIZER = byte_tokenizer()


class WordTokenizer:
    """Tokens of several characters each."""

    WORDS = ("He", "llo", " wor", "ld", "!", "\n\n", "Us", "er:", "")

    def decode(self, token_ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(self.WORDS[i] for i in token_ids)


def answer(tokens, *, prompt=(65,), first_position=0, ends=(EOS,), **sampling):
    params = SamplingParams(**({"max_new_tokens": 1000} | sampling))
    request = GenerateRequest("a", prompt, params, SampleKey(0, 0, 0), first_position)
    return Answer(request, Prompt(tuple(prompt)), Future(), None, frozenset(ends), list(tokens))


def stops_at(tokens, tokenizer=TOKENIZER, **options):
    """How many tokens the answer has when it stops, as if they were sampled one by one; None if it does not."""
    for num in range(1, len(tokens) + 1):
        reason = finish_reason(answer(tokens[:num], **options), tokenizer)
        if reason is not None:
            return num, reason
    return None


def text_bytes(text):
    return list(text.encode())


def test_the_byte_tokenizer_reads_as_bytes():
    assert TOKENIZER.decode(text_bytes("aé\n日🙂 ")) == "aé\n日🙂 "


def test_end_tokens():
    assert stops_at([1, 2, EOS, 3]) == (3, FinishReason.STOP)
    assert stops_at([1, 2, 7, 3], ends=(EOS, 7)) == (3, FinishReason.STOP)
    assert stops_at([1, 2, 3]) is None


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    assert stops_at([1, 2, EOS], max_new_tokens=3) == (3, FinishReason.STOP)
    assert stops_at(text_bytes("abc"), max_new_tokens=3, stop=("bc",)) == (3, FinishReason.STOP)
    assert stops_at([1, 2, 3, EOS], max_new_tokens=3) == (3, FinishReason.LENGTH)


def test_ends_before_the_least_length_do_not_count():
    assert stops_at([1, EOS, 2, EOS, 3], min_new_tokens=3) == (4, FinishReason.STOP)
    assert stops_at(text_bytes("x\nyz\n!"), min_new_tokens=3, stop=("\n",)) == (5, FinishReason.STOP)
    assert stops_at(text_bytes("aaab"), min_new_tokens=3, stop=("aa",)) == (3, FinishReason.STOP)


@pytest.mark.parametrize("stop", ["\n\nUser:", "lo wor", "d!", "o", " w", "ld!\n"])
def test_stop_strings_straddle_tokens(stop):
    tokens = [0, 1, 2, 3, 8, 4, 5, 6, 7]
    words = WordTokenizer.WORDS
    expected = next(n for n in range(1, len(tokens) + 1) if stop in "".join(words[i] for i in tokens[:n]))
    assert stops_at(tokens, WordTokenizer(), stop=(stop,)) == (expected, FinishReason.STOP)


@pytest.mark.parametrize("stop", ["é", "日本", "🙂", "x🙂y", "\n\n", "a"])
@pytest.mark.parametrize("before", ["", "plain ", "日日日", "é🙂"])
def test_stop_strings_of_characters_that_take_several_tokens(stop, before):
    tokens = [*text_bytes(before + stop), *text_bytes("rest")]
    first = (before + stop).index(stop)
    expected = len((before + stop)[: first + len(stop)].encode())
    assert stops_at(tokens, stop=(stop,)) == (expected, FinishReason.STOP)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab日🙂\n", max_size=25),
    stops=st.lists(st.text(alphabet="ab日🙂\n", min_size=1, max_size=4), min_size=1, max_size=3),
    first_position=st.integers(0, 12),
    least=st.integers(0, 10),
)
def test_an_answer_stops_where_its_text_first_completes_a_stop_string(text, stops, first_position, least):
    """Whether it was sampled in one go or resumed after `first_position` tokens."""
    tokens = text_bytes(text)
    ends = [
        len(text[:end].encode()) for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)
    ]
    first_position = min([first_position, *(end - 1 for end in ends[:1])])  # it did not stop before
    expected = next((end for end in ends if end - first_position >= least), None)
    found = stops_at(
        tokens[first_position:],
        prompt=(65, *tokens[:first_position]),
        first_position=first_position,
        stop=tuple(stops),
        min_new_tokens=least,
    )
    assert found == (None if expected is None else (expected - first_position, FinishReason.STOP))


def test_prompts_do_not_complete_stop_strings():
    assert stops_at(text_bytes("y"), prompt=tuple(text_bytes("ax")), stop=("xy",)) is None
    assert stops_at(text_bytes("y"), prompt=tuple(text_bytes("ax")), first_position=1, stop=("xy",)) is not None
