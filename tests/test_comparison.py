"""Runs are paired as controlled experiments: what may be compared, with which control, what differs, and by how much."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math

import numpy as np
import pytest

from launch.comparison import tables
from launch.comparison.comparison import (
    REPEATED,
    Absent,
    compare,
    compare_experiments,
    differences,
    group,
    reached_at,
)
from launch.comparison.report import summary
from launch.comparison.runs import read_run
from launch.errors import UsageError
from recipes.claims import Claim
from recipes.registry import ROOT, Experiment, read_recipe, read_testbed
from tests.run_folders import description, line, write_run
from tests.run_folders import lines as lines_of

STEPS = 40
lines = functools.partial(lines_of, steps=STEPS)
ZERO_1 = ("--deepspeed_config", "ds_configs/zero1_bf16.json")
FP32 = ("--deepspeed_config", "ds_configs/zero1_fp32.json")
PLD = ("--recipe", "recipes/progressive_layer_drop")
MUONS = {"muon": (), "other": ("--set", "optimizer.params.nesterov=false")}
TESTBED = dataclasses.replace(read_testbed("nano-0.5M"), target_loss=4.5)
CLAIMS = [Claim("loss", "within", 0.05), Claim("step_time", "ratio", 0.85)]


def on_testbed(control, own, seeds):
    """The comparison of these runs with `CLAIMS`, for which `seeds` seeds were planned."""
    recipe = dataclasses.replace(read_recipe(ROOT / PLD[1]), experiments={TESTBED.name: Experiment(seeds, CLAIMS)})
    return compare_experiments([(recipe, TESTBED, control, own)])


@pytest.fixture
def make(corpus, tmp_path):
    """Writes a run with the description that `flags` have, and reads it; `change` is merged into the description."""

    def run(name, flags, seed=1, of_steps=None, change=None, **metrics):
        said = merged(description(corpus, "--steps", str(STEPS), *flags, seed=seed), change or {})
        return read_run(write_run(tmp_path / name, said, lines(**metrics) if of_steps is None else of_steps))

    return run


def merged(value, change):
    """`value` with the values of `change` in its sections."""
    if not isinstance(change, dict):
        return change
    return value | {key: merged(value.get(key, {}), member) for key, member in change.items()}


def test_figures_are_of_pairs_with_the_same_seed(make):
    runs = [make(f"control-{seed}", ZERO_1, seed, final=final, step_seconds=0.5) for seed, final in ((1, 4.0), (2, 4.25), (3, 9.0))]
    runs += [make(f"pld-{seed}", PLD, seed, final=final, step_seconds=0.4) for seed, final in ((2, 4.75), (1, 4.25))]
    comparison = compare(runs)
    (pair,) = comparison.pairs
    assert (pair.control.name, pair.treatment.name, pair.name, pair.recipe, pair.seeds) == ("control", "pld", "pld", None, (1, 2))
    loss = pair.figures["final_val_loss"]
    assert loss.control == {1: 4.0, 2: 4.25, 3: 9.0} and loss.other == {1: 4.25, 2: 4.75}
    assert loss.difference and loss.difference.mean == 0.375
    half = 12.706205 * 0.125  # t of 97.5% with one degree of freedom x the standard error of 0.25 and 0.5
    assert (loss.difference.low, loss.difference.high) == pytest.approx((0.375 - half, 0.375 + half))
    assert loss.ratio is None
    time = pair.figures["step_seconds"]
    assert time.difference and time.ratio and (time.difference.mean, time.ratio.mean) == pytest.approx((-0.1, 0.8))
    assert pair.verdicts == ()  # of no testbed
    assert comparison.remarks == ("pld against control: seed 3 was run on one side only, and is excluded from differences and verdicts",)


def test_runs_that_are_saved_and_logged_differently_form_one_side(make):
    runs = [make("a1", ZERO_1, 1), make("a2", ZERO_1, 2, change={"save_every": 7})]
    (side,) = compare(runs).sides
    assert [run.seed for run in side.runs] == [1, 2]


def test_one_pair_has_a_difference_without_an_interval(make):
    (pair,) = compare([make("a", ZERO_1), make("b", PLD, final=4.5)]).pairs
    difference = pair.figures["final_val_loss"].difference
    assert difference and (difference.mean, difference.low, difference.high) == (0.5, None, None)
    answer = tables.answer(compare([make("c", ZERO_1), make("d", PLD, final=4.00001)]))
    assert answer == "d ends at the same loss as c (one seed, which shows no noise); a token takes 1.00 times as long."


def test_claims_are_judged_with_the_planned_seeds_only(make):
    control = [make(f"a{seed}", ZERO_1, seed, step_seconds=0.5 + 0.001 * seed) for seed in (1, 2, 3)]
    own = [make(f"b{seed}", PLD, seed, final=4 + 1e-4 * seed, step_seconds=0.4) for seed in (1, 2, 3)]
    comparison = on_testbed(control, own, seeds=3)
    (pair,) = comparison.pairs
    assert [verdict.claim for verdict in pair.verdicts] == CLAIMS
    assert {verdict.outcome for verdict in pair.verdicts} == {"holds"} and comparison.remarks == ()
    unfinished = make("c3", PLD, 3, of_steps=lines()[:35])
    for seeds, runs in ((2, own), (4, own), (3, own[:2]), (3, [*own[:2], unfinished])):
        other = on_testbed(control, runs, seeds)
        assert other.pairs[0].verdicts == () and other.pairs[0].figures["final_val_loss"].difference
        assert any(f"exploratory, without verdicts: {seeds} seeds, from 1 on, all to their end," in remark for remark in other.remarks)


@pytest.mark.parametrize("change", [{"interleaved": None}, {"machine": {"host": "another"}}], ids=["alone", "elsewhere"])
def test_step_times_of_runs_that_were_not_interleaved_on_one_machine_are_not_judged(change, make):
    control = [make(f"a{seed}", ZERO_1, seed, step_seconds=0.5 + 0.001 * seed) for seed in (1, 2)]
    own = [make(f"b{seed}", PLD, seed, final=4 + 1e-4 * seed, step_seconds=0.1, change=change) for seed in (1, 2)]
    (pair,) = on_testbed(control, own, seeds=2).pairs
    loss, time = pair.verdicts
    assert loss.found, "its claim does not depend on the machine"
    assert (time.outcome, time.found) == ("inconclusive", None)
    assert time.reason.startswith("the runs of a seed were not interleaved on one machine")


def test_a_recipe_without_claims_on_the_testbed_is_not_judged(make):
    recipe = dataclasses.replace(read_recipe(ROOT / PLD[1]), experiments={})
    comparison = compare_experiments([(recipe, TESTBED, [make("a", ZERO_1)], [make("b", PLD)])])
    assert (comparison.pairs[0].experiment, comparison.pairs[0].verdicts, comparison.remarks) == (None, (), ())


def test_the_target_is_the_testbeds_and_no_run_is_dropped(make):
    def falling(final):
        found = lines(final=final)
        found[20]["val_loss"] = 5.0
        return found

    control = [make(f"a{seed}", ZERO_1, seed, of_steps=falling(4.0)) for seed in (1, 2)]
    own = [make(f"b{seed}", PLD, seed, of_steps=falling(final)) for seed, final in ((1, 4.0), (2, 4.75))]
    comparison = on_testbed(control, own, seeds=2)
    tokens = comparison.pairs[0].figures["tokens_to_target"]
    # 5.0 after 20 steps and 4.0 after 40: 4.5 after 30 of 1,024 tokens
    assert tokens.control == {1: 30 * 1024, 2: 30 * 1024} and tokens.other == {1: 30 * 1024, 2: math.inf}
    assert (tokens.difference, tokens.ratio) == (None, None), "of the one that reached it, it would be 1"
    assert comparison.pairs[0].figures["seconds_to_target"].control[1] == 16
    (row,) = [row for row in tables.figures(comparison.pairs[0]).rows if row[0] == "tokens to the target loss"]
    assert row[1:] == ["30,720 ± 0", "reached by 1 of 2", "–", "–"]
    json.dumps(comparison.as_json(), allow_nan=False)
    complete = on_testbed(control[:1], own[:1], seeds=2).pairs[0].figures["tokens_to_target"]
    assert (complete.difference.mean, complete.ratio.mean) == (0.0, 1.0)
    assert not any("target" in name for name in compare([*control, *own]).pairs[0].figures)


def test_the_target_is_reached_on_the_line_between_evaluations():
    x, loss = np.arange(6.0), np.array([math.nan, 6, 4, math.nan, 4, 2])
    # 4 at 2 and at 4 is one block, with its centre at 3
    assert [reached_at(x, loss, target) for target in (7.0, 5.0, 3.0, 2.0, 1.0)] == [1.0, 2.0, 4.0, 5.0, math.inf]
    assert reached_at(x, np.full(6, math.nan), 1.0) is None
    out_of_order = np.array([8.0, 7.0, 4.9, 6.1, 5.2, 4.6, 4.0])
    assert 4 < reached_at(np.arange(7.0), out_of_order, 5.0) < 5, "4.9, 6.1 and 5.2 are one block, not a first crossing"


def test_losses_are_compared_at_the_time_at_which_the_faster_run_ends(make):
    """The control takes twice as long: when the recipe ends, the control is halfway, at 6 − (6 − 4) / 2."""
    slow = [{**one, "seconds": 2 * one["seconds"]} for one in lines(final=4.0)]
    start, end = (one["seconds"] for one in (slow[0], slow[-1]))
    fast = [{**one, "seconds": start + (one["step"] / STEPS) * (end - start) / 2} for one in lines(final=4.5)]
    pair = compare([make("a", ZERO_1, of_steps=slow), make("b", PLD, of_steps=fast)]).pairs[0]
    figure = pair.figures["loss_at_equal_time"]
    assert (figure.control[1], figure.other[1], figure.ratio) == (pytest.approx(5.0), 4.5, None)
    assert figure.difference.mean == pytest.approx(-0.5)
    unfinished = compare([make("c", ZERO_1, of_steps=slow), make("d", PLD, of_steps=fast[:10])]).pairs[0]
    assert "loss_at_equal_time" not in unfinished.figures


# --- sides and their controls ---------------------------------------------------------------------------------------------------------


def test_the_seed_and_the_names_make_no_other_side(make, tmp_path):
    def infinity(name):  # whose weights go to a drive, into the run's folder
        return "--recipe", "recipes/zero_infinity", "--run_name", name, "--runs_dir", str(tmp_path)

    names = {"created": "another day", "command": ["another"], "resume": True, "quiet": True, "resumes": [{}], "interleaved": "t"}
    files = {"recipe": None, "config_file": "/x/ds_configs/y.json"}
    runs = [make("one", infinity("one"), 1), make("two", infinity("two"), 2, change={**names, **files})]
    assert "two/nvme" in json.dumps(runs[1].description["engine"])
    assert differences(*runs) == []
    assert [len(side) for side in group(runs)] == [2]


def test_every_value_at_any_depth_is_found_to_differ(make):
    run = make("r", PLD)

    def places(value, path=()):
        if isinstance(value, dict):
            for key, member in value.items():
                yield from places(member, (*path, key))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                yield from places(item, (*path, place))
        else:
            yield path, value

    of_start = {
        "created",
        "command",
        "folder",
        "flags",
        "profile",
        "resume",
        "quiet",
        "hang_timeout",
        "checkpoint_store",
        "interleaved",
        "finished",
        "run_id",
        "branch_from",
    }
    names = {"seed", "run_name", "runs_dir", "recipe", "config_file", "preset", "data", "corpus", "save_every", "keep"}
    circumstances = {"commit", "machine", "versions"}
    compared = {key: value for key, value in run.description.items() if key not in of_start | names | circumstances}
    every = [(path, value) for path, value in places(compared) if ".".join(map(str, path)) not in REPEATED]
    assert len(every) > 35 and {("optimizer", "params", "betas", 0), ("engine", "zero_optimization", "stage")} <= {
        path for path, _ in every
    }
    for path, value in every:
        changed = copy.deepcopy(run.description)
        at = changed
        for key in path[:-1]:
            at = at[key]
        for other in (f"not {value}", not value, None, [value], {"deeper": value}):
            at[path[-1]] = other
            # null says what an absent key does
            assert bool(differences(run, with_description(run, changed))) == (value is not other), (path, other)


def with_description(run, description):
    return dataclasses.replace(run, description=description)


def test_a_value_that_is_written_in_another_way_is_the_same(make):
    run = make("r", ZERO_1)
    written = merged(
        run.description, {"engine": {"zero_optimization": {"reduce_bucket_size": 5e7}}, "optimizer": {"params": {"eps": 1e-8}}}
    )
    assert differences(run, with_description(run, written)) == []
    assert len(group([run, with_description(run, written)])) == 1


def test_a_setting_that_stands_twice_is_shown_once(make):
    control, other = make("a", ZERO_1), make("b", (*ZERO_1, "--lr", "0.001", "--micro_batch_size", "2"))
    assert {key: values for key, *values in compare([control, other]).pairs[0].differences} == {
        "engine.train_micro_batch_size_per_gpu": [4, 2],
        "engine.gradient_accumulation_steps": [1, 2],
        "optimizer.params.lr": [0.002, 0.001],
        "scheduler.params.min_lr": [0.0002, 0.0001],
    }


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (
            {"machine": {"host": "another"}},
            "not all runs used the same machine, so differences in time and memory may come from the machine",
        ),
        ({"commit": "0123abc+changes"}, "not all runs used the same commit, so differences may come from the code"),
        ({"versions": {"torch": "1.0"}}, "not all runs used the same package versions, so differences may come from these"),
    ],
    ids=["machine", "commit", "versions"],
)
def test_circumstances_that_differ_are_remarked_and_no_settings(change, remark, make):
    runs = [make(f"a{seed}", ZERO_1, seed) for seed in (1, 2)]
    runs += [make(f"b{seed}", PLD, seed, change=change if seed == 2 else {}) for seed in (1, 2)]
    comparison = compare(runs)
    (pair,) = comparison.pairs
    assert all(key.startswith("techniques") for key, *_ in pair.differences)
    assert comparison.remarks == (f"b against a: {remark}",)


def test_the_first_run_given_is_of_the_control(make):
    comparison = compare([make("b_1", (*ZERO_1, "--lr", "0.001")), make("a_1", ZERO_1), make("c", (*ZERO_1, "--warmup_steps", "0"))])
    assert [(pair.title, pair.recipe, pair.verdicts) for pair in comparison.pairs] == [
        ("a_1 against b_1", None, ()),
        ("c against b_1", None, ()),
    ]
    assert [side.name for side in comparison.sides] == ["b_1", "a_1", "c"]
    alike = compare([make(f"r{number}", flags, seed) for number, flags, seed in ((1, ZERO_1, 1), (2, ZERO_1, 2), (3, PLD, 1), (4, PLD, 2))])
    assert [side.name for side in alike.sides] == ["r1, r2", "r3, r4"], "names without their numbers only where that tells them apart"


def test_a_default_of_the_recipes_optimizer_may_be_unrecorded(make):
    muon, other = (make(name, ("--recipe", "recipes/muon", *flags)) for name, flags in MUONS.items())
    params = {key: value for key, value in muon.description["optimizer"]["params"].items() if key not in ("nesterov", "adam_lr")}
    older = with_description(muon, muon.description | {"optimizer": {"type": "Muon", "params": params}})
    assert len(group([muon, older])) == 1
    assert [key for key, *_ in differences(older, other)] == ["optimizer.params.nesterov"]


def test_pairs_that_made_their_steps_at_other_times_are_remarked(make):
    alone = {"interleaved": None}
    resumed = {"resumes": [{"interleaved": "group-3"}]}
    assert compare([make("a", ZERO_1, change=resumed), make("b", PLD, change=resumed)]).remarks == ()
    others = ({"resumes": [{"interleaved": None}]}, {"resumes": [{}]}, {"resumes": [{"interleaved": "group-4"}]})
    cases = ((alone, alone), (alone, {}), ({"interleaved": "group-2"}, {}), ({"interleaved": ["no text"]}, {}), (resumed, {}))
    for own, control in (*cases, *((resumed, other) for other in others)):
        name = json.dumps([own, control])
        (remark,) = compare([make(f"a{name}", ZERO_1, change=control), make(f"b{name}", PLD, change=own)]).remarks
        assert "not all runs were interleaved" in remark


def test_one_configuration_of_two_commits_is_two_sides_where_a_seed_comes_again(make):
    """What a change of the code does to the same run."""
    runs = [
        make(f"{commit}{seed}", ZERO_1, seed, change={"commit": commit}, final=final)
        for commit, final in (("old", 4.0), ("new", 4.5))
        for seed in (1, 2)
    ]
    (pair,) = compare(runs).pairs
    assert [side.runs[0].description["commit"] for side in (pair.control, pair.treatment)] == ["old", "new"]
    assert [side.name for side in (pair.control, pair.treatment)] == ["old", "new"]
    assert pair.figures["final_val_loss"].difference.mean == 0.5
    assert pair.differences == [] and pair.differ_in("commit")
    assert compare([runs[0], runs[3]]).pairs == ()  # seed 1 of the one and seed 2 of the other: seeds of one side


def test_runs_of_one_configuration_alone_are_one_side(make):
    comparison = compare([make("a", ZERO_1, 2), make("b", ZERO_1, 1)])
    assert comparison.pairs == () and [run.seed for run in comparison.sides[0].runs] == [1, 2]
    assert tables.answer(comparison) == "One configuration, and nothing to compare it with." and tables.caveats(comparison) == []


def test_a_seed_that_was_run_twice_counts_once(make):
    runs = [make("a", ZERO_1, final=4.0), make("again", ZERO_1, final=5.0), make("b", PLD, final=4.5)]
    comparison = compare(runs)
    assert len(comparison.pairs[0].control.runs) == 2
    difference = comparison.pairs[0].figures["final_val_loss"].difference
    assert difference and difference.mean == 0.5
    (remark,) = comparison.remarks
    assert remark == f"a, again: seed 1 was run more than once; {runs[0].folder} is compared, {runs[1].folder} is only plotted"


def test_recipes_that_share_runs_share_a_side(make):
    zero_0 = ("--deepspeed_config", "ds_configs/zero0_bf16.json")
    control, zero_1, pld = make("zero0", zero_0), make("zero1", ZERO_1), make("pld", PLD)
    recipes = {name: read_recipe(ROOT / "recipes" / name) for name in ("zero_1", "progressive_layer_drop")}
    experiments = [(recipes["progressive_layer_drop"], None, [zero_1], [pld]), (recipes["zero_1"], None, [control], [zero_1])]
    comparison = compare_experiments(experiments, [Absent("fp8", "needs a GPU")])
    assert [side.name for side in comparison.sides] == ["zero1_bf16", "progressive_layer_drop", "zero0_bf16"]
    assert comparison.pairs[0].control is comparison.pairs[1].treatment
    assert comparison.as_json()["absent"] == [{"recipe": "fp8", "reason": "needs a GPU"}]


# --- what is refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"corpus_fingerprint": "f" * 64}, ("corpus_fingerprint", "f" * 16)),
        ({"corpus": {"vocab_size": 512}}, ("vocabulary", "512 ids", "1,024 ids")),
        ({"eval_batches": 8}, ("validation set", "64 sequences of 128", "128 sequences of 128")),
        ({"whole_eval": True}, ("validation set", "the whole split at the end in sequences of 128")),
        ({"shape": {"seq_len": 64}}, ("validation set", "128 sequences of 64", "128 sequences of 128")),
        ({"no_cross_document": True}, ("validation set", "attention within documents")),
        ({"total_tokens": 999}, ("token budget (total_tokens)", "999", "40,960")),
    ],
)
def test_losses_of_different_things_are_refused_or_marked(change, values, make):
    runs = [make("a", ZERO_1, 1), make("b", ZERO_1, 2), make("vocabulary", PLD, 1, change=change), make("d", PLD, 2, change=change)]
    recipe = read_recipe(ROOT / "recipes/progressive_layer_drop")
    experiments = [(recipe, None, runs[:2], runs[2:])]
    for compared in (lambda force: compare(runs, force), lambda force: compare_experiments(experiments, (), force)):
        with pytest.raises(UsageError) as refusal:
            compared(False)
        (fault,) = refusal.value.faults
        assert all(value in fault for value in (*values, "--force", str(runs[0].folder), str(runs[2].folder)))
        forced = compared(True)
        (mismatch,) = forced.mismatches
        assert all(value in mismatch for value in values) and "--force" not in mismatch
        assert len(forced.pairs) == 1 and forced.as_json()["mismatches"] == [mismatch]


def test_batch_sizes_that_differ_are_compared_by_the_loss_of_the_whole_split(make):
    whole, end = (*ZERO_1, "--whole_eval"), {"finished": {"step": 20, "tokens": 20480, "whole_val_loss": 4.5}}
    halved = (*whole, "--global_batch_size", "4", "--steps", str(2 * STEPS))
    runs = [make(f"a{seed}", whole, seed, change=end) for seed in (1, 2)]
    runs += [make(f"b{seed}", halved, seed, lines(steps=2 * STEPS), end) for seed in (1, 2)]
    comparison = compare(runs)
    (pair,) = comparison.pairs
    assert comparison.mismatches == () and pair.figures["final_val_loss"].difference and "loss_at_equal_time" not in pair.figures
    (remark,) = [one for one in comparison.remarks if "sequences" in one]
    assert "of 64 and 128 sequences" in remark


# --- runs that did not end well -------------------------------------------------------------------------------------------------------


def test_a_recipe_that_diverges_fails_its_claim_about_the_loss(make):
    runs = [make(f"a{seed}", ZERO_1, seed) for seed in (1, 2, 3)]
    runs += [make(f"b{seed}", PLD, seed) for seed in (1, 2)]
    runs.append(make("b3", PLD, 3, of_steps=[*lines()[:7], line(7, None)]))
    comparison = on_testbed(runs[:3], runs[3:], seeds=3)
    (pair,) = comparison.pairs
    assert pair.verdicts[0].outcome == "fails" and "diverged" in pair.verdicts[0].reason
    others = [verdict for verdict in pair.verdicts if verdict.claim.measure != "loss"]
    assert others and all(one.outcome == "inconclusive" and "not that of a whole run: b3" in one.reason for one in others)
    loss = pair.figures["final_val_loss"]
    assert loss.other[3] == math.inf and loss.difference and loss.difference.mean == 0.0
    assert "; 1 of 3 runs diverged and are left out" in tables.answer(comparison)
    assert list(pair.figures["bytes_sent"].other) == [1, 2]
    assert any(
        f"seed 3 is excluded from the difference of the final loss and of sums over the run, because {runs[-1].folder}" in remark
        for remark in comparison.remarks
    )
    written = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert written["pairs"][0]["figures"]["final_val_loss"]["other"] == {"1": 4.0, "2": 4.0, "3": None}


def test_a_control_that_diverges_leaves_the_claim_open(make):
    runs = [make("a1", ZERO_1, 1), make("a2", ZERO_1, 2, final=None), make("b1", PLD, 1), make("b2", PLD, 2)]
    comparison = on_testbed(runs[:2], runs[2:], seeds=2)
    (pair,) = comparison.pairs
    assert (pair.verdicts[0].outcome, pair.verdicts[0].found) == ("inconclusive", None) and pair.verdicts[1].found
    assert pair.verdicts[0].reason == "the control diverged, or a run lacks the measure, with seed 2"
    difference = pair.figures["final_val_loss"].difference
    assert difference and (difference.mean, difference.low) == (0.0, None)  # of one seed
    assert any(
        f"seed 2 is excluded from the difference of the final loss, because {runs[1].folder} diverged" in remark
        for remark in comparison.remarks
    )


def test_an_unfinished_run_is_in_no_pair_of_the_final_loss_or_of_sums(make):
    runs = [make(f"a{seed}", ZERO_1, seed) for seed in (1, 2)]
    runs += [make("b1", PLD, 1), make("b2", PLD, 2, of_steps=lines()[:35])]
    comparison = compare(runs)
    (pair,) = comparison.pairs
    of_both = {name for name, figure in pair.figures.items() if figure.difference and figure.difference.low is not None}
    assert of_both == {"tokens_per_second", "step_seconds", "peak_memory_bytes", "bytes_per_step"}
    assert all(figure.difference for figure in pair.figures.values())  # of seed 1
    assert any(f"of the final loss and of sums over the run, because {runs[3].folder} is unfinished" in one for one in comparison.remarks)


@pytest.mark.parametrize("of_steps", [[], lines()[:1], lines()[:3]])
def test_a_run_that_has_hardly_begun_is_compared(of_steps, make):
    (pair,) = compare([make("a", ZERO_1, of_steps=of_steps), make("b", PLD, of_steps=of_steps)]).pairs
    assert "final_val_loss" not in pair.figures


@pytest.mark.parametrize(("timed", "compared"), [(19, [1]), (20, [1, 2])])
def test_times_are_compared_of_runs_with_20_timed_steps_or_more(timed, compared, make):
    """The first ten steps are not timed. With fewer, no form of the output has a ratio of times."""
    runs = [make(f"a{seed}", ZERO_1, seed, step_seconds=0.5) for seed in (1, 2)]
    runs += [make("b1", PLD, 1, step_seconds=0.4), make("b2", PLD, 2, of_steps=lines(step_seconds=0.4)[: 11 + timed])]
    comparison = compare(runs)
    assert list(comparison.pairs[0].figures["step_seconds"].paired_values) == compared
    short = [make(name, flags, of_steps=lines()[: 11 + timed]) for name, flags in (("c", ZERO_1), ("d", PLD))]
    comparison = compare(short)
    (pair,) = comparison.pairs
    shown = str([summary(comparison), tables.figures(pair).rows, comparison.as_json()["pairs"][0]["figures"]])
    assert {word in shown for word in ("time per token", "step time", "step_seconds")} == {timed == 20}
    remark = "times of seed 1 are not compared, because a run has fewer than 20 timed steps, those after the first 10 of each start"
    assert any(remark in one for one in comparison.remarks) is (timed == 19)


# --- report.json ----------------------------------------------------------------------------------------------------------------------


def test_the_report_is_plain_json_with_where_each_number_comes_from(make):
    name = "<script>alert(1)<" + "script>"
    runs = [make("a", ZERO_1), make("a2", ZERO_1, 2), make(name, PLD, final=4.5), make("b2", PLD, 2, final=4.5)]
    comparison = on_testbed(runs[:2], runs[2:], seeds=2)
    written = comparison.as_json()
    json.dumps(written, allow_nan=False)
    (pair,) = written["pairs"]
    sides = ["progressive_layer_drop", "zero1_bf16", "progressive_layer_drop", [1, 2]]
    assert [pair[key] for key in ("recipe", "control", "side", "seeds")] == sides
    (technique,) = pair["differences"]
    assert (technique["key"], technique["control"], technique["other"]["theta"]) == ("techniques.progressive_layer_drop", None, 0.5)
    assert pair["figures"]["final_val_loss"]["difference"]["mean"] == 0.5
    assert pair["testbed"] == "nano-0.5M" and [claim["claim"]["question"] for claim in pair["claims"]] == ["within", "ratio"]
    for claim in pair["claims"]:
        assert claim.keys() == {"claim", "statement", "outcome", "reason", "found"} and claim["found"].keys() == {"mean", "low", "high"}
    run, _ = written["sides"][1]["runs"]
    assert (run["name"], run["folder"], run["seed"], run["state"]) == (name, str(runs[2].folder), 1, "finished")
    assert run["commit"] == runs[2].description["commit"] and run["machine"] == runs[2].description["machine"]
    assert run["measures"]["final_val_loss"] == 4.5
