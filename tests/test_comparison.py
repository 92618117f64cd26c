"""Runs are paired as controlled experiments: what may be compared, with which control, what differs, and by how much."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math

import pytest

from launch.comparison.comparison import REPEATED, Absent, compare, compare_experiments, differences, group, settings
from launch.comparison.html_report import _by_seed as by_seed
from launch.comparison.html_report import answers, figure_row, summary
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
    assert (pair.control.name, pair.control.role, pair.side.name, pair.side.role) == (
        "zero1_bf16",
        "control",
        "progressive_layer_drop",
        "recipe",
    )
    assert pair.recipe and pair.recipe.name == "progressive_layer_drop" and pair.seeds == (1, 2)
    loss = pair.figures["final_val_loss"]
    assert loss.control == {1: 4.0, 2: 4.25, 3: 9.0} and loss.other == {1: 4.25, 2: 4.75}
    assert loss.difference and loss.difference.mean == 0.375
    half = 12.706205 * 0.125  # t of 97.5% with one degree of freedom x the standard error of 0.25 and 0.5
    assert (loss.difference.low, loss.difference.high) == pytest.approx((0.375 - half, 0.375 + half))
    assert loss.ratio is None
    time = pair.figures["step_seconds"]
    assert time.difference and time.ratio and (time.difference.mean, time.ratio.mean) == pytest.approx((-0.1, 0.8))
    assert pair.verdicts == ()  # of no testbed
    title = "progressive_layer_drop against zero1_bf16"
    assert comparison.remarks == (f"{title}: seed 3 was run on one side only, and is excluded from differences and verdicts",)


def test_runs_that_are_saved_and_logged_differently_form_one_side(make):
    runs = [make("a1", ZERO_1, 1), make("a2", ZERO_1, 2, change={"save_every": 7})]
    (side,) = compare(runs).sides
    assert [run.seed for run in side.runs] == [1, 2]


def test_one_pair_has_a_difference_without_an_interval(make):
    (pair,) = compare([make("a", ZERO_1), make("b", PLD, final=4.5)]).pairs
    difference = pair.figures["final_val_loss"].difference
    assert difference and (difference.mean, difference.low, difference.high) == (0.5, None, None)
    (pair,) = compare([make("c", ZERO_1), make("d", PLD, final=4.00001)]).pairs
    assert answers(pair)[0] == "progressive_layer_drop ends at the same loss as its control with the only seed."


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


def test_values_that_are_tuned_for_each_side_are_expected_on_a_testbed(make):
    control = [make(f"a{seed}", ZERO_1, seed) for seed in (1, 2)]
    tuned = [make(f"b{seed}", (*PLD, "--lr", "0.001", "--warmup_steps", "5"), seed) for seed in (1, 2)]
    assert on_testbed(control, tuned, seeds=2).remarks == ()


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
    assert tokens.difference is None and tokens.to_target.bound == ">="
    assert (tokens.ratio.mean, tokens.ratio.low) == (pytest.approx(math.sqrt(40 / 30)), None)
    assert comparison.pairs[0].figures["seconds_to_target"].control[1] == 16
    assert figure_row("tokens_to_target", tokens)[1:] == ["30,720 ± 0 (2 of 2)", "reached by 1 of 2", "–", "≥ 1.155"]
    json.dumps(comparison.as_json(), allow_nan=False)
    complete = on_testbed(control[:1], own[:1], seeds=2).pairs[0].figures["tokens_to_target"]
    assert (complete.difference.mean, complete.ratio.mean) == (0.0, 1.0)
    assert not any("target" in name for name in compare([*control, *own]).pairs[0].figures)


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
    assert differences(runs[:1], runs[1:]) == ()
    assert [len(side) for side in group(runs)] == [2]


def test_every_value_at_any_depth_is_found_to_differ(make):
    run = make("r", PLD)
    keys = settings(run)
    assert {"optimizer.params.betas", "engine.zero_optimization.stage", "corpus.sources[0].bytes", "machine.host", "versions.torch"} <= set(
        keys
    )

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
        "resume",
        "quiet",
        "hang_timeout",
        "checkpoint_store",
        "interleaved",
        "finished",
        "run_id",
        "branch_from",
    }
    names = {*of_start, "seed", "run_name", "runs_dir", "recipe", "config_file"}
    compared = {key: value for key, value in run.description.items() if key not in names}
    every = [(path, value) for path, value in places(compared) if ".".join(map(str, path)) not in REPEATED]
    assert len(every) > 50
    for path, value in every:
        changed = copy.deepcopy(run.description)
        at = changed
        for key in path[:-1]:
            at = at[key]
        for other in (f"not {value}", not value, None, [value], {"deeper": value}):
            if value is None and other in (None, {"deeper": None}):
                continue  # null says what an absent key does
            at[path[-1]] = other
            assert differences([run], [with_description(run, changed)]), (path, other)


def with_description(run, description):
    return dataclasses.replace(run, description=description)


def test_a_value_that_is_written_in_another_way_is_the_same(make):
    run = make("r", ZERO_1)
    written = merged(
        run.description, {"engine": {"zero_optimization": {"reduce_bucket_size": 5e7}}, "optimizer": {"params": {"eps": 1e-8}}}
    )
    assert differences([run], [with_description(run, written)]) == ()
    assert len(group([run, with_description(run, written)])) == 1


def test_a_setting_that_stands_twice_is_shown_once(make):
    control, other = make("a", ZERO_1), make("b", (*ZERO_1, "--lr", "0.001", "--micro_batch_size", "2"))
    found = {one.key: (one.control, one.other) for one in compare([control, other]).pairs[0].differences}
    assert found == {
        "engine.train_micro_batch_size_per_gpu": (4, 2),
        "engine.gradient_accumulation_steps": (1, 2),
        "optimizer.params.lr": (0.002, 0.001),
        "scheduler.params.min_lr": (0.0002, 0.0001),
    }


def test_runs_of_one_side_may_differ_in_commit_and_machine_which_is_shown(make):
    runs = [make(f"a{seed}", ZERO_1, seed, change={"commit": f"commit{seed}", "machine": {"host": "here"}}) for seed in (1, 2)]
    runs += [make(f"b{seed}", PLD, seed, change={"commit": "commit1", "machine": {"host": f"host{seed}"}}) for seed in (1, 2)]
    comparison = compare(runs)
    (pair,) = comparison.pairs
    found = {one.key: (one.control, one.other) for one in pair.differences if not one.key.startswith("techniques")}
    assert found == {
        "commit": ("commit1; commit2", "commit1"),
        "machine.host": ("here", "host1; host2"),
    }
    assert any("not all runs used the same machine" in remark for remark in comparison.remarks)


def test_commits_that_differ_are_remarked(make):
    (remark,) = compare([make("a", ZERO_1), make("b", PLD, change={"commit": "0123abc+changes"})]).remarks
    assert remark.endswith("not all runs used the same commit, so differences may come from the code")


def test_package_versions_that_differ_are_remarked(make):
    (remark,) = compare([make("a", ZERO_1, change={"versions": {"torch": "1.0"}}), make("b", PLD)]).remarks
    assert remark.endswith("not all runs used the same torch, so differences may come from the version")


def test_a_side_has_its_recipe_if_the_first_run_is_of_the_recipes_control(make):
    runs = [make("fp32", FP32), make("pld", PLD), make("lower", (*ZERO_1, "--lr", "0.001")), make("zero1", ZERO_1)]
    comparison = compare(runs)
    pairs = [(pair.control.runs[0].name, pair.side.runs[0].name, pair.recipe and pair.recipe.name) for pair in comparison.pairs]
    assert pairs == [("fp32", "pld", None), ("fp32", "lower", "bf16"), ("fp32", "zero1", "bf16")]
    names = ["zero1_fp32", "progressive_layer_drop", "zero1_bf16 (lower)", "zero1_bf16 (zero1)"]
    assert [side.name for side in comparison.sides] == names
    assert [side.role for side in comparison.sides] == ["control", "run", "recipe", "recipe"]


def test_without_a_recipe_the_first_one_given_is_the_control(make):
    comparison = compare([make("b", (*ZERO_1, "--lr", "0.001")), make("a", ZERO_1), make("c", (*ZERO_1, "--warmup_steps", "0"))])
    assert [(pair.control.runs[0].name, pair.side.runs[0].name, pair.recipe, pair.verdicts) for pair in comparison.pairs] == [
        ("b", "a", None, ()),
        ("b", "c", None, ()),
    ]
    assert [side.role for side in comparison.sides] == ["control", "run", "run"]
    assert [side.name for side in comparison.sides] == ["zero1_bf16 (b)", "zero1_bf16 (a)", "zero1_bf16 (c)"]


def test_more_than_the_recipe_says_is_remarked(make):
    comparison = compare([make("a", ZERO_1), make("b", (*PLD, "--lr", "0.001"))])
    assert any("settings that the recipe does not name" in remark and "optimizer.params.lr" in remark for remark in comparison.remarks)
    assert compare([make("c", ZERO_1), make("d", PLD)]).remarks == ()
    assert compare([make("e", FP32), make("f", ZERO_1)]).remarks == ()


def test_a_default_of_the_recipes_optimizer_is_expected_and_may_be_unrecorded(make):
    control = make("a", ("--deepspeed_config", "ds_configs/zero0_bf16.json"))
    muon, other = (make(name, ("--recipe", "recipes/muon", *flags)) for name, flags in MUONS.items())
    params = {key: value for key, value in muon.description["optimizer"]["params"].items() if key not in ("nesterov", "adam_lr")}
    older = with_description(muon, muon.description | {"optimizer": {"type": "Muon", "params": params}})
    assert len(group([muon, older])) == 1
    assert compare([control, muon]).remarks == compare([control, older]).remarks == ()
    (remark,) = compare([control, other]).remarks
    assert remark.endswith("may cause the effect: optimizer.params.nesterov")


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
    assert [side.runs[0].description["commit"] for side in (pair.control, pair.side)] == ["old", "new"]
    assert [side.name for side in (pair.control, pair.side)] == ["zero1_bf16 (old1)", "zero1_bf16 (new1)"]
    assert pair.recipe is None and pair.figures["final_val_loss"].difference.mean == 0.5
    assert [one.key for one in pair.differences] == ["commit"]
    assert compare([runs[0], runs[3]]).pairs == ()  # seed 1 of the one and seed 2 of the other: seeds of one side


def test_runs_of_one_configuration_alone_are_one_side(make):
    comparison = compare([make("a", ZERO_1, 2), make("b", ZERO_1, 1)])
    assert comparison.pairs == () and [run.seed for run in comparison.sides[0].runs] == [1, 2]
    assert comparison.remarks == ("all runs have the same configuration, so there is nothing to compare them with",)


def test_a_seed_that_was_run_twice_counts_once(make):
    runs = [make("a", ZERO_1, final=4.0), make("again", ZERO_1, final=5.0), make("b", PLD, final=4.5)]
    comparison = compare(runs)
    assert len(comparison.pairs[0].control.runs) == 2
    difference = comparison.pairs[0].figures["final_val_loss"].difference
    assert difference and difference.mean == 0.5
    (remark,) = comparison.remarks
    assert remark == f"zero1_bf16: seed 1 was run more than once; {runs[0].folder} is compared, {runs[1].folder} is only plotted"


def test_recipes_that_share_runs_share_a_side(make):
    zero_0 = ("--deepspeed_config", "ds_configs/zero0_bf16.json")
    control, zero_1, pld = make("zero0", zero_0), make("zero1", ZERO_1), make("pld", PLD)
    recipes = {name: read_recipe(ROOT / "recipes" / name) for name in ("zero_1", "progressive_layer_drop")}
    experiments = [(recipes["progressive_layer_drop"], None, [zero_1], [pld]), (recipes["zero_1"], None, [control], [zero_1])]
    comparison = compare_experiments(experiments, [Absent("fp8", "needs a GPU")])
    assert [(side.name, side.role) for side in comparison.sides] == [
        ("zero1_bf16", "control"),
        ("progressive_layer_drop", "recipe"),
        ("zero0_bf16", "control"),
    ]
    assert comparison.pairs[0].control is comparison.pairs[1].side
    assert comparison.as_json()["absent"] == [{"recipe": "fp8", "reason": "needs a GPU"}]


def test_two_recipes_that_are_compared_with_each_other_have_the_role_of_recipes(make):
    control, pld, zero_2 = make("a", ZERO_1), make("b", PLD), make("c", ("--deepspeed_config", "ds_configs/zero2_bf16.json"))
    names = ("progressive_layer_drop", "zero_2")
    experiments = [(read_recipe(ROOT / "recipes" / name), None, [control], [own]) for name, own in zip(names, (pld, zero_2), strict=True)]
    comparison = compare_experiments(experiments)
    assert [side.role for side in comparison.sides] == ["control", "recipe", "recipe"] and len(comparison.pairs) == 3


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
        assert ("bits per byte" in fault) == ("corpus" in change), "the advice is for the fault, whatever the folders' names"
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
    assert answers(pair)[0] == "progressive_layer_drop diverged in 1 of 3 runs."
    assert "its control in the runs that did not diverge" in answers(pair)[1]
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
    assert list(comparison.pairs[0].figures["step_seconds"].pairs) == compared
    short = [make(name, flags, of_steps=lines()[: 11 + timed]) for name, flags in (("c", ZERO_1), ("d", PLD))]
    comparison = compare(short)
    (pair,) = comparison.pairs
    shown = [*answers(pair), *summary(comparison), *map(str, by_seed(pair)), json.dumps(comparison.as_json()["pairs"][0]["figures"])]
    assert any("as long" in text or "1.000" in text or "step_seconds" in text for text in shown) is (timed == 20)
    remark = f"times of seed 1 are not compared: {short[0].folder} has {timed} timed steps, those after the first 10 of each start, and 20"
    assert any(remark in one for one in comparison.remarks) is (timed == 19)


# --- report.json ----------------------------------------------------------------------------------------------------------------------


def test_the_report_is_plain_json_with_where_each_number_comes_from(make):
    name = "<script>alert(1)<" + "script>"
    runs = [make("a", ZERO_1), make("a2", ZERO_1, 2), make(name, PLD, final=4.5), make("b2", PLD, 2, final=4.5)]
    comparison = on_testbed(runs[:2], runs[2:], seeds=2)
    written = comparison.as_json()
    json.dumps(written, allow_nan=False)
    (pair,) = written["pairs"]
    assert (pair["recipe"], pair["control"], pair["side"], pair["seeds"]) == (
        "progressive_layer_drop",
        "zero1_bf16",
        "progressive_layer_drop",
        [1, 2],
    )
    assert {"key": "techniques.progressive_layer_drop.theta", "control": None, "other": 0.5} in pair["differences"]
    assert pair["figures"]["final_val_loss"]["difference"]["mean"] == 0.5
    assert pair["testbed"] == "nano-0.5M" and [claim["claim"]["question"] for claim in pair["claims"]] == ["within", "ratio"]
    for claim in pair["claims"]:
        assert claim.keys() == {"claim", "statement", "outcome", "reason", "found"} and claim["found"].keys() == {"mean", "low", "high"}
    run, _ = written["sides"][1]["runs"]
    assert (run["name"], run["folder"], run["seed"], run["state"]) == (name, str(runs[2].folder), 1, "finished")
    assert run["commit"] == runs[2].description["commit"] and run["machine"] == runs[2].description["machine"]
    assert run["measures"]["final_val_loss"] == 4.5
