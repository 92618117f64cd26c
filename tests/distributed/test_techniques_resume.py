"""A run with a technique that is resumed from any step is, bit for bit, the uninterrupted one."""

from __future__ import annotations

import pytest

from tests.distributed.parity import FREEZE, TECHNIQUES, cells, technique_flags
from tests.distributed.test_engine_follows_plain_pytorch import data, stages_of  # noqa: F401 (a fixture)
from tests.helpers import resumed_after, rewind

#: Of a line, what does not depend on the machine or the moment.
MEASURED = ("seconds", "tokens_per_second", "mfu", "memory")
#: (technique, form, precision, the step of the checkpoint)
QUICK = [("random_ltd, checkpointed", "stage 1", "fp32", 10), ("zero_one_adam", "stage 0", "bf16", 20)]
AT_THE_GATE = [("one_bit_lamb", "stage 0", "fp32", FREEZE + 7)]
EVERY = [
    # What changes the losses by flags alone.
    *((name, stages_of(name)[-2:][0], "fp32", 20) for name, one in TECHNIQUES.items() if "," not in name and one.flags and one.base),
    *((name, "stage 1", "fp32", 20) for name in ("mixture_of_experts", "muon")),
    *((name, stages_of(name)[-1], "bf16", 15) for name in ("lamb", "muon")),
    *(("one_bit_adam", "stage 0", *at) for at in (("fp32", 7), ("bf16", 10))),
    *(("one_bit_lamb", "stage 0", *at) for at in (("fp32", 10), ("bf16", 17))),
    # Between renewals, after the last, between exchanges and after one.
    *(("zero_one_adam", "stage 0", "fp32", step) for step in (8, 10, 15, 16)),
    ("zero_one_adam", "stage 0", "fp16", 15),
]


@pytest.mark.parametrize(("name", "form", "precision", "step"), cells(EVERY, QUICK, AT_THE_GATE))
def test_a_resume_is_the_uninterrupted_run(name, form, precision, step, data, two_ranks, tmp_path):  # noqa: F811
    run = [*technique_flags(name, data, tmp_path, form, 2, 1, precision), "--save_every", str(step), "--keep", "30"]
    run += ["--eval_every", "12", "--eval_batches", "1"]
    whole = two_ranks.train(run)
    rewind(tmp_path / "r", step)
    resumed = two_ranks.train([*run, "--resume"])
    assert resumed_after(tmp_path / "r") == step
    measured = (*MEASURED, "bytes_sent") if form == "stage 3" else MEASURED  # its first step gathers weights twice
    for key in {key for line in whole for key in line if not any(word in key for word in measured)}:
        assert [line.get(key) for line in resumed] == [line.get(key) for line in whole], key
    assert "grad_norm" in whole[1] and "val_loss" in whole[0]
