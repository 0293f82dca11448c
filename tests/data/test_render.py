"""Prompts as token ids: one BOS, the whole prompt, errors that name the row."""

import pytest
from tiny import tiny_tokenizer
from tokenizers import processors

from limes.config.data import DataConfig
from limes.data import PromptRenderer, PromptSet, Row, encode_prompts

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def tokenizer_that_adds_bos():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def rendered(tokenizer, prompt, **settings):
    return tokenizer.decode(PromptRenderer(tokenizer, DataConfig(**settings)).render(prompt))


def prompts_named(*prompts):
    return PromptSet(rows=[Row(prompt, None, {}) for prompt in prompts], name="rows.jsonl", fingerprint="f")


def test_text_becomes_a_user_message_up_to_where_the_answer_begins():
    assert rendered(tiny_tokenizer(), "Hi") == "<|user|>Hi<|end|><|assistant|>"


def test_messages_are_rendered_as_they_are():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert rendered(tiny_tokenizer(), messages) == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"


def test_system_prompt_goes_first_unless_the_prompt_brings_one():
    assert rendered(tiny_tokenizer(), "U", system_prompt="S") == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "U"}]
    assert "<|system|>own" in rendered(tiny_tokenizer(), own, system_prompt="S")
    assert "S" not in rendered(tiny_tokenizer(), own, system_prompt="S")
    assert own == [{"role": "system", "content": "own"}, {"role": "user", "content": "U"}]


def test_template_gets_its_variables():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'think' if enable_thinking else 'answer' }}"
    assert rendered(tokenizer, "U", chat_template_kwargs={"enable_thinking": True}) == "think"
    assert rendered(tokenizer, "U") == "answer"


@pytest.mark.parametrize("make", [tiny_tokenizer, tokenizer_that_adds_bos])
def test_one_bos_where_the_template_writes_it_and_none_where_it_does_not(make):
    tokenizer = make()
    renderer = PromptRenderer(tokenizer, DataConfig())
    assert renderer.render("Hi").count(1) == 0
    tokenizer.chat_template = BOS_TEMPLATE
    assert renderer.render("Hi").count(1) == 1
    assert renderer.render("Hi")[0] == 1


def test_plain_text_gets_the_bos_of_the_tokenizer_once():
    plain = DataConfig(apply_chat_template=False)
    assert PromptRenderer(tiny_tokenizer(), plain).render("Hi").count(1) == 0
    adding = PromptRenderer(tokenizer_that_adds_bos(), plain)
    assert adding.render("Hi") == [1, *tiny_tokenizer()("Hi")["input_ids"]]
    assert adding.render("<s>Hi") == adding.render("Hi")


def test_missing_template_says_what_to_set():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"data\.apply_chat_template = false .*model\.chat_template = FILE"):
        PromptRenderer(tokenizer, DataConfig()).render("Hi")
    assert PromptRenderer(tokenizer, DataConfig(apply_chat_template=False)).render("Hi")


def test_settings_that_contradict_are_refused():
    with pytest.raises(ValueError, match=r"data\.system_prompt"):
        PromptRenderer(tiny_tokenizer(), DataConfig(apply_chat_template=False, system_prompt="S"))
    plain = PromptRenderer(tiny_tokenizer(), DataConfig(apply_chat_template=False))
    with pytest.raises(ValueError, match="chat messages need a chat template"):
        plain.render([{"role": "user", "content": "U"}])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system role') }}", "{{ messages[0]['content'] + 1 }}", "{% if %}", "{{ nothing.there }}"],
)
def test_template_errors_name_the_row(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'bad' %}" + template + "{% endif %}x" if template != "{% if %}" else template
    )
    prompts = prompts_named("bad") if template == "{% if %}" else prompts_named(*["fine"] * 300, "bad")
    with pytest.raises(ValueError, match=rf"row {len(prompts) - 1} of rows\.jsonl: the chat template cannot render it"):
        encode_prompts(prompts, PromptRenderer(tokenizer, DataConfig()), 100)


def test_too_long_prompts_are_counted_and_never_cut():
    renderer = PromptRenderer(tiny_tokenizer(), DataConfig(apply_chat_template=False))
    texts = ["a" * length for length in (3, 11, 10, 1, 12)]
    encoded = encode_prompts(prompts_named(*texts), renderer, 10)
    assert [(p.row_index, p.prompt) for p in encoded.prompts] == [(0, "aaa"), (2, "a" * 10), (3, "a")]
    assert [len(p.token_ids) for p in encoded.prompts] == [3, 10, 1]
    assert (encoded.num_too_long, encoded.longest, encoded.name) == (2, 12, "rows.jsonl")


def test_a_tokenizer_that_cuts_is_not_allowed_to():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.model_max_length = 4
    renderer = PromptRenderer(tokenizer, DataConfig(apply_chat_template=False))
    assert len(renderer.render("a" * 9)) == 9


def test_nothing_that_fits_is_refused_with_the_numbers():
    renderer = PromptRenderer(tiny_tokenizer(), DataConfig(apply_chat_template=False))
    with pytest.raises(ValueError, match=r"none of 2 prompts of rows\.jsonl fits in 4 tokens .*shortest 5, longest 7"):
        encode_prompts(prompts_named("a" * 7, "a" * 5), renderer, 4)
    with pytest.raises(ValueError, match="holds no prompts"):
        encode_prompts(prompts_named(), renderer, 4)


def test_prompt_without_tokens_names_the_row():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['content'] != 'b' %}x{% endif %}"
    with pytest.raises(ValueError, match=r"row 1 of rows\.jsonl: the prompt has no tokens"):
        encode_prompts(prompts_named("a", "b"), PromptRenderer(tokenizer, DataConfig()), 4)


def test_many_prompts_give_what_one_at_a_time_gives_and_progress_ends_at_all():
    renderer, told = PromptRenderer(tiny_tokenizer(), DataConfig()), []
    texts = [f"question {i}" for i in range(600)]
    encoded = encode_prompts(prompts_named(*texts), renderer, 100, progress=lambda *now: told.append(now))
    assert [p.token_ids for p in encoded.prompts] == [renderer.render(text) for text in texts]
    assert told[-1] == (600, 600)


def test_fingerprint_changes_with_the_rendering():
    prompts = prompts_named("a", "b")
    settings = [{}, {"system_prompt": "S"}, {"apply_chat_template": False}]
    prints = [
        encode_prompts(prompts, PromptRenderer(tiny_tokenizer(), DataConfig(**s)), 50).fingerprint for s in settings
    ]
    prints.append(
        encode_prompts(prompts_named("b", "a"), PromptRenderer(tiny_tokenizer(), DataConfig()), 50).fingerprint
    )
    assert len(set(prints)) == 4
