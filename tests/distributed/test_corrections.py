"""Each fault of the engine is there without its correction, is gone with it, and is corrected only while the probe finds it."""

from __future__ import annotations

import pytest

JOBS = "tests.distributed.correction_jobs"


@pytest.fixture
def run(two_ranks, corpus):
    """Run a job of `correction_jobs` on two ranks; the result of rank 0."""
    return lambda job, **arguments: two_ranks.run(f"{JOBS}:{job}", corpus=str(corpus), **arguments)[0]


NO_FAULT = "this DeepSpeed no longer shows the fault (on this machine): see whether the correction can go"


def test_stage_0_in_bf16_starts_from_the_weights_it_was_given(run):
    found = run("weights_and_adam_step_at_start", without="keep_weights_at_start")
    assert found["largest_change"] > 1e-4, NO_FAULT
    assert found["adam_steps"] == 1
    mended = run("weights_and_adam_step_at_start")
    assert (mended["largest_change"], mended["adam_steps"]) == (0.0, 0)
    assert "keep_weights_at_start" in mended["applied"]


def test_the_norm_at_stage_0_is_that_of_fp64(run):
    found, mended = run("norm_error", without="take_norms_in_fp64"), run("norm_error")
    assert found["relative_error"] > 5e-6, NO_FAULT
    assert mended["relative_error"] < 1e-7
    assert "take_norms_in_fp64" in mended["applied"]


@pytest.mark.gate
def test_an_offloaded_adam_updates_by_the_number_of_the_step_alone(run):
    wrong = run("offloaded_updates", without="derive_bias_correction_from_step")
    assert wrong["forward"] != wrong["backward"], NO_FAULT
    right = run("offloaded_updates")
    assert right["forward"] == right["backward"] == pytest.approx(wrong["forward"], rel=1e-5)
    assert "derive_bias_correction_from_step" in right["applied"]


@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_stage_0_in_fp16_applies_the_update_that_stage_1_applies(run, clipping):
    stage_1 = run("fp16_update", stage=1, clipping=clipping)
    wrong = run("fp16_update", stage=0, clipping=clipping, without="scale_loss")
    right = run("fp16_update", stage=0, clipping=clipping)
    assert "scale_loss" not in stage_1["applied"]
    assert "scale_loss" in right["applied"]
    assert right["norm"] == pytest.approx(stage_1["norm"], rel=2e-2)
    assert right["update"] == pytest.approx(stage_1["update"], rel=2e-2)
    assert wrong["update"] < 0.1 * right["update"], NO_FAULT


@pytest.mark.parametrize(
    ("stage", "offload", "correction"),
    [
        (0, False, "scale_like_zero"),
        (1, False, "grow_scale_after_the_update"),
        (3, False, "grow_scale_after_the_update"),
        *(pytest.param(stage, True, "grow_scale_after_the_update", marks=pytest.mark.long) for stage in (1, 2, 3)),
        pytest.param(2, False, "grow_scale_after_the_update", marks=pytest.mark.long),
    ],
)
def test_a_growing_loss_scale_does_not_shrink_the_update(run, stage, offload, correction):
    wrong = run("update_while_the_scale_grows", stage=stage, offload=offload, without=correction)
    assert wrong["sizes"][1] == pytest.approx(wrong["sizes"][0] / 2, rel=5e-2), NO_FAULT
    right = run("update_while_the_scale_grows", stage=stage, offload=offload)
    assert right["sizes"][1] == pytest.approx(right["sizes"][0], rel=5e-2)
    assert right["norms"][1] == pytest.approx(right["norms"][0], rel=5e-2) and correction in right["applied"]


def test_the_loss_scale_of_stage_0_follows_the_rule_of_stage_1(run):
    """Hysteresis of 2, growth after two clean steps, and a stop at the minimum."""
    stage_1, stage_0 = run("scales_while_overflowing", stage=1), run("scales_while_overflowing", stage=0)
    assert stage_0 == stage_1
    assert "minimum loss scale of 4" in stage_0["failure"]
    wrong = run("scales_while_overflowing", stage=0, without="scale_like_zero")
    assert wrong["scales"] != stage_1["scales"], NO_FAULT
    assert wrong["failure"] == "", NO_FAULT


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_an_overflow_at_a_fixed_loss_scale_ends_the_run(run, stage):
    """DeepSpeed would skip every step, and the run would end as if it had trained."""
    assert "step 1: the gradients are not finite" in (failure := run("failure_at_a_fixed_scale", stage=stage))
    assert "fixed loss scale of 1.67772e+07 (fp16.loss_scale)" in failure


def test_a_loss_scale_that_starts_at_one_is_applied_too(run):
    wrong = run("update_at_an_initial_scale_of_one", without="scale_loss")
    assert wrong[-1] < 0.2 * wrong[0], NO_FAULT
    right = run("update_at_an_initial_scale_of_one")
    assert right == pytest.approx([right[0]] * 5, rel=1e-2)


@pytest.mark.parametrize(("stage", "offload"), [(3, False), *(pytest.param(stage, True, marks=pytest.mark.long) for stage in (1, 2, 3))])
def test_a_gradient_is_applied_once(run, stage, offload):
    """Without momentum, a block that is left out of a step stays where it is."""
    wrong = run("move_of_a_block_without_gradients", stage=stage, offload=offload, without="forget_gradients")
    assert wrong["moved"] > 1e-4, NO_FAULT
    right = run("move_of_a_block_without_gradients", stage=stage, offload=offload)
    assert right["moved"] == 0.0
    assert "forget_gradients" in right["applied"]
    assert run("probe_on_an_engine_that_forgets", stage=stage, offload=offload) is False


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_offload_the_other_stages_forget_by_themselves(run, stage):
    found = run("move_of_a_block_without_gradients", stage=stage, offload=False)
    assert found["moved"] == 0.0
    assert "forget_gradients" not in found["applied"]


def test_an_engine_whose_faults_are_mended_is_corrected_no_more(run):
    assert run("probes_on_a_mended_engine") == {
        "unfused_optimizer_steps_at_start": False,
        "engine_norm_is_inaccurate": False,
        "unfused_loss_scale_misbehaves": False,
        "loss_is_not_scaled": False,
        "applied": [],
    }


def test_stages_0_and_1_agree_in_bf16(run):
    """Stages 0 and 1 in bf16, each with its correction, see the same first losses."""
    losses = {stage: run("bf16_losses", stage=stage) for stage in (0, 1)}
    assert losses[0][0] == losses[1][0]
    assert max(abs(a - b) for a, b in zip(losses[0], losses[1], strict=True)) < 5e-3
