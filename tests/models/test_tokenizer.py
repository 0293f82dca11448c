"""Loading a tokenizer, with its own chat template or one from a file."""

import pytest
from tiny import CHAT_TEMPLATE, save_tiny

from limes.models.tokenizer import load_tokenizer


def test_own_template_or_the_one_from_the_file(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    assert load_tokenizer(folder, None).chat_template == CHAT_TEMPLATE
    (tmp_path / "other.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(folder, str(tmp_path / "other.jinja"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_template_file_must_be_there_and_hold_something(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    with pytest.raises(ValueError, match=r"model\.chat_template = .*none\.jinja"):
        load_tokenizer(folder, str(tmp_path / "none.jinja"))
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        load_tokenizer(folder, str(tmp_path / "empty.jinja"))


def test_folder_without_tokenizer_is_named(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    for file in folder.glob("*tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer.*tokenizer\.json"):
        load_tokenizer(folder)
