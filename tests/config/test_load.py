"""One object from TOML, flags and Python; what is wrong is said in plain lines."""

import json
import os
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.config import Config, load_config, resolve, to_toml
from limes.config.recipes import PATHS
from limes.config.schema import Leaf, describe, leaves, sections, walk
from limes.config.synonyms import SYNONYMS

NAMES = [
    "model",
    "data",
    "rollout",
    "engine",
    "reward",
    "algorithm",
    "trainer",
    "critic",
    "teacher",
    "cluster",
    "weights",
    "eval",
    "checkpoint",
    "run",
]
TRAINS = {"rollout.num_rollout": 1}


def values_of(schema: dict) -> st.SearchStrategy:
    """Values that a JSON schema allows, and now and then one just outside its bounds."""
    if "anyOf" in schema:
        return st.one_of([values_of(part) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema["type"]:
        case "integer":
            return st.integers(schema.get("minimum", 0), schema.get("minimum", 0) + 300)
        case "number":
            return st.floats(0, 2) | st.integers(0, 2)
        case "string":
            return st.text(max_size=8)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values_of(schema["items"]) if "type" in schema["items"] else terms(), max_size=3)
        case "object":
            plain = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
            return st.dictionaries(st.text(max_size=5), plain | st.lists(plain, max_size=2), max_size=3)


def terms() -> st.SearchStrategy:
    return st.fixed_dictionaries({"kind": st.text(max_size=5)}, optional={"weight": st.floats(0, 1)})


def value_for(path: str) -> st.SearchStrategy:
    strategy = values_of(walk(path.split("."))[0])
    return strategy.map(lambda value: f"no such {value}" if path in PATHS and value is not None else value)


@st.composite
def some_settings(draw: st.DrawFn) -> dict:
    """A few settings by dotted name, mostly valid; no training, so that fewer rules between settings apply."""
    paths = draw(st.lists(st.sampled_from(list(leaves())), unique=True, max_size=6))
    return {path: draw(value_for(path)) for path in paths} | {"rollout.num_rollout": 0}


def nested(dotted: dict) -> dict:
    tree: dict = {}
    for path, value in dotted.items():
        section, name = path.split(".")
        tree.setdefault(section, {})[name] = value
    return tree


def as_flag(leaf: Leaf, value: object) -> str:
    name = leaf.path.replace("_", "-") if len(leaf.path) % 2 else leaf.path
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return f"--{name}={text}"


def outcome(path: Path | None, overrides: object = ()) -> Config | None:
    try:
        return load_config(path, overrides)
    except ValueError:
        return None


@settings(deadline=None)
@given(dotted=some_settings())
def test_recipe_flags_and_python_give_one_object(tmp_path_factory: pytest.TempPathFactory, dotted: dict) -> None:
    recipe = tmp_path_factory.getbasetemp() / "same.toml"
    filled = {path: "none" if value is None else value for path, value in dotted.items()}
    recipe.write_text(tomli_w.dumps(nested(filled)), encoding="utf-8")
    flags = [as_flag(leaves()[path], value) for path, value in dotted.items()]
    results = [outcome(recipe), outcome(None, flags), outcome(None, dotted), outcome(None, nested(dotted))]
    assert all(result == results[0] for result in results), results


@settings(deadline=None)
@given(dotted=some_settings())
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, dotted: dict) -> None:
    config = outcome(None, dotted)
    if config is not None:
        recipe = tmp_path_factory.getbasetemp() / "round.toml"
        recipe.write_text(to_toml(config), encoding="utf-8")
        assert load_config(recipe) == config


def test_unset_values_with_another_default_survive_toml(tmp_path: Path) -> None:
    config = load_config(None, TRAINS | {"data.label_key": None, "eval.num_prompts": None})
    (tmp_path / "r.toml").write_text(to_toml(config))
    again = load_config(tmp_path / "r.toml")
    assert again.data.label_key is None
    assert again.eval.num_prompts is None
    assert "num_epoch" not in to_toml(config)


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--rollout.batch_size", "16"], "rollout.batch_size", 16),
        (["--rollout.batch-size=16"], "rollout.batch_size", 16),
        (["--rollout.batch_size", "4", "--rollout.batch-size", "16"], "rollout.batch_size", 16),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--data.shuffle", "Off"], "data.shuffle", False),
        (["--data.shuffle"], "data.shuffle", True),
        (["--data.shuffle=false", "--data.shuffle", "--run.seed", "3"], "data.shuffle", True),
        (["--trainer.lr", "1e-5"], "trainer.lr", 1e-5),
        (["--rollout.top_k", "-1"], "rollout.top_k", -1),
        (["--rollout.stop", '["\\n", "7"]'], "rollout.stop", ["\n", "7"]),
        (["--data.source_options", '{"size": 5}'], "data.source_options", {"size": 5}),
        (["--data.source_options", "{size = 5}"], "data.source_options", {"size": 5}),
        (
            ["--data.source_options.size", "5", "--data.source-options.a.b", "x"],
            "data.source_options",
            {"size": 5, "a": {"b": "x"}},
        ),
        (["--data.source_options.size", "5", "--data.source_options", "{}"], "data.source_options", {}),
        (["--data.label_key", "none"], "data.label_key", None),
        (["--data.label_key", "007"], "data.label_key", "007"),
        (["--data.label_key=--x"], "data.label_key", "--x"),
        (["--data.system_prompt="], "data.system_prompt", ""),
        (["--run.name", "true"], "run.name", "true"),
    ],
)
def test_flags(flags: list[str], path: str, value: object) -> None:
    section, name = path.split(".")
    found = getattr(getattr(load_config(None, ["--rollout.num_rollout", "1", *flags]), section), name)
    assert found == value
    assert type(found) is type(value)


def test_a_later_table_entry_keeps_the_recipes_other_entries(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("rollout.num_rollout = 1\n[data.source_options]\nsize = 5\nseed = 1\n")
    first = load_config(recipe, ["--data.source_options.seed", "2"])
    assert first.data.source_options == {"size": 5, "seed": 2}
    assert load_config(recipe, {"data": {"source_options.seed": 2}}) == first
    assert load_config(recipe, {"data": {"source_options": {"seed": 2}}}).data.source_options == {"seed": 2}


def message(path: Path | None, overrides: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(path, overrides)
    assert type(caught.value) is ValueError
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", list(leaves()))
def test_a_missing_letter_is_an_error_that_names_the_setting(path: str) -> None:
    misspelled = path[:-2] + path[-1]
    if misspelled not in leaves():
        text = message(None, {misspelled: 1})
        assert text.startswith(f"{misspelled} is not a setting")
        assert path in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout.lr", "trainer.lr or critic.lr"),
        ("rollout.batch", "rollout.batch_size"),
        ("trainer.batch_size", "rollout.batch_size"),
        ("rolout.batch_size", "rollout.batch_size"),
        ("rollout.temprature", "rollout.temperature"),
        ("eval.temprature", "eval.temperature"),
        ("rollout.eps_clip_high", "algorithm.eps_clip_high"),
        ("data.path", "model.path or critic.path or teacher.path"),
        ("rollout.over", "rollout.over_sampling_batch_size"),
    ],
)
def test_nearest_name_across_sections(name: str, meant: str) -> None:
    assert f"did you mean {meant}?" in message(None, [f"--{name}", "1"])
    section, leaf = name.split(".")
    assert f"did you mean {meant}?" in message(None, {section: {leaf: 1}})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainer.learning_rate", "trainer.lr"),
        ("critic.learning_rate", "critic.lr"),
        ("learning_rate", "trainer.lr"),
        ("rollout.max_new_tokens", "rollout.max_response_len"),
        ("eval.max_new_tokens", "eval.max_response_len"),
        ("eval.num_generations", "eval.n_samples_per_prompt"),
        ("grpo.beta", "algorithm.kl_loss_coef"),
    ],
)
def test_what_others_call_a_setting_is_understood(name: str, meant: str) -> None:
    assert f"did you mean {'' if '.' in name else '--'}{meant}?" in message(None, [f"--{name}", "1"])
    assert f"{name} is not a setting; did you mean {meant}?" in message(None, {name: 1})


def test_synonyms_mean_settings_that_exist_and_are_none_themselves() -> None:
    assert set(SYNONYMS.values()) <= set(leaves())
    own = {path.partition(".")[2] for path in leaves()} | set(sections())
    assert set(SYNONYMS) & own == set()


def test_abbreviated_flags_are_refused() -> None:
    for path in leaves():
        section, name = path.split(".")
        for short in (name[: len(name) // 2], name[:-1]):
            if short and f"{section}.{short}" not in leaves():
                assert f"{section}.{short} is not a setting" in message(None, [f"--{section}.{short}=1"])


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ({"rollout.batch_size": "8"}, ['rollout.batch_size = "8" (python): takes a whole number of 1 or more']),
        ({"rollout.batch_size": True}, ["rollout.batch_size = true (python): takes a whole number of 1 or more"]),
        ({"rollout.batch_size": 8.5}, ["rollout.batch_size = 8.5 (python): takes a whole number of 1 or more"]),
        ({"data.shuffle": "false"}, ['data.shuffle = "false" (python): takes true or false']),
        ({"trainer.lr": float("nan")}, ["trainer.lr = NaN (python): takes a number above 0"]),
        ({"algorithm.entropy_coef": float("inf")}, ["algorithm.entropy_coef = Infinity (python): takes a number"]),
        ({"rollout.temperature": -1}, ["rollout.temperature = -1 (python): takes a number of 0 or more"]),
        ({"eval.top_p": 2.0}, ["eval.top_p = 2.0 (python): takes a number above 0 and up to 1, or none"]),
        ({"rollout.top_k": 0}, ["rollout.top_k = 0 (python): takes `-1`, or a whole number of 1 or more"]),
        ({"rollout": 5}, ["rollout is a section, not a setting"]),
        ({"rollout": {}, "nothing": {}}, ["nothing is not a setting"]),
        ({"rollout.batch_size.x": 5}, ["rollout.batch_size.x is not a setting"]),
        (["--run.trackers", "wandb"], ['run.trackers = "wandb" (command line): takes a list']),
        (["--algorithm.aggregation", "mean"], ["takes `token_mean`, `sequence_mean`, `sequence_sum` or `constant`"]),
        (["--rollout.batch_size"], ["--rollout.batch_size needs a value: a whole number of 1 or more"]),
        (["--batch_size", "8"], ["--batch_size is not a flag; did you mean --rollout.batch_size?"]),
        (["rollout.batch_size", "8"], ['"rollout.batch_size" belongs to no flag']),
        (
            {"reward.terms": [{"weight": "a", "knd": "math"}]},
            ["reward.terms[0] (python) lacks kind", 'terms[0].weight = "a"', "did you mean kind?"],
        ),
        ({"data.source_options": {"a": [None]}}, ["data.source_options (python): None cannot stand in a TOML file"]),
        ({"data.source_options": {1: 2}}, ["data.source_options (python): the key 1 is not text"]),
        (
            {"rollout.batch_size": 0, "trainer.lr": "x", "trainer.lrr": 1},
            ["3 problems", "\n  trainer.lrr is not", "\n  rollout.batch_size = 0", '\n  trainer.lr = "x"'],
        ),
    ],
)
def test_what_is_wrong_is_said_with_setting_value_and_fix(overrides: object, lines: list[str]) -> None:
    text = message(None, overrides)
    assert all(line in text for line in lines), text


def test_a_misspelled_setting_does_not_bring_errors_about_its_absence() -> None:
    assert "\n" not in message(None, {"rollout.num_rolout": 3})


def test_origins(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[rollout]\nnum_rollout = 1\nbatch_size = 4\n[algorithm]\neps_clip_high = 0.3\n")
    resolved = resolve(recipe, ["--rollout.batch_size", "8"])
    assert resolved.recipe == recipe
    assert list(resolved.origins) == list(leaves())
    expected = {
        "rollout.num_rollout": "recipe file",
        "rollout.batch_size": "command line",
        "algorithm.eps_clip": "default",
        "algorithm.eps_clip_high": "recipe file",
        "rollout.over_sampling_batch_size": "derived",
        "engine.max_context_len": "derived",
        "rollout.num_epoch": "default",
    }
    assert {path: resolved.origins[path] for path in expected} == expected
    assert resolve(None, TRAINS).origins["rollout.num_rollout"] == "python"


def test_paths_in_a_recipe_are_looked_up_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    (folder / "data").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (folder / "data" / "a.jsonl", folder / "t.jinja", elsewhere / "b.jsonl", elsewhere / "t.jinja"):
        file.write_text("")
    (folder / "r.toml").write_text(
        'rollout.num_rollout = 1\ndata.prompt_data = "data/a.jsonl@[0:5]"\n'
        'model = {chat_template = "t.jinja", path = "Qwen/Qwen3-0.6B"}\neval.prompt_data = "b.jsonl"\n'
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("..") / "recipes" / "r.toml", {"checkpoint.load": "t.jinja"})
    assert config.data.prompt_data == f"{folder}/data/a.jsonl@[0:5]"
    assert config.model.chat_template == str(folder / "t.jinja")
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.eval.prompt_data == "b.jsonl", "not beside the recipe: as written, from the current folder"
    assert config.checkpoint.load == "t.jinja", "only the recipe's own paths are looked up beside it"


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"[rollout\n", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[rollout]\nbatch_size = 1\nbatch_size = 2\n", "is not valid TOML"),
        (b"[rollout]\nbatch-size = 1\n", "did you mean rollout.batch_size? (recipe file)"),
        (b"[rollout]\nbatch_size = '1'\n", 'rollout.batch_size = "1" (recipe file): takes a whole number'),
    ],
)
def test_bad_recipes(tmp_path: Path, content: bytes, fragment: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_bytes(content)
    assert fragment in message(recipe, ())


def test_a_missing_recipe_names_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    assert f"no such file; did you mean {tmp_path}/quickstart.toml?" in message(tmp_path / "quikstart.toml", ())
    assert "is a directory; give a TOML file" in message(tmp_path, ())


def test_python_values_may_be_tuples_and_paths() -> None:
    config = load_config(None, TRAINS | {"run": {"trackers": ("wandb",), "dir": Path("a") / "b"}})
    assert config.run.trackers == ["wandb"]
    assert config.run.dir == os.path.join("a", "b")


def test_every_setting_says_what_it_is() -> None:
    assert list(sections()) == NAMES
    for leaf in leaves().values():
        assert leaf.doc.endswith((".", ")")), leaf.path
        assert leaf.accepts == describe(walk(leaf.path.split("."))[0])
