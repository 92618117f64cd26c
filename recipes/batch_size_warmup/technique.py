"""Batch-size warm-up: training begins with small global batches, which grow in equal stages of tokens to the full one.

    deepspeed launch/pretrain.py --recipe recipes/batch_size_warmup

Brown et al., Language Models are Few-Shot Learners, arXiv 2005.14165, appendix B: from 32 k tokens to the full batch over the first 4 to
12 billion tokens. Megatron-LM has it as --rampup-batch-size (start, increment, samples).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from recipes.technique import Declaration, RunForTechniques, StepWork, Technique, largest_divisor, without_auto


def stages(start: int, increment: int, full: int, warmup_tokens: int, seq_len: int) -> list[tuple[int, int]]:
    """(first step, sequences of its steps) of each stage, the last of them the full batch.

    Each of the (full - start) / increment sizes below `full` has an equal share of `warmup_tokens`, and a step belongs to the stage in
    which it begins. A stage without a step is left out: the last step of the stage before it has consumed its tokens.
    """
    sizes = (full - start) // increment  # below the full one
    found, step, tokens, stage = [], 1, 0, 0
    while stage < sizes:
        size = start + stage * increment
        found.append((step, size))
        end = -(-(stage + 1) * warmup_tokens // sizes)  # rounded up: tokens are whole
        steps = -(-(end - tokens) // (size * seq_len))
        step, tokens = step + steps, tokens + steps * size * seq_len
        stage = tokens * sizes // warmup_tokens
    return [*found, (step, full)]


class BatchSizeWarmup(Technique):
    """`"batch_size_warmup": {"enabled": true, "min_batch_size": "auto", "increment": "auto", "warmup_tokens": "auto"}`.

    min_batch_size: sequences per step at the start, over all ranks; "auto" is a divisor of the global batch, at most a quarter of it, or
        a sequence per rank if that is more.
    increment: sequences added at each stage; "auto" is the largest number up to min_batch_size that reaches the global batch exactly.
    warmup_tokens: after how many tokens the batch is full; "auto" is a quarter of the run's. Sequences count at the model's full length.

    The length of the run and the learning rate are functions of tokens, so the run has more steps than its control.
    """

    declaration = Declaration(
        section="batch_size_warmup",
        keys={key: {"types": ["integer"], "minimum": 1, "auto": "reported"} for key in ("min_batch_size", "increment", "warmup_tokens")},
        exclusive=("the number of sequences per step",),
        changes_tokens=True,
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.ranks, self.micro_batch_size = run.data_ranks, run.micro_batch_size
        start, increment, warmup_tokens = self._resolved(section, run)
        found = stages(start, increment, run.global_batch_size, warmup_tokens, run.shape.seq_len)
        self.stages, self._sizes = zip(*found, strict=True)
        if len(found) > 1:
            last = f"all {found[-1][1]:,} from step {found[-1][0]:,} on"
            grows = f"{start:,} sequences per step at first, growing by {increment:,}, {last}"
        else:
            grows = f"the global batch of {run.global_batch_size} sequences is that of the first step already, and does not grow"
        self.notes = (f"batch_size_warmup: {grows}",)

    def _resolved(self, section: dict[str, Any], run: RunForTechniques) -> tuple[int, int, int]:
        """The three values. Raises ValueError, see `Technique.__init__`."""
        given, full, ranks = without_auto(section), run.global_batch_size, run.data_ranks

        def check(key: str, wrong: bool, reason: str) -> None:
            if key in given and wrong:
                raise ValueError(f"'batch_size_warmup.{key}' is {given[key]}, {reason}")

        for key in ("min_batch_size", "increment"):
            size = given.get(key, ranks)
            check(key, size % ranks > 0, f"which {run.ranks_in_words} cannot share evenly; write a multiple of {ranks}")
            check(key, size > full, f"above the global batch of {full}; lower it, or raise --global_batch_size")
        increment = given.get("increment", 0)
        quarter = full // 4
        if "min_batch_size" in given:
            start = given["min_batch_size"]
        elif increment:  # the largest up to a quarter from which increments lead to the full batch, or else the smallest
            start = quarter - (quarter - full) % increment
            start += increment if start <= 0 else 0
        else:
            start = ranks * largest_divisor(full // ranks, max(1, quarter // ranks))
        increment = increment or ranks * largest_divisor((full - start) // ranks, start // ranks)
        left = (full - start) % increment
        check("increment", left > 0, f"which does not divide the {full - start} sequences from {start} to {full}; write a divisor of them")
        warmup_tokens = given.get("warmup_tokens", max(1, run.total_tokens // 4))
        check("warmup_tokens", warmup_tokens > run.total_tokens, f"but the run has {run.total_tokens}; lower it, or raise --steps")
        return start, increment, warmup_tokens

    def batch_size_at(self, step: int) -> int:
        """Sequences of all ranks in optimizer step `step` (from 1)."""
        return int(self._sizes[bisect_right(self.stages, step) - 1])

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.batch_size = self.batch_size_at(step)
        sequences = self.batch_size // self.ranks
        micro_batch_size = largest_divisor(sequences, self.micro_batch_size)
        return work._replace(micro_batch_size=micro_batch_size, accumulation=sequences // micro_batch_size)

    def metrics(self) -> dict[str, float]:
        return {"batch_size": self.batch_size}
