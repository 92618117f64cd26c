"""The training loop through the engine against a plain PyTorch loop, step by step in turns in one process.

    python benchmarks/training_step.py            # about two minutes on two cores
    python benchmarks/training_step.py --preset nano --profile

Both sides train the same model on the same micro-batches with the same optimizer kernel (torch's fused AdamW) and the same clipping.
One is `launch/pretrain.py`'s own loop with everything in it (loader, logging, metrics), the other `torch.autocast` in bf16, as one
would write it by hand; with --compile its model is compiled by torch.compile. A ratio above 1 says that the engine's loop is faster. The
loader's share of its step is measured beside it, and on a GPU the MFU of both sides and the engine's peak memory against the plan.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.report import Row

PROFILED_STEPS = 5
#: Steps that the engine makes before the plain loop's model is built: its peak memory is that of these.
ALONE = 3
QUICK = ("--preset", "nano", "--steps", "25")


def rows(record: dict[str, Any]) -> list[Row]:
    plain = "compiled PyTorch loop" if record.get("compiled") else "plain PyTorch loop"
    sides = f"{plain} / engine's loop, {record['preset']}, {Path(record['config']).stem}"
    bar = "at least 1.15" if "fused" in sides else ""
    return [Row(sides, f"{record['tokens_per_second_ratio']:.3f}", record["ratio_quartiles"], bar)]


class PlainLoop:
    """A plain PyTorch loop, advanced one step at a time; its model is compiled where `compiled` is true."""

    def __init__(self, config: Any, device: Any, compiled: bool):
        import torch

        from model.gpt import GPT, weight_decay_groups

        self.config, self.torch, self.device = config, torch, device
        self.model = GPT(config.model_config).to(device)
        params = config.optimizer["params"]
        groups = weight_decay_groups(self.model, params["weight_decay"])
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(params["betas"]), eps=params["eps"], fused=True)
        self.loss = torch.compile(self.model) if compiled else self.model

    def step(self, batches: tuple[Any, ...], rate: float) -> float:
        """One optimizer step over `batches` at learning rate `rate`; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for batch in batches:
            with self.torch.autocast(self.device.type, dtype=self.torch.bfloat16):
                loss = self.loss(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.engine["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


def flags(arguments: argparse.Namespace, runs: str) -> list[str]:
    """The flags of `launch/pretrain.py` for the engine's side."""
    values: dict[str, Any] = {
        "deepspeed_config": arguments.deepspeed_config,
        "preset": arguments.preset,
        "data": arguments.data,
        "steps": ALONE + arguments.steps + PROFILED_STEPS,
        "warmup_steps": arguments.steps,  # to the end: at its full height the rate brings spikes, in which two roundings part
        "eval_every": 0,
        "save_every": 0,
        "runs_dir": runs,
        "run_name": "r",
    }
    if arguments.micro_batch_size:
        values |= {"micro_batch_size": arguments.micro_batch_size, "global_batch_size": arguments.micro_batch_size}
    sets = [text for change in arguments.set for text in ("--set", change)]
    return ["--quiet", *(text for name, value in values.items() for text in (f"--{name}", str(value))), *sets]


def interleave(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train both sides in turns, step by step; what a record of it holds."""
    from benchmarks.report import WARM_UP_STEPS, device_name, ratio, show_times, spread

    os.chdir(ROOT)

    import torch

    from data_pipeline.loader import Loader
    from launch import pretrain
    from launch.config.explain import explain
    from launch.config.run_config import resolve
    from launch.formats.metrics import read_metrics
    from launch.training.folder import RunFolder
    from launch.training.provenance import describe_run
    from launch.training.signals import StopRequest
    from model.accounting import flops_per_token, peak_flops
    from recipes import registry
    from recipes.technique import Technique, Techniques

    runs = tempfile.mkdtemp(prefix="benchmark-")
    config, _ = resolve(flags(arguments, runs))
    last_in_turns = ALONE + arguments.steps
    engine_seconds, plain_seconds, loader_seconds, losses = [], [], [], []
    peak_bytes: list[int] = []
    make_batches = Loader.micro_batches

    def timed_batches(self: Loader, *place: int) -> Any:
        batches, spent = make_batches(self, *place), 0.0
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            spent += time.perf_counter() - start
            if batch is None:
                loader_seconds.append(spent)
                return
            yield batch

    class TakesTurns(Technique):
        """Advances the plain loop by a step before each step of the engine's, on the micro-batches of `ALONE` steps before."""

        plain: PlainLoop | None = None

        def attach(self, engine: Any, collectives: Any) -> None:
            self.engine, self.device = engine, collectives.device
            self.batches: tuple[Any, ...] = ()
            #: Micro-batches and learning rate of the engine's steps that the plain loop has not made yet.
            self.made: deque[tuple[tuple[Any, ...], float]] = deque()

        def on_step(self, step: int) -> None:
            ended = time.perf_counter()
            if step > 1:
                self.made.append((self.batches, self.engine.optimizer.param_groups[0]["lr"]))
            if step == ALONE + 1:
                if self.device.type == "cuda":
                    peak_bytes.append(torch.cuda.max_memory_allocated())
                self.plain = PlainLoop(config, self.device, arguments.compile)
            if self.plain is not None and step <= last_in_turns + 1:
                # From the end of the last plain step to here: everything that the engine's loop does.
                engine_seconds.append(ended - self.engine_since)
                start = time.perf_counter()
                losses.append(self.plain.step(*self.made.popleft()))
                plain_seconds.append(time.perf_counter() - start)
            if profiler is not None and step == last_in_turns + 1:
                profiler.start()
            self.batches, self.engine_since = (), time.perf_counter()

        def on_batch(self, tokens: Any) -> Any:
            self.batches += (tokens,)
            return tokens

    profiler = torch.profiler.profile() if arguments.profile else None
    Loader.micro_batches = timed_batches
    make_techniques = registry.make_techniques
    registry.make_techniques = lambda run: Techniques([*make_techniques(run).members, TakesTurns({}, run)])
    folder = RunFolder(Path(runs) / "r", describe_run(config), quiet=True)
    try:
        pretrain.train(config, folder, StopRequest())
        engine_losses = [line["loss"] for line in read_metrics(Path(runs) / "r" / "metrics.jsonl")]
    finally:
        folder.close()
        shutil.rmtree(runs)
    if profiler is not None:
        profiler.stop()

    engine, plain = engine_seconds[WARM_UP_STEPS:], plain_seconds[WARM_UP_STEPS:]
    median, quartiles = ratio(plain, engine)
    show_times("engine loop", engine)
    show_times("plain loop", plain)
    found = {
        "config": arguments.deepspeed_config,
        "set": arguments.set,
        "preset": arguments.preset,
        "micro_batch_size": config.micro_batch_size,
        "compiled": arguments.compile,
        "engine": spread(engine),
        "plain": spread(plain),
        "tokens_per_second": config.tokens_per_step / statistics.median(engine),
        "tokens_per_second_ratio": median,
        "ratio_quartiles": quartiles,
        "loader_share": statistics.median(loader_seconds[WARM_UP_STEPS:]) / statistics.median(engine),
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, engine_losses, strict=False)),
        "engine_profile_ms_per_step": profile_of(profiler) if profiler else {},
    }
    if peak := peak_flops(device_name(), "bf16"):
        floor = config.tokens_per_step * flops_per_token(config.model_config) / peak
        found |= {"mfu": floor / statistics.median(engine), "plain_mfu": floor / statistics.median(plain)}
    if peak_bytes:
        found |= {"peak_bytes": peak_bytes[0], "planned_bytes": explain(config)["memory_per_rank"]["cuda"]["peak"]}
    return found


def profile_of(profiler: Any) -> dict[str, float]:
    """Milliseconds a step of the 16 dearest operations on the device that computes; prints a table of more."""
    operations = profiler.key_averages()
    key = "self_device_time_total" if any(row.self_device_time_total for row in operations) else "self_cpu_time_total"
    print(operations.table(sort_by=key, row_limit=25, max_name_column_width=50))
    dearest = sorted(operations, key=lambda row: -getattr(row, key))[:16]
    return {row.key[:120]: round(getattr(row, key) / 1e3 / PROFILED_STEPS, 3) for row in dearest}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `interleave` reads beside `report.step_parser`'s flags."""
    parser.add_argument("--micro_batch_size", type=int, help="sequences in a micro-batch, of which a step then has one (the preset's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the JSON")
    parser.add_argument("--compile", action="store_true", help="the plain loop's model is compiled by torch.compile")
    parser.add_argument("--profile", action="store_true", help="also print where the engine's steps spend their time (torch.profiler)")


def main() -> int:
    from benchmarks.report import append, device_name, step_parser

    parser = step_parser(__doc__, deepspeed_config="ds_configs/fused_kernels.json")
    add_flags(parser)
    arguments = parser.parse_args()
    found = interleave(arguments)
    lower, upper = found["ratio_quartiles"]
    print(
        f"engine's tokens/s over the plain loop's: {found['tokens_per_second_ratio']:.3f} (quartiles {lower:.3f} to {upper:.3f}); "
        f"{found['tokens_per_second']:,.0f} tokens/s; the loader takes {100 * found['loader_share']:.4f}% of a step; "
        f"losses at most {found['largest_loss_difference']:.4f} apart"
    )
    if not arguments.no_record:
        append("training_step", found, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
