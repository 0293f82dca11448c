"""What an answer is in tokens: exactly what generation would have to produce after the prompt it would be given."""

import json

import pytest
from chat_templates import STYLES, end_ids, merging_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from limes.config.data import DataConfig
from limes.data import PromptRenderer, PromptSet, Row, encode_conversations, load_prompts

TOKENIZERS = {name: merging_tokenizer(style) for name, style in STYLES.items()}
words = st.text("ab hi\n]", min_size=1, max_size=8).filter(str.strip)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def encode(name: str, *rows: Row, max_len: int = 10_000, **options):
    tokenizer = TOKENIZERS[name]
    data = DataConfig(**options.pop("data", {}))
    found = encode_conversations(
        PromptSet(list(rows), "rows.jsonl", "f"),
        PromptRenderer(tokenizer, data),
        end_ids(tokenizer, STYLES[name]),
        max_len,
        **options,
    )
    return found


def turns(name: str, messages: list[dict], *, label: object = None, tools: list | None = None, **data: object):
    return encode(name, Row(messages, label, {}, tools), data=data).conversations[0].turns


@st.composite
def conversations(draw: st.DrawFn) -> list[dict]:
    system = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    pairs = draw(st.lists(st.tuples(words, words, st.booleans(), st.booleans()), min_size=1, max_size=3))
    messages = system
    for question, text, thinks, trains in pairs:
        thought = "<think>\nab\n</think>\n\n" if thinks else ""
        messages = [*messages, user(question), answer(thought + text, weight=float(trains))]
    messages[-1]["weight"] = 1.0
    return messages


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, deadline=None)
@given(messages=conversations())
def test_an_answer_is_what_generation_would_have_to_produce(name: str, messages: list[dict]) -> None:
    """The prompt is the very ids that generation is given, and prompt and answer decode to the rendered conversation
    up to the first end token, which is the answer's last."""
    tokenizer, ends = TOKENIZERS[name], end_ids(TOKENIZERS[name], STYLES[name])
    renderer = PromptRenderer(tokenizer, DataConfig())
    bare = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    trained = [i for i, message in enumerate(messages) if message.get("weight")]
    found = turns(name, messages)
    assert len(found) == len(trained)
    for i, turn in zip(trained, found, strict=True):
        assert list(turn.prompt_ids) == renderer.render(bare[:i])
        whole = tokenizer.apply_chat_template(bare[: i + 1], tokenize=False)
        produced = tokenizer.decode([*turn.prompt_ids, *turn.answer_ids])
        assert whole.startswith(produced)
        assert whole[len(produced) :].strip() == ""
        assert turn.answer_ids[-1] in ends
        assert not set(turn.answer_ids[:-1]) & set(ends)
        assert "".join(bare[i]["content"].split()) in "".join(tokenizer.decode(turn.answer_ids).split())


def text(name: str, ids) -> str:
    return TOKENIZERS[name].decode(list(ids))


def test_the_line_end_behind_the_end_token_is_the_next_prompts() -> None:
    first, second = turns("chatml", [user("hi"), answer("ab"), user("a"), answer("b")])
    assert text("chatml", first.answer_ids) == "ab<|im_end|>"
    assert text("chatml", second.prompt_ids).endswith(
        "ab<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_trains_in_its_own_turn_and_is_gone_from_later_prompts() -> None:
    """U62."""
    first, second = turns("qwen3", [user("hi"), answer("<think>hiab</think>ab"), user("a"), answer("b")])
    assert text("qwen3", first.answer_ids) == "<think>\nhiab\n</think>\n\nab<|im_end|>"
    assert "hiab" not in text("qwen3", second.prompt_ids)
    assert text("qwen3", second.answer_ids) == "<think>\n\n</think>\n\nb<|im_end|>"


def test_thinking_behind_a_prompt_that_rules_it_out_is_refused() -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    (turn,) = turns("qwen3", [user("hi"), answer("ab")], **kwargs)
    assert text("qwen3", turn.answer_ids) == "ab<|im_end|>"
    with pytest.raises(ValueError, match=r"row 0 of rows\.jsonl: the chat template renders message 1 differently"):
        turns("qwen3", [user("hi"), answer("<think>hi</think>ab")], **kwargs)


def test_a_system_prompt_that_moves_is_where_generation_would_see_it() -> None:
    system = {"role": "system", "content": "bab"}
    first, second = turns("mistral", [system, user("hi"), answer("ab"), user("a"), answer("b")])
    assert text("mistral", first.prompt_ids) == "<s>[INST] bab\n\nhi [/INST]"
    assert text("mistral", second.prompt_ids) == "<s>[INST] hi [/INST] ab</s>[INST] bab\n\na [/INST]"
    assert text("mistral", second.answer_ids) == " b</s>"


def test_a_token_across_the_border_does_not_change_the_prompt() -> None:
    """`]` and the space behind it are one token in the whole text, and two where generation begins."""
    (turn,) = turns("mistral", [user("hi"), answer("hi")])
    tokenizer = TOKENIZERS["mistral"]
    whole = tokenizer("<s>[INST] hi [/INST] hi</s>", add_special_tokens=False)["input_ids"]
    assert whole[: len(turn.prompt_ids)] != list(turn.prompt_ids)
    assert text("mistral", [*turn.prompt_ids, *turn.answer_ids]) == text("mistral", whole)


def test_weights_are_the_messages_and_zero_is_context() -> None:
    messages = [user("hi"), answer("a", weight=0), user("hi"), answer("b", weight=0.5), user("a"), answer("ab")]
    assert [(turn.answer, turn.weight) for turn in turns("chatml", messages)] == [("b", 0.5), ("ab", 1.0)]


def test_a_label_is_the_answer_to_its_prompt() -> None:
    (turn,) = turns("chatml", "hi", label="ab")
    assert text("chatml", turn.answer_ids) == "ab<|im_end|>"
    history = [user("hi"), answer("a"), user("b")]
    assert [turn.answer for turn in turns("chatml", history, label="ab")] == ["ab"]
    history[1]["weight"] = 2
    assert [(turn.answer, turn.weight) for turn in turns("chatml", history, label="ab")] == [("a", 2), ("ab", 1)]


def test_plain_text_ends_with_the_end_token() -> None:
    (turn,) = turns("chatml", "hi ", label="ab", apply_chat_template=False)
    assert (text("chatml", turn.prompt_ids), text("chatml", turn.answer_ids)) == ("hi ", "ab<|im_end|>")


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tool_calls_train_and_tool_output_does_not() -> None:
    """U57."""
    messages = [user("hi"), CALL, {"role": "tool", "content": "ba"}, answer("ab")]
    call, last = turns("chatml", messages, tools=[TOOL])
    assert text("chatml", call.answer_ids) == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert '"parameters"' in text("chatml", call.prompt_ids)
    assert "<|im_start|>tool\nba<|im_end|>" in text("chatml", last.prompt_ids)
    assert text("chatml", last.answer_ids) == "ab<|im_end|>"


REFUSED = [
    ("chatml", [user("hi")], {}, "no answer to learn"),
    ("chatml", [user("hi"), answer("a")], {"label": "b"}, "two answers"),
    ("chatml", [user("hi")], {"label": 7}, "the label, is 7; an answer to learn is text"),
    ("chatml", [user("hi"), answer("a", weight=-1)], {}, "message 1 has weight -1; a weight is a number of at least 0"),
    ("chatml", [user("hi"), answer("a", weight=True)], {}, "message 1 has weight True"),
    ("chatml", [user("hi"), answer("a", weight=float("nan"))], {}, "message 1 has weight nan"),
    ("chatml", [{**user("hi"), "weight": 1}, answer("a")], {}, "message 0 is the user's and has weight 1"),
    ("chatml", [answer("a")], {}, "message 0 is an answer to nothing"),
    ("chatml", [user("hi"), answer(" ")], {}, "message 1 is an empty answer"),
    ("chatml", [user("hi"), answer("a<|im_end|>b")], {}, "behind a token that ends answers"),
    ("llama3", [user("hi"), CALL | {"content": ""}], {}, "leaves 'add' out of message 1"),
    ("llama3", [user("hi"), answer("a")], {"tools": [TOOL]}, "does not show them to the model"),
    ("llama3", [user("hi"), answer("a", reasoning_content="because")], {}, "leaves 'because' out of message 1"),
    ("chatml", "hi", {"apply_chat_template": False}, "no answer to learn"),
    (
        "chatml",
        [user("hi"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
        {},
        "rewrites it",
    ),
]


@pytest.mark.parametrize(("name", "messages", "options", "fragment"), REFUSED)
def test_what_cannot_be_right_is_refused(name: str, messages: list[dict], options: dict, fragment: str) -> None:
    with pytest.raises(ValueError, match=r"row 0 of rows\.jsonl: ") as caught:
        turns(name, messages, **options)
    assert fragment in str(caught.value)


def with_template(template: str):
    tokenizer = merging_tokenizer(STYLES["chatml"])
    tokenizer.chat_template = template
    return PromptRenderer(tokenizer, DataConfig()), end_ids(tokenizer, STYLES["chatml"])


@pytest.mark.parametrize(
    ("template", "fragment"),
    [
        # U59: the next role's tag is all that ends a turn
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "would never learn to stop"),
        # the prompt opens a thought that the conversation does not have
        (
            "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}",
            "the prompt goes on with '<think>\\n', the conversation with 'ab<|im_end|>'",
        ),
        # thinking is stripped from every turn, the trained one too
        (
            "{% for m in messages %}<|im_start|>{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "out of message 1 or rewrites it",
        ),
    ],
)
def test_templates_that_cannot_be_trained_through_are_refused(template: str, fragment: str) -> None:
    renderer, ends = with_template(template)
    text = "<think>hi</think>ab" if "split" in template else "ab"
    rows = PromptSet([Row([user("hi"), answer(text)], None, {})], "rows.jsonl", "f")
    with pytest.raises(ValueError, match=r"row 0 of rows\.jsonl: ") as caught:
        encode_conversations(rows, renderer, ends, 1000)
    assert fragment in str(caught.value)


def test_conversations_that_do_not_fit_are_left_out_whole_and_counted() -> None:
    short, long = [user("hi"), answer("a")], [user("hi"), answer("a"), user("hi"), answer("ab" * 50)]
    silent = [user("hi"), answer("a", weight=0)]
    rows = [Row(messages, None, {}) for messages in (long, short, silent)]
    found = encode("chatml", *rows, max_len=100)
    assert [c.row_index for c in found.conversations] == [1]
    assert (found.num_too_long, found.num_untrained) == (1, 1)
    assert len(encode("chatml", *rows).conversations) == 2
    with pytest.raises(ValueError, match=r"none of 2 conversations of rows\.jsonl fits in 5 tokens"):
        encode("chatml", *rows, max_len=5)
    with pytest.raises(ValueError, match="with a prompt of 6 tokens at most"):
        encode("chatml", *rows, max_prompt_len=6)
    with pytest.raises(ValueError, match=r"every answer of rows\.jsonl has weight 0"):
        encode("chatml", rows[2])


def test_the_fingerprint_knows_tokens_and_weights() -> None:
    def of(weight: float, template: str = "chatml") -> str:
        return encode(template, Row([user("hi"), answer("a", weight=weight)], None, {})).fingerprint

    assert of(1) == of(1)
    assert len({of(1), of(2), of(1, "gemma")}) == 3


def test_rows_come_from_files_with_their_tools(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"messages": [user("hi"), CALL], "tools": json.dumps([TOOL])},
        {"messages": [user("hi"), answer("ab", weight=0.5)], "tools": None},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        data = DataConfig(prompt_data=str(tmp_path / name), input_key="messages", label_key="")
        found = load_prompts(data).rows
        assert [row.tools for row in found] == [[TOOL], None]
        assert found[0].prompt[1]["tool_calls"] == CALL["tool_calls"]
        assert found[1].prompt[1]["weight"] == 0.5


def test_tools_that_are_none_are_named(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi", "label": "a", "tools": "[1"}) + "\n")
    with pytest.raises(ValueError, match="line 1: column tools is not valid JSON"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi", "label": "a", "tools": ["add"]}) + "\n")
    with pytest.raises(ValueError, match="not a list of tools"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "a.jsonl")))


def test_the_tokenizer_of_the_tiny_models_works_too() -> None:
    rows = PromptSet([Row([user("hi"), answer("ab")], None, {})], "rows.jsonl", "f")
    found = encode_conversations(rows, PromptRenderer(tiny_tokenizer(), DataConfig()), [2], 100)
    assert tiny_tokenizer().decode(list(found.conversations[0].turns[0].answer_ids)) == "ab<|end|>"
