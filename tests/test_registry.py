"""The recipes: discovered, valid, true about what they change, and found with their technique."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.comparison.trials import settings_on
from launch.config import deepspeed_json, optimizer
from launch.config.flags import as_words, build_parser, parse_flags
from launch.errors import UsageError
from recipes import registry
from recipes.technique import Declaration, Technique

ROOT = Path(__file__).resolve().parents[1]
GOOD = {"title": "t", "config": "ds_configs/zero2_bf16.json", "control": "ds_configs/zero1_bf16.json", "differs": [], "experiments": {}}


def experiments(found: dict[str, Any]) -> str:
    """A recipe.json with these experiments."""
    return json.dumps({**GOOD, "experiments": found})


def claim(**changed: Any) -> str:
    """A recipe.json with one claim."""
    return experiments({"nano-0.5M": {"seeds": 5, "claims": [{"measure": "loss", "question": "equal", "number": 0.01, **changed}]}})


def swept(sweep: Any, **changed: Any) -> str:
    """A recipe.json with a sweep."""
    return experiments({"nano-0.5M": {"seeds": 5, **({} if sweep is None else {"sweep": sweep}), **changed}})


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted keys in which two JSONs differ; a section that one of them lacks counts as one key."""
    found = set()
    for key in {*one, *other}:
        if isinstance(one.get(key), dict) and isinstance(other.get(key), dict):
            found |= differences(one[key], other[key], f"{prefix}{key}.")
        elif key not in one or key not in other or one[key] != other[key]:
            found.add(prefix + key)
    return found


def differing(config: str, control: str) -> set[str]:
    return differences(*(json.loads((ROOT / file).read_text()) for file in (config, control)))


def test_every_recipe_folder_is_discovered_and_has_its_files():
    folders = sorted(
        path.name
        for path in (ROOT / "recipes").iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "testbeds") and any(path.iterdir())
    )
    assert registry.recipe_names() == folders
    assert [name for name in folders if not (ROOT / "recipes" / name / "README.md").is_file()] == []


@pytest.mark.parametrize("name", registry.recipe_names())
def test_recipe_says_exactly_what_it_changes(name):
    recipe = registry.read_recipe(ROOT / "recipes" / name)
    assert recipe.name == name
    assert (ROOT / recipe.config).is_file()
    assert (ROOT / recipe.control).is_file()
    assert recipe.config != recipe.control
    assert set(recipe.differs) == differing(recipe.config, recipe.control)
    assert len(recipe.differs) == len(set(recipe.differs))
    for testbed, experiment in recipe.experiments.items():
        assert experiment.seeds >= 2
        assert experiment.claims or experiment.sweep, "a recipe claims something that can fail, once it is tuned"
        build_parser().parse_args(as_words(settings_on(registry.read_testbed(testbed), recipe.config)))
    build_parser().parse_args(recipe.flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no recipe.json; the recipes are"),
        ("{", "not a readable JSON file"),
        ("[]", "it must be an object"),
        (json.dumps({**GOOD, "titel": "x"}), "'titel': Unexpected keyword argument"),
        (experiments({"nano-9M": {"seeds": 5}}), "'experiments.nano-9M': unknown testbed; allowed are gpt2-33M"),
        (experiments({"nano-0.5M": {}}), "'experiments.nano-0.5M.seeds': Field required"),
        (claim(measure="los"), "claims.0': 'measure' is 'los'; allowed are loss, step_time, peak_memory, bytes"),
        (claim(question="below"), "'question' is 'below'; allowed are equal, within, lower_by, ratio"),
        (claim(measure="bytes"), "'question' is 'equal' for 'bytes'; ratios are for all measures but the loss"),
        (claim(number=math.nan), "'number' is nan; it must be a number"),
        (claim(number=0.02), "'number' is 0.02 for 'equal'; allowed are at most 0.01"),
        (swept(None, seeds=1), "'seeds' is 1; it must be at least 2"),
        (swept({"warmup_steps": [1]}), "'sweep' has no lr; every sweep varies the learning rate"),
        (swept(None, tuned={"lr": 0.1}), "'tuned.lr' is not in 'sweep'; only swept flags may differ from the testbed's"),
        (json.dumps({**GOOD, "flags": ["--stepz", "3"]}), "'flags': unknown argument '--stepz'; did you mean '--steps'"),
        (json.dumps({**GOOD, "flags": ["--steps", "0"]}), "'flags': --steps: 0 is out of range"),
        *(
            (json.dumps({**GOOD, "flags": ["--lr", "0.1", *words]}), f"'flags': {words[0].partition('=')[0]} is not for a recipe")
            for words in (["--resume"], ["--runs_dir=/tmp"], ["--checkpoint_store", "file:///tmp"], ["--run_name", "x"], ["--data", "x"])
        ),
        (swept({"lr": [0.1], "runs_dir": ["/tmp"]}), "'experiments.nano-0.5M.sweep': --runs_dir is not for a recipe"),
    ],
)
def test_bad_recipe_is_refused_in_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "recipe.json").write_text(content)
    with pytest.raises((UsageError, registry.RecipeError)) as mistake:
        parse_flags(["--recipe", str(tmp_path)])
    assert message in str(mistake.value) and "\n" not in str(mistake.value)
    assert str(tmp_path) in str(mistake.value)


def test_a_testbed_without_a_sweep_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "TESTBEDS", tmp_path)
    fields = {"title": "t", "device": "cpu", "corpus": {}, "flags": {"lr": 0.001}, "target_loss": 5.0}
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / "testbed.json").write_text(json.dumps(fields))
    with pytest.raises(registry.RecipeError, match="neither a 'sweep' nor a 'reason'"):
        registry.read_testbed("fixed")
    (tmp_path / "fixed" / "testbed.json").write_text(json.dumps({**fields, "reason": "Because."}))
    assert registry.read_testbed("fixed").sweep == {}
    (tmp_path / "fixed" / "testbed.json").write_text(json.dumps({**fields, "reason": "Because.", "tuned": {"min_lr": 0.0}}))
    with pytest.raises(registry.RecipeError, match=r"'tuned\.min_lr' is not in 'sweep'; fixed values belong in 'flags'"):
        registry.read_testbed("fixed")


def test_two_recipes_at_once_are_refused():
    with pytest.raises(UsageError, match="--recipe is given twice"):
        parse_flags(["--recipe", "recipes/zero_1", "--recipe=recipes/zero_2"])


def test_the_users_flags_win_over_the_recipes(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({**GOOD, "flags": ["--steps", "50", "--lr=0.001", "--set", "gradient_clipping=2"]}))

    def parse(*flags: str):
        return parse_flags(["--recipe", str(tmp_path), *flags])[0]

    assert (parse().steps, parse().lr, parse().overrides) == (50, 0.001, ["gradient_clipping=2"])
    assert parse("--steps", "7").steps == 7
    assert parse("--lr", "0.5").lr == 0.5
    assert (parse("--tokens", "9").steps, parse("--tokens", "9").tokens) == (None, 9)
    assert parse("--set", "gradient_clipping=3").overrides == ["gradient_clipping=2", "gradient_clipping=3"]  # the later one counts


TECHNIQUE = '''
"""A technique that does nothing."""
from recipes.technique import Declaration, Technique


class Nothing(Technique):
    declaration = Declaration(
        section="curriculum_learning",
        optimizer_type="OneBitNothing",
        keys={
            "params": {"types": ["object"], "keys": {"min_difficulty": {"types": ["integer"], "minimum": 8, "auto": True}}},
            "wrong": {"types": ["boolean"]},
            "freeze_step": {"types": ["integer"], "minimum": 1, "auto": True},
        },
    )

    def __init__(self, section, run):
        if section.get("wrong"):
            raise ValueError("'curriculum_learning.wrong' is true; it must be false")
'''


@pytest.fixture
def recipes_with_a_technique(tmp_path, monkeypatch) -> Path:
    """A checkout of one recipe, that has a technique, in place of the real one."""
    folder = tmp_path / "recipes" / "nothing_at_all"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(GOOD))
    (folder / "technique.py").write_text(TECHNIQUE)
    import recipes

    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path / "recipes")])
    registry.technique_classes.cache_clear()
    deepspeed_json._homes.cache_clear()
    yield folder
    registry.technique_classes.cache_clear()
    deepspeed_json._homes.cache_clear()
    sys.modules.pop("recipes.nothing_at_all.technique", None)
    sys.modules.pop("recipes.nothing_at_all", None)


def resolve_with(tmp_path: Path, corpus: Path, section: Any, **changes: Any):
    from launch.config.run_config import resolve

    values = json.loads((ROOT / "ds_configs/zero1_bf16.json").read_text()) | {"curriculum_learning": section} | changes
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(values, indent=1))
    return resolve(["--deepspeed_config", str(file), "--data", str(corpus)], ranks=2)[0]


def test_a_technique_is_found_and_its_section_taken_out(recipes_with_a_technique, tmp_path, corpus):
    section = {"enabled": True, "params": {"min_difficulty": 8}}
    config = resolve_with(tmp_path, corpus, section)
    assert config.techniques == {"curriculum_learning": section}
    assert "curriculum_learning" not in config.ds_config
    assert [type(member).__name__ for member in registry.make_techniques(config).members] == ["Nothing"]

    off = resolve_with(tmp_path, corpus, {"enabled": False})
    assert (off.techniques, "curriculum_learning" in off.ds_config) == ({}, False)

    optimizer = {"type": "onebitnothing", "params": {"lr": "auto", "freeze_step": 10, "betas": "auto"}}
    config = resolve_with(tmp_path, corpus, {"enabled": False}, optimizer=optimizer)
    assert config.optimizer == {
        "type": "OneBitNothing",
        "params": {"lr": config.lr, "freeze_step": 10, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    }
    # DeepSpeed would refuse it at stage 1.
    assert config.ds_config["zero_allow_untested_optimizer"] is True
    assert config.origins["zero_allow_untested_optimizer"] == "OneBitNothing is an optimizer of a recipe"
    with pytest.raises(UsageError, match='write "zero_allow_untested_optimizer": true, or use stage 0'):
        resolve_with(tmp_path, corpus, {"enabled": False}, optimizer=optimizer, zero_allow_untested_optimizer=False)
    assert len(registry.make_techniques(config).members) == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (5, "line 37: 'curriculum_learning' is 5; write an object"),
        ({"wrong": True}, "line 38: 'curriculum_learning.wrong' is true; it must be false"),
        ({"params": {"min_difficulty": 7}}, "line 39: 'curriculum_learning.params.min_difficulty' is 7; write 8 or more"),
        (
            {"params": {"min_dificulty": 8}},
            "line 39: 'curriculum_learning.params.min_dificulty': unknown key; did you mean 'min_difficulty'?",
        ),
    ],
)
def test_a_wrong_section_of_a_technique_is_refused(section, message, recipes_with_a_technique, tmp_path, corpus):
    with pytest.raises(UsageError) as mistake:
        resolve_with(tmp_path, corpus, section)
    assert message in str(mistake.value)
    assert len(mistake.value.faults) == 1


def test_a_recorded_default_is_like_a_key_that_is_left_out(monkeypatch):
    made = type("Made", (Technique,), {"declaration": Declaration(section="made", keys={"power": {"types": ["integer"], "default": 3}})})
    monkeypatch.setattr(optimizer, "technique_classes", lambda: [made])

    def described(**section: Any) -> dict[str, Any]:
        run = {"seed": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "techniques": {"made": section, "unknown": {"power": 3}}}
        return optimizer.without_defaults(run)

    assert described(enabled=True, power=3) == described(enabled=True) != described(enabled=True, power=4)
    assert described()["techniques"]["unknown"] == {"power": 3}


def test_a_schedule_depends_on_the_step_alone(corpus):
    """As `--explain` uses them: `on_step` and `metrics` at any step, in any order, before there is an engine."""
    code = """
import json, sys
from launch.config.run_config import resolve
from recipes.registry import ROOT, make_techniques, recipe_names
from recipes.technique import step_without_techniques

for name in recipe_names():
    config, _ = resolve(["--recipe", str(ROOT / "recipes" / name), "--data", sys.argv[1], "--seq_len", "128"], ranks=2)
    techniques = make_techniques(config)

    def told(step):
        return techniques.on_step(step, step_without_techniques(config)), json.dumps(techniques.metrics(), sort_keys=True)

    steps = sorted({1, *(max(1, config.steps * quarter // 4) for quarter in (1, 2, 3, 4))})
    forwards = [told(step) for step in steps]
    assert forwards == [told(step) for step in reversed(steps)][::-1], name
"""
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
