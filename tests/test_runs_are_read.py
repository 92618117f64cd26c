"""A run's folder is read as far as it is good, whatever state the run is in, and what is wrong with it is said."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from launch.comparison.runs import read_run
from launch.errors import UsageError
from tests.run_folders import TOKENS, description, line, lines, write_run

ZERO_1 = ("--deepspeed_config", "ds_configs/zero1_bf16.json")
FP16 = ("--deepspeed_config", "ds_configs/zero1_fp16.json")


@pytest.fixture(scope="module")
def said(corpus):
    """The description of a run of 20 steps in bf16."""
    return description(corpus, *ZERO_1)


def test_a_finished_run_has_the_measures_that_its_lines_have(said, tmp_path):
    steps = lines(final=4.25)
    for number, one in enumerate(steps[1:], 1):
        one |= {
            "step_seconds": 9.0 if number <= 10 else 0.1 * number,
            "bytes_sent": 10 * number,
            "skipped_steps": 2,
            "mfu": 0.25 if number <= 15 else 0.5,
            "flops": 100,
        }
    steps[20]["tokens_per_second"] = 4096
    steps[7]["peak_memory_bytes"] = 2000  # a resumed run is another process, which may need less
    run = read_run(write_run(tmp_path / "r", said, steps))
    assert run.finished and not run.diverged and run.state == "finished" and run.remarks == ()
    assert run.measures == pytest.approx(
        {
            "final_val_loss": 4.25,
            "timed_steps": 10,
            "step_seconds": 1.55,  # the mean of 1.1, 1.2, ..., 2.0
            "tokens_per_second": (2048 * 13.5 + 4096 * 2.0) / 15.5,  # all tokens over all seconds
            "mfu": (0.25 * 6.5 + 0.5 * 9.0) / 15.5,
            "seconds": 11,
            "peak_memory_bytes": 2000,
            "bytes_per_step": 105,
            "bytes_sent": 2100,
            "skipped_steps": 2,
            "flops": 2000,
        }
    )


def test_no_sums_are_taken_over_lines_that_lack_steps(said, tmp_path):
    steps = [one | {"bytes_sent": 10, "flops": 100} for one in lines(final=4.25)]
    run = read_run(write_run(tmp_path / "r", said, [*steps[:8], *steps[12:]]))
    assert run.finished and run.remarks == ("metrics.jsonl lacks 4 of 20 steps, so times per step and sums are not compared",)
    assert set(run.measures) == {"final_val_loss", "timed_steps", "seconds", "peak_memory_bytes"}


def test_the_steps_around_a_resume_are_not_timed(said, tmp_path):
    """The last one is made by all interrupted runs at the same time; the first ones compile again."""
    steps = lines(steps=30)
    for one in steps[1:]:
        is_timed = one["step"] == 11 or one["step"] > 22
        one |= {"step_seconds": 0.25} if is_timed else {"step_seconds": 9.0, "tokens_per_second": 1.0}
    run = read_run(write_run(tmp_path / "r", said, steps, "2026-11-22 03:00:00 resuming after step 12\n"))
    assert (run.measures["step_seconds"], run.measures["tokens_per_second"]) == (0.25, 2048)
    assert read_run(write_run(tmp_path / "s", said, steps)).measures["step_seconds"] == (11 * 9 + 9 * 0.25) / 20


def test_what_a_resume_changed_is_remarked(said, tmp_path):
    changes = ["lr: 0.001 -> 0.002", 'machine.host: "a" -> "b"', 'commit: "1" -> "2"']
    upgraded = read_run(write_run(tmp_path / "u", said | {"resumes": [{"changes": ['versions.torch: "1" -> "2"']}]}, lines()))
    assert upgraded.remarks == ('a resume changed versions.torch: "1" -> "2": the settings shown are the last ones',)
    run = read_run(write_run(tmp_path / "r", said | {"resumes": [{"changes": changes}, {"changes": None}, {}]}, lines()))
    assert run.remarks == ("a resume changed lr: 0.001 -> 0.002: the settings shown are the last ones",)
    assert read_run(write_run(tmp_path / "s", said | {"resumes": [{"changes": changes[1:]}]}, lines())).remarks == ()


def test_the_final_loss_is_that_of_the_whole_split_where_it_was_evaluated(said, tmp_path):
    whole = said | {"whole_eval": True}
    steps = lines(final=4.0)
    for end in (None, {"step": 60}):  # killed before or during the evaluation; finished without the flag
        end = end and end | {"tokens": 60 * TOKENS}
        left_out = read_run(write_run(tmp_path / f"left_out{end}", whole | {"finished": end}, steps))
        assert left_out.state == "unfinished" and "final_val_loss" not in left_out.measures
        assert left_out.remarks == ("unfinished: the whole validation split was not evaluated",)
    run = read_run(write_run(tmp_path / "r", whole | {"finished": end | {"whole_val_loss": 4.5}}, steps))
    assert run.finished and run.measures["final_val_loss"] == 4.5 and run.remarks == () and run.columns["val_loss"][-1] == 4.0
    lost = {"finished": end | {"whole_val_loss": None}, "eval_every": 0}
    run = read_run(write_run(tmp_path / "lost", whole | lost, steps))
    assert run.diverged and run.measures["final_val_loss"] == math.inf


def test_columns_have_an_entry_for_each_line(said, tmp_path):
    steps = [line(step, theta=0.5, note="a text", shares=[1, 2], large=10**400) for step in range(4)]
    steps[2]["theta"] = "a text"
    columns = read_run(write_run(tmp_path / "r", said, steps)).columns
    assert {len(column) for column in columns.values()} == {4}
    np.testing.assert_array_equal(columns["step"], [0, 1, 2, 3])
    np.testing.assert_array_equal(columns["loss"], [math.nan, 5, 5, 5])
    np.testing.assert_array_equal(columns["val_loss"], [math.nan] * 4)
    np.testing.assert_array_equal(columns["theta"], [0.5, 0.5, math.nan, 0.5])
    np.testing.assert_array_equal(columns["bytes"], [0, 100, 200, 300])
    assert not {"note", "shares", "large"} & columns.keys()


@pytest.mark.parametrize("remove", [False, True])
def test_a_run_without_a_step_is_read(remove, said, tmp_path):
    folder = write_run(tmp_path / "r", said, [])
    if remove:
        (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert len(run.columns["loss"]) == len(run.columns["flops"]) == 0 and run.measures == {}
    assert run.remarks[0] == "metrics.jsonl contains no step" and not run.finished


def test_an_evaluation_after_the_last_step_belongs_to_that_step(said, tmp_path):
    steps = [*lines(final=4.5), {"step": 20, "tokens": 20 * TOKENS, "seconds": 11.0, "val_loss": 4.0}]
    run = read_run(write_run(tmp_path / "r", said, steps))
    assert len(run.columns["step"]) == 21 and run.columns["val_loss"][-1] == 4.0 and np.isfinite(run.columns["loss"][-1])


def test_a_run_that_is_still_going_has_no_final_loss(said, tmp_path):
    run = read_run(write_run(tmp_path / "r", said, lines()[:13]))
    assert run.state == "unfinished"
    assert run.remarks == ("unfinished (still training, or stopped): step 12, 12,288 of 20,480 tokens",)
    assert "final_val_loss" not in run.measures and run.measures["bytes_sent"] == 1200


def test_a_file_cut_at_any_byte_is_read_up_to_there(said, tmp_path):
    folder = write_run(tmp_path / "r", said, lines(steps=20))
    whole = (folder / "metrics.jsonl").read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole) - 1):
        (folder / "metrics.jsonl").write_bytes(whole[:end])
        run = read_run(folder)
        assert run.columns["step"][-1] == 19
        assert "1 damaged line skipped" in run.remarks[0]


@pytest.mark.parametrize(
    "damage",
    [
        *("no JSON", "[1]", "{}", '{"step": "7"}', '{"step": true}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"),
        *('{"step": 8, "loss": "4.1"}', '{"step": 8, "loss": [4.1]}', '{"step": 8, "tokens": true}', '{"step": 8, "val_loss": {}}'),
    ],
)
def test_a_damaged_line_is_left_out_and_the_good_ones_after_it_are_read(damage, said, tmp_path):
    folder = write_run(tmp_path / "r", said, lines())
    texts = (folder / "metrics.jsonl").read_text().splitlines()
    texts[8] = damage
    (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    run = read_run(folder)
    np.testing.assert_array_equal(run.columns["step"], [*range(8), *range(9, 21)])
    assert "metrics.jsonl: 1 damaged line skipped" in run.remarks[0] and "line 9" in run.remarks[0]
    texts[8], texts[20] = json.dumps(line(8)), damage
    (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    assert (read_run(folder).state, read_run(folder).diverged) == ("unfinished", False), "a damaged last line is no divergence"


def test_a_loss_that_is_no_number_ends_a_run_in_bf16(said, tmp_path):
    steps = lines()[:8]
    steps[-1]["loss"] = None
    run = read_run(write_run(tmp_path / "r", said, steps))
    assert run.diverged and run.state == "failed"
    assert run.remarks == ("the training loss is not finite in 1 step, first in step 7", "failed after step 7, 7,168 of 20,480 tokens")
    assert math.isnan(run.columns["loss"][-1])
    assert run.measures["final_val_loss"] == math.inf


def test_in_fp16_an_overflow_is_an_update_less(corpus, tmp_path):
    steps = lines()
    for number in (1, 2, 9):
        steps[number]["loss"] = None
    run = read_run(write_run(tmp_path / "r", description(corpus, *FP16), steps))
    assert not run.diverged and run.remarks == ("the training loss is not finite in 3 steps, first in step 1",)
    assert run.measures["final_val_loss"] == 4.0
    assert read_run(write_run(tmp_path / "going", description(corpus, *FP16), steps[:10])).state == "unfinished"


def test_a_run_that_ends_on_a_loss_that_is_no_number_has_diverged(said, tmp_path):
    run = read_run(write_run(tmp_path / "r", said, lines(final=None)))
    assert run.finished and run.diverged and run.measures["final_val_loss"] == math.inf
    assert run.remarks == ("the validation loss is not finite in 1 step, first in step 20",)


ERROR = "2026-11-22 02:04:01 error: step 8: the gradients are not finite, while the loss is 5.1 in bf16; lower --lr, or look at the data\n"


def test_gradients_that_are_no_numbers_leave_no_line_but_the_log_has_them(said, tmp_path):
    run = read_run(write_run(tmp_path / "r", said, lines()[:8], ERROR))
    assert run.diverged and run.measures["final_val_loss"] == math.inf
    reason = "step 8: the gradients are not finite, while the loss is 5.1 in bf16"
    assert run.remarks == (f"failed after step 7, 7,168 of 20,480 tokens: {reason}",)
    first = read_run(write_run(tmp_path / "first", said, lines()[:1], ERROR))
    assert first.measures == {"final_val_loss": math.inf}


def test_a_run_that_fails_for_another_reason_has_not_diverged(said, tmp_path):
    error = "2026-11-22 02:04:01 error: rank 1 (node07, process 3716, which runs) has made no progress for 300 s; look at that host\n"
    run = read_run(write_run(tmp_path / "r", said, lines()[:8], error))
    assert not run.diverged and run.state == "unfinished" and "final_val_loss" not in run.measures
    assert run.remarks[-1].endswith("has made no progress for 300 s")


def test_a_run_that_fails_in_its_last_step_has_diverged(said, tmp_path):
    error = "2026-11-22 02:04:01 error: step 20: the loss is nan in bf16; lower --lr, or look at the data\n"
    run = read_run(write_run(tmp_path / "r", {**said, "whole_eval": True}, [*lines()[:-1], line(20, None)], error))
    assert run.diverged and run.state == "failed" and run.measures["final_val_loss"] == math.inf


def test_an_error_that_a_resume_went_past_is_none(said, tmp_path):
    run = read_run(write_run(tmp_path / "r", said, lines()[:15], ERROR + "2026-11-22 03:00:00 resuming after step 7\n"))
    assert not run.diverged and run.state == "unfinished"


def test_a_run_that_is_not_evaluated_has_no_final_loss(corpus, said, tmp_path):
    steps = [{key: value for key, value in one.items() if key != "val_loss"} for one in lines()]
    off = read_run(write_run(tmp_path / "off", description(corpus, *ZERO_1, "--eval_every", "0"), steps))
    assert off.finished and off.remarks == () and "final_val_loss" not in off.measures
    assert read_run(write_run(tmp_path / "stopped", said, steps)).remarks == ("the run was not evaluated at its end",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot be read"),
        (lambda file: file.write_text("{"), "is not JSON"),
        (lambda file: file.write_bytes(b"\xff"), "is not JSON"),
        (lambda file: file.write_text("[" * 100_000), "is not JSON"),
        (lambda file: file.write_text('{"lr": NaN}'), "it holds NaN"),
        (lambda file: file.write_text("[1]"), "must be an object"),
        (lambda file: alter(file, seed="1"), "'seed' is \"1\", must be a whole number"),
        (lambda file: alter(file, seed=True), "'seed' is true, must be a whole number"),
        (lambda file: alter(file, corpus_fingerprint=None), "'corpus_fingerprint' is null, must be a string"),
        (lambda file: alter(file, shape={"n_layer": 2}), "do not describe a model"),
        (lambda file: alter(file, corpus={}), "do not describe a model"),
        *((lambda file, key=key: alter(file, left_out=key), f"'{key}' is missing") for key in ("seed", "config_file", "shape")),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(change, message, said, tmp_path):
    folder = write_run(tmp_path / "r", said, lines())
    change(folder / "run.json")
    with pytest.raises(UsageError) as refusal:
        read_run(folder)
    assert message in str(refusal.value) and str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


def alter(file, left_out="", **values):
    described = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in described.items() if key != left_out}))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("optimizer.params", None),
        ("techniques.fp8", None),
        ("finished", True),
        ("finished.tokens", None),
        ("finished", {"step": 20}),
        ("resumes", None),
        ("resumes.0", None),
        ("resumes.0.command", None),
        ("resumes.0.changes", 3),
        ("resumes.0.changes.0", None),
        ("spike_rule", []),
        ("corpus.sources", None),
        ("machine.gpus", 1),
    ],
)
def test_a_value_of_another_type_is_refused(place, value, said, tmp_path):
    whole = json.loads(json.dumps(said)) | {"resumes": [{"changes": ["steps: 1 -> 2"]}], "finished": {"step": 20, "tokens": 20 * TOKENS}}
    read_run(folder := write_run(tmp_path / "r", whole, lines()))
    section: Any = whole
    *sections, key = (int(name) if name.isdecimal() else name for name in place.split("."))
    for name in sections:
        section = section[name]
    section[key] = value
    (folder / "run.json").write_text(json.dumps(whole))
    with pytest.raises(UsageError, match=rf"run\.json: '{place}[.a-z]*' is .*, must be [a-z ]+; give a run folder that training wrote"):
        read_run(folder)
