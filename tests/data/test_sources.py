"""Rows from files, folders and generated tasks; slices; and what bad data gets."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from limes.config.data import DataConfig
from limes.data import load_prompts
from limes.data.sources import split_slice

ROWS = [{"prompt": f"question {i}", "label": str(i), "metadata": {"level": i, "tags": ["a"]}} for i in range(10)]
RECIPE_DATA = Path(__file__).parents[2] / "recipes" / "data"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_saved(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def write_plain_folder(path, rows):
    path.mkdir()
    write_parquet(path / "train-00000-of-00001.parquet", rows)
    return str(path)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.parquet": write_parquet,
    "saved": write_saved,
    "plain": write_plain_folder,
}


def prompts_of(found):
    return [row.prompt for row in found.rows]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_gives_the_same_rows_in_file_order(tmp_path, name):
    found = load_prompts(DataConfig(prompt_data=WRITERS[name](tmp_path / name, ROWS)))
    assert [(row.prompt, row.label, row.metadata) for row in found.rows] == [
        (row["prompt"], row["label"], row["metadata"]) for row in ROWS
    ]
    same = load_prompts(DataConfig(prompt_data=write_jsonl(tmp_path / "same.jsonl", ROWS)))
    assert found.fingerprint == same.fingerprint


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("@[-2:]", [8, 9]),
        ("@[2:5]", [2, 3, 4]),
        ("@[:3]", [0, 1, 2]),
        ("@[:-8]", [0, 1]),
        ("@[-3:-1]", [7, 8]),
        ("@[8:100]", [8, 9]),
        ("@[:]", list(range(10))),
    ],
)
def test_slices_are_pythons_and_keep_the_order(tmp_path, name, cut, expected):
    found = load_prompts(DataConfig(prompt_data=WRITERS[name](tmp_path / name, ROWS) + cut))
    assert prompts_of(found) == [f"question {i}" for i in expected]


ENDS = st.none() | st.integers(-20, 20)


@given(start=ENDS, stop=ENDS)
@settings(deadline=None)
def test_slice_text_means_what_python_means(start, stop):
    written = f"a@b.jsonl@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert split_slice(written) == ("a@b.jsonl", slice(start, stop))


@pytest.mark.parametrize("bad", ["@[3]", "@[a:b]", "@[1:2:3]", "@[-:2]", "@[1:2", "@[1:2]x"])
def test_what_is_no_slice_is_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=r"@\[start:stop\]"):
        load_prompts(DataConfig(prompt_data=write_jsonl(tmp_path / "rows.jsonl", ROWS) + bad))


@pytest.mark.parametrize("name", WRITERS)
def test_empty_slice_and_empty_file_are_refused(tmp_path, name):
    path = WRITERS[name](tmp_path / name, ROWS)
    with pytest.raises(ValueError, match=r"holds no rows; widen the slice"):
        load_prompts(DataConfig(prompt_data=path + "@[10:]"))
    with pytest.raises(ValueError, match=r"holds no rows"):
        load_prompts(DataConfig(prompt_data=path + "@[5:2]"))
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no rows$"):
        load_prompts(DataConfig(prompt_data=write_jsonl(tmp_path / "empty.jsonl", [])))


@pytest.mark.parametrize(
    ("line", "why"),
    [(b'{"prompt": ', "not valid JSON"), (b"[1, 2]", "holds a list"), (b'{"prompt": "\xff"}', "not UTF-8")],
)
def test_bad_line_names_file_and_line(tmp_path, line, why):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": 1}\n\n' + line + b'\n{"prompt": "b", "label": 1}\n')
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: {why}"):
        load_prompts(DataConfig(prompt_data=str(path)))
    assert prompts_of(load_prompts(DataConfig(prompt_data=f"{path}@[-1:]"))) == ["b"]


def test_byte_order_mark_and_missing_last_newline_are_harmless(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": 1}\n{"prompt": "b\xc3\xa9", "label": 2}')
    assert prompts_of(load_prompts(DataConfig(prompt_data=str(path)))) == ["a", "bé"]


@pytest.mark.parametrize("name", WRITERS)
def test_missing_columns_name_near_ones(tmp_path, name):
    path = WRITERS[name](tmp_path / name, [{"prompts": "a", "lable": "1"}, {"prompts": "b", "lable": "2"}])
    with pytest.raises(ValueError, match=r"no column 'prompt'.*did you mean prompts.*columns: prompts, lable"):
        load_prompts(DataConfig(prompt_data=path))
    with pytest.raises(ValueError, match=r"no column 'label', which data\.label_key.*did you mean lable"):
        load_prompts(DataConfig(prompt_data=path, input_key="prompts"))
    for no_labels in ("", None):
        found = load_prompts(DataConfig(prompt_data=path, input_key="prompts", label_key=no_labels))
        assert [row.label for row in found.rows] == [None, None]
    found = load_prompts(DataConfig(prompt_data=path, input_key="prompts", label_key="lable"))
    assert [row.label for row in found.rows] == ["1", "2"]


def test_label_may_be_absent_in_some_rows(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "label": 7}])
    assert [row.label for row in load_prompts(DataConfig(prompt_data=path)).rows] == [None, 7]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("name", WRITERS)
def test_prompt_may_be_chat_messages(tmp_path, name):
    plain = [{"role": "user", "content": "Hi", "name": "Ann"}]
    path = WRITERS[name](tmp_path / name, [{"prompt": MESSAGES, "label": "x"}, {"prompt": plain, "label": "y"}])
    assert prompts_of(load_prompts(DataConfig(prompt_data=path))) == [MESSAGES, plain]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (7, "not int 7"),
        ("", "empty"),
        ([], "empty"),
        (None, "empty"),
        (["hi"], "role and content, not 'hi'"),
        ([{"role": "user"}], "role and content"),
        ({"role": "user", "content": "hi"}, "not dict"),
    ],
)
def test_wrong_prompts_name_the_row(tmp_path, prompt, why):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "fine", "label": 1}, {"prompt": prompt, "label": 1}])
    with pytest.raises(ValueError, match=rf"line 2, column prompt: .*{why}"):
        load_prompts(DataConfig(prompt_data=path))


def test_metadata_must_be_an_object(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "label": 1, "metadata": "level 3"}])
    with pytest.raises(ValueError, match=r"line 1: column metadata holds str 'level 3'.*data\.metadata_key"):
        load_prompts(DataConfig(prompt_data=path))


def test_missing_file_names_its_neighbours(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"no such file or folder; did you mean .*train\.jsonl"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "trian.jsonl")))
    with pytest.raises(ValueError, match=r"there is no folder"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "no" / "rows.jsonl")))


def test_unknown_endings_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"\.jsonl .* or \.parquet, not \.csv"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "rows.csv")))
    (tmp_path / "rows.parquet").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a Parquet file"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "rows.parquet")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder: `datasets` cannot read this folder"):
        load_prompts(DataConfig(prompt_data=str(tmp_path / "folder")))


def test_splits_are_chosen_by_option(tmp_path):
    halves = {"train": datasets.Dataset.from_list(ROWS[:5]), "test": datasets.Dataset.from_list(ROWS[5:])}
    datasets.DatasetDict(halves).save_to_disk(str(tmp_path / "both"))
    data = DataConfig(prompt_data=str(tmp_path / "both"))
    assert prompts_of(load_prompts(data))[0] == "question 0"
    assert prompts_of(load_prompts(data, source_options={"split": "test"}))[0] == "question 5"
    with pytest.raises(ValueError, match=r"no split 'tset'.*did you mean test"):
        load_prompts(data, source_options={"split": "tset"})
    with pytest.raises(ValueError, match="knows the option split, not size"):
        load_prompts(data, source_options={"size": 5})


def test_options_of_a_file_are_refused_but_those_of_the_training_task_do_not_reach_it(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="a file takes no options"):
        load_prompts(DataConfig(prompt_data=path, source_options={"size": 5}))
    training = DataConfig(prompt_data="reasoning_gym:chain_sum", source_options={"size": 5})
    assert len(load_prompts(training, path)) == 10


@pytest.mark.parametrize(
    ("package", "kind"), [("pyarrow", "rows.parquet"), ("datasets", "saved"), ("reasoning_gym", None)]
)
def test_missing_extra_names_the_install_command(tmp_path, monkeypatch, package, kind):
    path = WRITERS[kind](tmp_path / kind, ROWS) if kind else "reasoning_gym:chain_sum"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ValueError, match=rf"needs the package {package}; .*pip install 'limes\[(data|gym)\]'"):
        load_prompts(DataConfig(prompt_data=path))


def test_fingerprint_follows_content_and_order_and_not_the_place(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    base = load_prompts(DataConfig(prompt_data=path)).fingerprint
    reordered_keys = [dict(reversed(row.items())) for row in ROWS]
    moved = write_jsonl(tmp_path / "moved.jsonl", reordered_keys)
    assert load_prompts(DataConfig(prompt_data=moved)).fingerprint == base
    others = [
        load_prompts(DataConfig(prompt_data=path + "@[0:9]")),
        load_prompts(DataConfig(prompt_data=write_jsonl(tmp_path / "b.jsonl", ROWS[::-1]))),
        load_prompts(DataConfig(prompt_data=path, label_key=None)),
        load_prompts(DataConfig(prompt_data=path, input_key="label")),
        load_prompts(
            DataConfig(prompt_data=write_jsonl(tmp_path / "c.jsonl", [*ROWS[:-1], ROWS[-1] | {"label": "x"}]))
        ),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 6


def test_gym_rows_carry_what_their_verifier_needs():
    from reasoning_gym import get_score_answer_fn

    told = []
    options = {"size": 6, "seed": 3, "max_terms": 2}
    found = load_prompts(
        DataConfig(prompt_data="reasoning_gym:chain_sum", source_options=options),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(i, 6) for i in range(1, 7)]
    assert found.name == "reasoning_gym:chain_sum"
    for row in found.rows:
        entry = row.metadata["reasoning_gym"]["entry"]
        assert row.metadata["reasoning_gym"]["task"] == "chain_sum"
        assert (row.prompt, row.label) == (entry["question"], entry["answer"])
        assert get_score_answer_fn("chain_sum")(row.label, entry) == 1.0
    part = load_prompts(DataConfig(prompt_data="reasoning_gym:chain_sum@[-2:]", source_options=options))
    assert prompts_of(part) == prompts_of(found)[-2:]


def test_gym_rows_follow_the_seed_and_nothing_else():
    data = DataConfig(prompt_data="reasoning_gym:leg_counting", source_options={"size": 4})
    assert load_prompts(data).fingerprint == load_prompts(data).fingerprint
    assert load_prompts(data).fingerprint != load_prompts(data, source_options={"size": 4, "seed": 1}).fingerprint


@pytest.mark.slow
def test_gym_rows_do_not_depend_on_the_hash_seed_of_this_process():
    # The questions of this task come from the order of a set of strings.
    code = (
        "from limes.config.data import DataConfig; from limes.data import load_prompts;"
        "data = DataConfig(prompt_data='reasoning_gym:ransom_note', source_options={'size': 4});"
        "print(load_prompts(data).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("task", "options", "why"),
    [
        ("chainsum", {}, r"no such task; did you mean chain_sum"),
        ("chain_sum", {"max_term": 3}, r"source_options\.max_term.*did you mean .*max_terms"),
        ("chain_sum", {"min_terms": 0}, r"refuses .*min_terms = 0"),
        ("chain_sum", {"size": 0}, r"refuses size = 0.*must be positive"),
    ],
)
def test_gym_refusals_name_what_is_near(task, options, why):
    with pytest.raises(ValueError, match=why):
        load_prompts(DataConfig(prompt_data=f"reasoning_gym:{task}", source_options=options))


def test_recipe_data_is_what_the_recipes_ask():
    addition = load_prompts(DataConfig(prompt_data=str(RECIPE_DATA / "addition.jsonl")))
    assert len(set(prompts_of(addition))) == len(addition) == 81
    for row in addition.rows:
        a, b = (int(word.strip("?")) for word in row.prompt.split() if word.strip("?").isdigit())
        assert row.prompt == f"What is {a} + {b}? Answer with just the number."
        assert row.label == str(a + b)
    largest = load_prompts(DataConfig(prompt_data=str(RECIPE_DATA / "largest_number.jsonl")))
    assert len(set(prompts_of(largest))) == len(largest) == 500
    for row in largest.rows:
        listed = row.prompt.removeprefix("Which is the largest number: ").removesuffix("? Answer with just the number.")
        numbers = [int(number) for number in listed.split(", ")]
        assert len(set(numbers)) == 4
        assert all(1 <= number <= 99 for number in numbers)
        assert row.label == str(max(numbers))
