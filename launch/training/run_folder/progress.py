"""Prints the run's sizes at its start, then a progress bar with a line above it for each evaluation; without a terminal, plain lines."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from launch.config.run_config import RunConfig
from launch.errors import bar_options, is_local_rank_0, print_once
from launch.formats.metrics import MEAN_STEPS, evaluated_losses, recent_loss
from launch.training.engine import TrainingEngine
from launch.training.evaluation import Evaluation
from launch.training.meter import Meter
from launch.training.run_folder.folder import NoFolder, RunFolder
from model.accounting import in_words
from recipes.technique import ranks_in_words

LINE_SECONDS = 10.0  # between two plain lines


def describe_start(config: RunConfig, engine: TrainingEngine, meter: Meter, evaluation: Evaluation) -> Iterator[str]:
    """Yield lines that name the model, the batch, the device, and the DeepSpeed faults that are corrected."""
    shape, arithmetic = config.shape, f"ZeRO {config.zero_stage}, {config.precision}, {ranks_in_words(config.ranks)} on {meter.device_name}"
    yield f"{config.runs_dir}/{config.run_name}: {in_words(config.model_config)}, {arithmetic}"
    step = "step" if config.steps_to_make == config.steps else "full step"
    yield (
        f"{config.micro_batch_size} sequence{'s' * (config.micro_batch_size > 1)} x "
        f"{config.gradient_accumulation_steps} accumulation x {config.ranks_in_words} x "
        f"{shape.seq_len} tokens = {config.tokens_per_step:,} tokens a {step}, {config.steps_to_make:,} steps, "
        f"{config.total_tokens:,} tokens ({config.total_tokens / config.corpus.train.n_tokens:.2f} epochs)"
    )
    if config.eval_every:
        unseen = "text" if config.corpus.eot_id is None else "documents"
        by_source = zip(evaluation.sources, evaluation.windows_by_source(evaluation.windows), strict=False)
        of_sources = "; ".join(f"{len(windows):,} of {name}" for name, windows in by_source)
        what = f"{evaluation.windows:,} sequences of {unseen} that the run is not trained on"
        yield f"validation loss: the mean over {what}{of_sources and f' ({of_sources})'}"
    if config.whole_eval:
        yield f"after the last step, the loss on the whole validation split is evaluated, {evaluation.all_windows:,} sequences"
    if meter.collectives.device.type == "cpu":
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
        yield f"{' or '.join(map(str, dict.fromkeys(meter.threads)))} thread(s) a rank, which may use {cores} core(s) of this host"
    if meter.peak_flops is None:
        yield f"the peak FLOP/s of '{meter.device_name}' in {meter.matmul_dtype} is unknown: the metrics have no mfu"
    if engine.corrections:
        yield f"corrected faults of this DeepSpeed: {', '.join(engine.corrections)} (launch/training/deepspeed_fixes/)"
    for note in (*config.notes, *engine.notes):
        yield f"note: {note}"


class Progress:
    """Prints the mean loss of the last steps, tokens/s and the remaining time. `metrics.jsonl` has every step."""

    def __init__(self, config: RunConfig, state: dict[str, Any], folder: RunFolder | NoFolder):
        self.config, self.folder = config, folder
        self._first_tokens, self._start, self._last_line = state["tokens"], time.monotonic(), 0.0
        self._losses: deque[float] = deque(maxlen=MEAN_STEPS)
        self._bar = None
        if is_local_rank_0() and not config.quiet and (width := bar_options()):
            form = {"bar_format": "{l_bar}{bar}| {remaining} left, {rate_fmt}{postfix}", "unit": "tok", "unit_scale": True, **width}
            self._bar = tqdm(total=config.total_tokens, initial=state["tokens"], desc=config.run_name, **form)
            folder.print = lambda line: tqdm.write(line)

    def __enter__(self) -> Progress:
        return self

    def update(self, line: dict[str, Any]) -> None:
        """Print the step that `line` describes, if it is time."""
        self._losses.append(line["loss"])
        loss = f"loss {recent_loss(self._losses)}"
        evaluated = f", {losses}" if (losses := evaluated_losses(line)) else ""
        if self._bar is not None:
            self._bar.update(line["tokens"] - self._bar.n)
            measured = "".join(f", {one}" for one in _measured(line))
            self._bar.set_postfix_str(f"step {line['step']}, {loss.partition(' (')[0]}{measured}", refresh=False)
        if line.get("overflow"):
            self.folder.log(
                f"step {line['step']}: overflow in fp16 at loss scale {line['loss_scale']:,.10g}, the update is skipped",
                silent=self._bar is not None,
            )
        now = time.monotonic()
        done = line["tokens"] >= self.config.total_tokens
        if evaluated or done or now - self._last_line > LINE_SECONDS:
            self._last_line = now
            left = (now - self._start) * max(0, self.config.total_tokens - line["tokens"]) / max(1, line["tokens"] - self._first_tokens)
            text = (
                f"step {line['step']:>5}/{self.config.steps_to_make}  {loss}{evaluated}  lr {line['lr']:.2e}  "
                + (f"scale {line['loss_scale']:,.10g}, {line['skipped_steps']} skipped  " if "overflow" in line else "")
                + "".join(f"{one}  " for one in _measured(line))
                + f"{line['tokens_per_second']:,.0f} tok/s  {tqdm.format_interval(left)} left"
            )
            self.folder.log(text, silent=self._bar is not None and not evaluated)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self.folder.print = print_once


def _measured(line: dict[str, Any]) -> Iterator[str]:
    """The gradient norm, the MFU if it is known, and the peak memory of rank 0."""
    yield "norm not finite" if line["grad_norm"] is None else f"norm {line['grad_norm']:.3g}"
    if "mfu" in line:
        yield f"mfu {line['mfu']:.1%}"
    yield f"{line['peak_memory_bytes'] / 2**30:.2f} GiB"
