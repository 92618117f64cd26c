"""Ranks that share the rows train what one rank trains: losses, the norm of the gradients and the weights, at every stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity import (
    BATCH,
    FORMS,
    MODERN_TOLERANCE,
    TECHNIQUES,
    expected,
    largest_difference,
    losses_of,
    section,
    technique_flags,
)

#: (technique, model, form, ranks of a row, ranks, micro-batches)
QUICK = [
    ("plain", "gpt2", "stage 0", 2, 2, 3),
    ("plain", "qwen3", "stage 3", 2, 2, 1),
    ("no_cross_document, checkpointed", "gpt2", "stage 1", 2, 2, 1),
]
EVERY = [
    (name, model, form, size, ranks, accumulation)
    for name in ("plain", "activation_checkpointing", "no_cross_document", "no_cross_document, checkpointed")
    for model in ("gpt2", "llama", "qwen3")
    for form in list(FORMS)[:4]
    for size, ranks, accumulation in ((2, 2, 3), (2, 4, 1), (4, 4, 1))
]


def in_slices(name: str, data: Any, folder: Any, form: str, size: int, ranks: int, accumulation: int = 1, **more: Any) -> list[str]:
    """The flags of a run whose rows are cut into `size` slices."""
    sharing = [*section("sequence_parallel_size", size), "--micro_batch_size", str(BATCH * size // ranks // accumulation)]
    return technique_flags(name, data, folder, form, ranks, accumulation, **more) + sharing


@pytest.mark.usefixtures("measured_text")
@pytest.mark.parametrize(
    ("name", "model", "form", "size", "ranks", "accumulation"),
    [*QUICK, *(pytest.param(*cell, marks=pytest.mark.long) for cell in EVERY if cell not in QUICK)],
)
def test_losses_and_norms_are_those_of_plain_pytorch(name, model, form, size, ranks, accumulation, request, pools, tmp_path):
    data = request.getfixturevalue("short_documents" if "no_cross_document" in name else "corpus")
    run = in_slices(name, data, tmp_path, form, size, ranks, accumulation, model=model)
    run += section("zero_optimization.stage3_param_persistence_threshold", 1000) if form.startswith("stage 3") else []
    lines = pools.of(ranks).run(f"tests.distributed.jobs:{TECHNIQUES[name].job['job']}", flags=run)[0]
    steps = expected(data, name, model)
    assert largest_difference([line["loss"] for line in lines], losses_of(steps)) <= MODERN_TOLERANCE
    assert lines[0]["grad_norm"] == pytest.approx(steps[0].norm, rel=1e-5)
    assert [line["tokens"] for line in lines] == [BATCH * 32 * line["step"] for line in lines]
    assert any(step.norm > 1.0 for step in steps), "what is clipped must show"
