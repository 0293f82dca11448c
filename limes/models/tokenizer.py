"""Loading a tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(
    folder: str | Path, chat_template: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Args:
        folder: a model folder with tokenizer files.
        chat_template: a Jinja file that replaces the tokenizer's own chat template.
        trust_remote_code: allow the folder to bring its own tokenizer code.

    Raises:
        ValueError: there is no tokenizer in the folder, or the template file is missing or empty.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"model.path: the folder {folder} holds no tokenizer that transformers can load ({why}); "
            "it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(path: str) -> str:
    """The text of a Jinja file.

    Raises:
        ValueError: the file is missing or empty.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template = {path}: cannot be read ({error}); give a Jinja file") from error
    if not text.strip():
        raise ValueError(f"model.chat_template = {path}: the file is empty; give a Jinja file")
    return text
