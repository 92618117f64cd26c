"""The sequence-length curriculum: lengths by hand and by DeepSpeed's own scheduler, and what its section may say."""

from __future__ import annotations

import json
from functools import partial

import pytest

from recipes.curriculum_learning.technique import length_at, stages
from tests import helpers
from tests.commands import run_script

LINEAR = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
LINEAR |= {"schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}}


explain = partial(helpers.explain, "--recipe", "recipes/curriculum_learning")


def test_the_length_grows_in_multiples_by_the_formula():
    # 8 + 5.6 a step, rounded down to multiples of 8.
    assert [length_at(step, LINEAR) for step in range(1, 13)] == [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]


def test_a_root_grows_faster_at_first():
    root = {**LINEAR, "schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}}
    # 8 + 56 sqrt(step / 10): 25.7, 33.0, 38.7, 43.4, 47.6, 51.4, ...
    assert [length_at(step, root) for step in range(1, 7)] == [24, 32, 32, 40, 40, 48]


def test_discrete_lengths_last_until_their_step():
    section = {"min_difficulty": 16, "max_difficulty": 64, "schedule_type": "fixed_discrete"}
    section["schedule_config"] = {"difficulty": [16, 32, 64], "max_step": [2, 5]}
    assert [length_at(step, section) for step in range(1, 8)] == [16, 16, 32, 32, 32, 64, 64]


def test_the_first_length_is_a_multiple_that_is_not_below_the_minimum():
    section = {**LINEAR, "min_difficulty": 5, "schedule_config": {"total_curriculum_step": 1000, "difficulty_step": 16}}
    assert length_at(1, section) == 16


SECTIONS = [
    {"min_difficulty": least, "max_difficulty": most, "schedule_type": kind, "schedule_config": config}
    for least, most in ((8, 1024), (5, 64), (64, 64), (1, 7))
    for kind, config in (
        ("fixed_linear", {"total_curriculum_step": 37, "difficulty_step": 8}),
        ("fixed_linear", {"total_curriculum_step": 1, "difficulty_step": 1}),
        ("fixed_root", {"total_curriculum_step": 100, "difficulty_step": 16, "root_degree": 3}),
        ("fixed_discrete", {"difficulty": [least, most], "max_step": [20]}),
    )
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: json.dumps(section))
def test_every_length_is_that_of_deepspeeds_own_scheduler(section):
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    scheduler = CurriculumScheduler(section)
    assert [length_at(step, section) for step in range(1, 150)] == [scheduler.get_difficulty(step) for step in range(1, 150)]


@pytest.mark.parametrize("length", [8, 16, 24, 40, 64])
@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_each_token_is_a_target_once_at_most_behind_the_one_before_it(mode, length):
    import torch

    from launch.config.run_config import resolve
    from recipes.registry import make_techniques
    from recipes.technique import StepWork

    schedule = ["--set", "curriculum_learning.schedule_type=fixed_discrete", "--set", f"curriculum_learning.mode={mode}"]
    schedule += ["--set", f'curriculum_learning.schedule_config={{"difficulty": [{length}, 64], "max_step": [9]}}']
    flags = ["--recipe", "recipes/curriculum_learning", "--explain", "--seq_len", "64", *schedule]
    (technique,) = make_techniques(resolve(flags)[0]).members
    technique.on_step(3, StepWork(3, 1, 64))
    windows = torch.arange(3 * 65).view(3, 65)  # every token is another
    rows = technique.on_batch(windows)
    assert rows.shape == ((3 * (64 // length) if mode == "reshape" else 3), length + 1)
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)
    targets = rows[:, 1:].flatten().tolist()
    assert len(set(targets)) == len(targets)
    # Left out is what follows: all behind the length, or a remainder shorter than a row.
    behind = length if mode == "truncate" else 64 // length * length
    assert set(targets) == {int(token) for token in windows[:, 1 : behind + 1].flatten()}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: json.dumps(section))
def test_the_stages_are_the_lengths_of_the_steps(section):
    found = stages(section)
    lengths = [length_at(step, section) for step in range(1, 150)]
    firsts = [step for step in range(1, 150) if step == 1 or lengths[step - 1] != lengths[step - 2]]
    assert found == [(step, lengths[step - 1]) for step in firsts]


def test_the_number_of_lengths_is_said_and_takes_no_walk_over_the_steps():
    long = ["curriculum_learning.schedule_config.total_curriculum_step=1000000000000", "curriculum_learning.min_difficulty=16"]
    done = explain(*(text for setting in long for text in ("--set", setting)))
    assert done.returncode == 0
    note, late = json.loads(done.stdout)["notes"]
    assert note.startswith("curriculum_learning: sequences of 16 to 128 tokens")
    assert "15 lengths" in note
    assert late.startswith("curriculum_learning: the last stage of its schedule begins at step ")
    assert late.endswith("and the run ends at step 8,000")  # 1,000 steps of 128 tokens a sequence, at 16


@pytest.mark.parametrize(
    "flags",
    [
        ("batch_size_warmup", "--tokens", "1000000000000000000"),
        *(
            pytest.param(flags, marks=pytest.mark.long)
            for flags in (
                (
                    "curriculum_learning",
                    "--seq_len",
                    "1000000",
                    "--set",
                    "curriculum_learning.schedule_config.total_curriculum_step=10000000",
                ),
                ("curriculum_learning", "--steps", "1000000000"),
                ("progressive_layer_drop", "--steps", "1000000000"),
                ("batch_size_warmup", "--global_batch_size", "1000000007"),
                ("batch_size_warmup", "--global_batch_size", "1000000000", "--micro_batch_size", "1000000000"),
                ("random_ltd", "--n_layer", "20000"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_run_of_any_size_is_explained_at_once(flags):
    recipe, *more = flags
    assert run_script("launch/pretrain.py", "--recipe", f"recipes/{recipe}", *more, "--explain", timeout=60).returncode == 0


def test_behind_its_last_step_a_small_degree_does_not_overflow():
    section = {**LINEAR, "schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 1e-3}}
    assert [length_at(step, section) for step in (1, 9, 10, 11, 10**9)] == [8, 8, 64, 64, 64]
