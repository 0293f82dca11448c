"""Small chat templates in the styles that are in use, for the tests of what an answer is.

Each is a template, the special tokens in it, and the tokens that end an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """{% if messages[0]['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}{% if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] or '' }}{% for call in m.get('tool_calls') or [] %}<tool_call>\
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ '<|begin|>' }}{% for m in messages %}<|start|>{{ m['role'] }}<|header|>

{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|header|>

{% endif %}"""

# The system prompt stands in the last user message, so earlier turns move when a later one comes.
MISTRAL = """{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}\
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}\
{% set users = turns | selectattr('role', 'equalto', 'user') | list %}\
{% for m in turns %}{% if m['role'] == 'user' %}[INST] {{ (system if m == users[-1] else '') + m['content'] }} [/INST]\
{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"""

# Thinking is shown in the answers after the last question, and gone from all before it.
QWEN3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% set text = m['content'].split('</think>')[-1].lstrip('\n') %}\
{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') %}\
{% if '</think>' not in m['content'] %}{% set thought = '' %}{% endif %}\
{% if loop.index0 > ns.last %}<think>
{{ thought }}
</think>

{% endif %}{{ text }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

GEMMA = """{{ '<bos>' }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}
{{ m['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@dataclass(frozen=True)
class Style:
    """A way of writing conversations.

    Attributes:
        specials: special tokens of the template; the first is the tokenizer's own end token.
        ends: those that end an answer.
    """

    template: str
    specials: tuple[str, ...]
    ends: tuple[str, ...]


STYLES = {
    "chatml": Style(CHATML, ("<|im_end|>", "<|im_start|>"), ("<|im_end|>",)),
    "llama3": Style(LLAMA3, ("<|eot|>", "<|begin|>", "<|start|>", "<|header|>"), ("<|eot|>",)),
    "mistral": Style(MISTRAL, ("</s>", "<s>"), ("</s>",)),
    "qwen3": Style(QWEN3, ("<|im_end|>", "<|im_start|>"), ("<|im_end|>",)),
    "gemma": Style(GEMMA, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>")),
}


def merging_tokenizer(style: Style) -> PreTrainedTokenizerFast:
    """Bytes and a few merges, some of which reach across the border between prompt and answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "\u010a", "\u0120"
    merges = [(newline, newline), (newline, "a"), (space, "a"), ("a", "b"), (space, "ab"), ("]", space), ("h", "i")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in style.specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=style.specials[0])
    tokenizer.chat_template = style.template
    return tokenizer


def end_ids(tokenizer: PreTrainedTokenizerFast, style: Style) -> list[int]:
    """Ids of the tokens that end an answer."""
    return [tokenizer.convert_tokens_to_ids(text) for text in style.ends]
