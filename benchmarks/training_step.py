"""The training loop through the engine against a plain PyTorch loop, step by step in turns in one process.

    python benchmarks/training_step.py            # about two minutes on two cores
    python benchmarks/training_step.py --preset nano --profile

Both sides train the same model on the same micro-batches with the same optimizer kernel (torch's fused AdamW) and the same clipping.
One is `launch/pretrain.py`'s own loop with everything in it (loader, logging, metrics), the other `torch.autocast` in bf16, as one
would write it by hand. A ratio above 1 says that the engine's loop is faster. The loader's share of its step is measured beside it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.report import Row

PROFILED_STEPS = 5
QUICK = ("--preset", "nano", "--steps", "25")


def rows(record: dict[str, Any]) -> list[Row]:
    sides = f"plain PyTorch loop / engine's loop, {record['preset']}, {Path(record['config']).stem}"
    bar = "at least 1.15" if "fused" in sides else ""
    return [Row(sides, f"{record['tokens_per_second_ratio']:.3f}", record["ratio_quartiles"], bar)]


class PlainLoop:
    """A plain PyTorch loop, advanced one step at a time."""

    def __init__(self, config: Any, device: Any):
        import torch

        from model.gpt import GPT, weight_decay_groups

        self.config, self.torch, self.device = config, torch, device
        self.model = GPT(config.model_config).to(device)
        params = config.optimizer["params"]
        groups = weight_decay_groups(self.model, params["weight_decay"])
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(params["betas"]), eps=params["eps"], fused=True)

    def step(self, batches: tuple[Any, ...], rate: float) -> float:
        """One optimizer step over `batches` at learning rate `rate`; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for batch in batches:
            with self.torch.autocast(self.device.type, dtype=self.torch.bfloat16):
                loss = self.model(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.detach()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.engine["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


def main() -> int:
    from benchmarks.report import WARM_UP_STEPS, append, device_name, ratio, show_times, spread, step_parser

    parser = step_parser(__doc__)
    parser.set_defaults(deepspeed_config="ds_configs/fused_kernels.json")
    parser.add_argument("--profile", action="store_true", help="also print where the engine's steps spend their time (torch.profiler)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    import torch

    from data_pipeline.loader import Loader
    from launch import pretrain
    from launch.run.config import resolve
    from launch.run.folder import RunFolder
    from launch.run.metrics import read_metrics
    from launch.run.provenance import describe_run
    from launch.run.signals import StopRequest
    from recipes import registry
    from recipes.technique import Technique, Techniques

    runs = tempfile.mkdtemp(prefix="benchmark-")
    config, _ = resolve(
        [
            "--deepspeed_config",
            arguments.deepspeed_config,
            "--preset",
            arguments.preset,
            "--data",
            arguments.data,
            "--quiet",
            "--steps",
            str(arguments.steps + PROFILED_STEPS),
            "--warmup_steps",  # to the end: at its full height the rate brings spikes, in which two roundings part
            str(arguments.steps),
            "--eval_every",
            "0",
            "--save_every",
            "0",
            "--runs_dir",
            runs,
            "--run_name",
            "r",
        ]
    )
    engine_seconds, plain_seconds, loader_seconds, losses = [], [], [], []
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
        """Advances the plain loop by a step before each step of the engine's, on the micro-batches of the step before."""

        batches: tuple[Any, ...] = ()
        engine_since: float | None = None

        def attach(self, engine: Any, collectives: Any) -> None:
            self.engine, self.plain = engine, PlainLoop(config, collectives.device)

        def on_step(self, step: int) -> None:
            if self.engine_since is not None and step <= arguments.steps + 1:
                # From the end of the last plain step to here: everything that the engine's loop does.
                engine_seconds.append(time.perf_counter() - self.engine_since)
                start = time.perf_counter()
                losses.append(self.plain.step(self.batches, self.engine.optimizer.param_groups[0]["lr"]))
                plain_seconds.append(time.perf_counter() - start)
            if profiler is not None and step == arguments.steps + 1:
                profiler.start()
            self.batches, self.engine_since = (), time.perf_counter()

        def on_batch(self, tokens: Any) -> Any:
            self.batches += (tokens,)
            return tokens

    profile = {}
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
        operations = profiler.key_averages()
        print(operations.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
        largest = sorted(operations, key=lambda row: -row.self_cpu_time_total)[:16]
        profile = {row.key: round(row.self_cpu_time_total / 1e3 / PROFILED_STEPS, 2) for row in largest}

    engine, plain = engine_seconds[WARM_UP_STEPS:], plain_seconds[WARM_UP_STEPS:]
    apart = max(abs(a - b) for a, b in zip(losses, engine_losses, strict=False))
    median, quartiles = ratio(plain, engine)
    share = statistics.median(loader_seconds[WARM_UP_STEPS:]) / statistics.median(engine)
    rate = config.tokens_per_step / statistics.median(engine)
    show_times("engine loop", engine)
    show_times("plain loop", plain)
    print(
        f"engine's tokens/s over the plain loop's: {median:.3f} (quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f}); "
        f"{rate:,.0f} tokens/s; the loader takes {100 * share:.4f}% of a step; losses at most {apart:.4f} apart"
    )
    if not arguments.no_record:
        results = {
            "config": arguments.deepspeed_config,
            "preset": arguments.preset,
            "engine": spread(engine),
            "plain": spread(plain),
            "tokens_per_second_ratio": median,
            "ratio_quartiles": quartiles,
            "loader_share": share,
            "largest_loss_difference": apart,
            "engine_profile_ms_per_step": profile,
        }
        append("training_step", results, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
