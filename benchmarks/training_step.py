"""The training loop through DeepSpeed's engine against a plain PyTorch loop, interleaved step by step in one process.

    python benchmarks/training_step.py            # about two minutes on two cores
    python benchmarks/training_step.py --preset nano --profile

Both sides train the same model on the same micro-batches with the same optimizer kernel (torch's fused AdamW) and the same clipping.
One side is the whole loop of `launch/pretrain.py`, with its loader, logging and metrics. The other is a loop with `torch.autocast` in
bf16; --compile compiles its model. A ratio above 1 means that the engine's loop is faster. On a GPU, the MFU of both sides and the engine's
peak memory against the plan are recorded too.

The default JSON, ds_configs/fused_kernels.json, has the fused kernels, so the ratio includes what they save. To compare the loops alone:

    python benchmarks/training_step.py --deepspeed_config ds_configs/zero0_bf16.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from benchmarks.report import WARM_UP_STEPS
from launch.config.explain import explain
from launch.config.flags import whole_number
from launch.training.observers import Observer
from model.accounting import flops_per_token, peak_flops

PROFILED_STEPS = 5
#: Steps before the plain loop's model is built: the engine's peak memory is measured in them.
ENGINE_ONLY_STEPS = 3
#: Learning rate from the first step on. At this one the losses differ by 0.005: higher ones amplify the two roundings of bf16, to 0.1 nats
#: at 2e-4 and 0.6 at the presets' rates; lower ones, as in a warm-up, are below the spacing of the engine's bf16 weights.
RATE = 1e-4
QUICK = ("--preset", "nano", "--steps", "25")


class PlainLoop:
    """A plain PyTorch loop that is advanced one step at a time; `compiled`: with torch.compile."""

    def __init__(self, config: Any, device: Any, compiled: bool):
        import torch

        from model.gpt import GPT, weight_decay_groups

        self.config, self.torch, self.device = config, torch, device
        self.model = GPT(config.model_config).to(device)
        params = config.optimizer["params"]
        groups = weight_decay_groups(self.model, params["weight_decay"])
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(params["betas"]), eps=params["eps"], fused=True)
        self.loss = torch.compile(self.model) if compiled else self.model

    def step(self, batches: list[Any], rate: float) -> float:
        """One optimizer step over `batches` at learning rate `rate`; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for batch in batches:
            with self.torch.autocast(self.device.type, dtype=self.torch.bfloat16):
                loss = self.loss(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.ds_config["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


class Interleaved(Observer):
    """Trains a plain loop for one step before each step of the engine's, on the micro-batches of `ENGINE_ONLY_STEPS` steps before."""

    def __init__(self, arguments: argparse.Namespace):
        import torch

        self.compiled, self.last = arguments.compile, ENGINE_ONLY_STEPS + arguments.steps
        self.engine_seconds: list[float] = []
        self.plain_seconds: list[float] = []
        self.losses: list[float] = []
        #: Micro-batches and learning rates of the engine's steps that the plain loop has not trained yet.
        self.made: deque[tuple[list[Any], float]] = deque()
        self.batches: list[Any] = []
        self.since = 0.0
        self.profiler = torch.profiler.profile() if arguments.profile else None
        self.peak_bytes = 0

    def start(self, engine: Any) -> None:
        self.config, self.engine, self.device = engine.config, engine.ds_engine, engine.collectives.device

    def on_step(self, step: int) -> None:
        ended = time.perf_counter()
        if step > 1:
            self.made.append((self.batches, self.engine.optimizer.param_groups[0]["lr"]))
        if step == ENGINE_ONLY_STEPS + 1:
            if self.device.type == "cuda":
                import torch

                self.peak_bytes = torch.cuda.max_memory_allocated()
            self.plain = PlainLoop(self.config, self.device, self.compiled)
        if ENGINE_ONLY_STEPS < step <= self.last:
            self.engine_seconds.append(ended - self.since)  # all that the engine's loop does between two steps of the plain loop
            start = time.perf_counter()
            self.losses.append(self.plain.step(*self.made.popleft()))
            self.plain_seconds.append(time.perf_counter() - start)
        if self.profiler and step == self.last + 1:
            self.profiler.start()
        self.batches, self.since = [], time.perf_counter()

    def after_step(self, step: int) -> None:
        if self.profiler and step == self.last + PROFILED_STEPS:  # before the last checkpoint
            self.profiler.stop()

    def on_batch(self, tokens: Any) -> None:
        self.batches.append(tokens)


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train both sides; one record."""
    more = {"steps": ENGINE_ONLY_STEPS + arguments.steps + PROFILED_STEPS, "warmup_steps": 0, "lr": RATE}
    if arguments.micro_batch_size:
        more |= {"micro_batch_size": arguments.micro_batch_size, "global_batch_size": arguments.micro_batch_size}
    flags = [*report.run_flags(arguments, **more), *(text for change in arguments.set for text in ("--set", change))]
    both = Interleaved(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        lines = report.train(flags, folder, both)
    config, engine, plain = both.config, both.engine_seconds[WARM_UP_STEPS:], both.plain_seconds[WARM_UP_STEPS:]
    median, quartiles = report.ratio(plain, engine)
    seconds = statistics.median(engine)
    found = {
        "config": arguments.deepspeed_config,
        "set": arguments.set,
        "preset": arguments.preset,
        "architecture": arguments.architecture,
        "micro_batch_size": config.micro_batch_size,
        "compiled": arguments.compile,
        "engine": report.spread(engine),
        "plain": report.spread(plain),
        "tokens_per_second": config.tokens_per_step / seconds,
        "tokens_per_second_ratio": median,
        "ratio_quartiles": quartiles,
        "largest_loss_difference": max(abs(loss - line["loss"]) for loss, line in zip(both.losses, lines, strict=False)),
        "engine_profile_ms_per_step": profile_of(both.profiler) if both.profiler else {},
    }
    if peak := peak_flops(report.device_name(), "bf16"):
        least = config.tokens_per_step * flops_per_token(config.model_config) / peak
        found |= {"mfu": least / seconds, "plain_mfu": least / statistics.median(plain)}
    if both.peak_bytes:
        found |= {"peak_bytes": both.peak_bytes, "planned_bytes": explain(config)["memory_per_rank"]["cuda"]["peak"]}
    # The numbers of bf16 are up to 2^-7 apart, so a rounding is up to 2^-8 of a value; the first loss is the largest: 2^-8 x 9.1 = 0.036.
    differ = f"losses differ by at most {found['largest_loss_difference']:.4f} (up to {2**-8 * both.losses[0]:.4f} is rounding)"
    print(f"{1e3 * seconds:.1f} ms per step; {differ}")
    what = f"{'compiled' if arguments.compile else 'plain'} PyTorch loop / engine's loop, {report.model_name(arguments)}"
    name = ", ".join([Path(arguments.deepspeed_config).stem, *arguments.set])
    yield [report.ratio_row(f"{what}, {name}", plain, engine, "at least 1.15" if "fused" in name else "")], found


def profile_of(profiler: Any) -> dict[str, float]:
    """Milliseconds a step of the 16 longest entries; prints a table of more.

    Entries are operations and, on a GPU, also their kernels, so the times of an operation and of its kernels overlap.
    """
    operations = profiler.key_averages()
    key = "self_device_time_total" if any(row.self_device_time_total for row in operations) else "self_cpu_time_total"
    print(operations.table(sort_by=key, row_limit=25, max_name_column_width=50))
    found: dict[str, float] = defaultdict(float)
    for row in sorted(operations, key=lambda row: -getattr(row, key))[:16]:
        found[row.key[:120]] += getattr(row, key) / 1e3 / PROFILED_STEPS  # kernels may differ only in the end of their names
    return {name: round(milliseconds, 3) for name, milliseconds in found.items()}


def main() -> None:
    parser = report.run_parser(__doc__, deepspeed_config="ds_configs/fused_kernels.json", steps=60)
    parser.add_argument(
        "--micro_batch_size", type=whole_number(1), help="sequences of a micro-batch, one micro-batch per step (the preset's)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the JSON")
    parser.add_argument("--compile", action="store_true", help="compile the plain loop's model with torch.compile")
    parser.add_argument("--profile", action="store_true", help="also print where the engine's steps spend their time (torch.profiler)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
