"""The training loop against the Hugging Face Trainer, both at ZeRO stage 2 in bf16: the same model, tokens and optimizer, interleaved.

    python benchmarks/trainer.py                          # preset micro; about three minutes on two cores
    python benchmarks/trainer.py --preset nano --steps 40

Both sides start from the same weights and read the same windows of the corpus in the same order, in micro-batches of the same size, with
torch's fused AdamW in the same two groups, the same schedule and clipping. One side is `launch/pretrain.py` with the given JSON at ZeRO
stage 2. The other is GPT2LMHeadModel in transformers' Trainer (no evaluation, checkpoints, reports or loader processes, rare logging) with
the same ZeRO section. Each side is a process; their steps are interleaved, 10 by 10. A step is everything from the start of one to the
start of the next. A ratio above 1 means that our loop is faster.
Needs accelerate: pip install -e ".[bench]" -c constraints.txt
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from benchmarks.report import WARM_UP_STEPS
from launch.config.flags import whole_number
from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.ranks.interleaving import Interleaving

QUICK = ("--preset", "nano", "--steps", "20")


def train_with_trainer(flags: list[str], folder: str) -> None:
    """Train the run of `flags` through transformers' Trainer, interleaved with our side; writes `folder`/trainer.json."""
    import numpy as np
    import torch

    from launch.config.hardware import quiet_deepspeed
    from launch.training.ranks.distributed import start_ranks

    config, _ = resolve(flags)
    collectives = start_ranks()  # as on our side: threads, no unused extension
    quiet_deepspeed()
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from model.gpt import GPT
    from model.hf import hf_config, to_hf_state_dict

    on_gpu = collectives.device.type != "cpu"
    loader, length = config.training_loader(collectives), config.shape.seq_len
    seconds: list[float] = []
    own = Interleaving(on_lost=lambda: os._exit(1))

    class Interleaved(TrainerCallback):
        since = 0.0

        def end_step(self) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            if self.since:
                seconds.append(time.perf_counter() - self.since)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.end_step()
            own.wait()
            self.since = time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.end_step()

    # The windows that our loader reads, in its order; the model shifts the labels itself.
    assert loader.sampler is not None  # only validation loaders have none
    order = loader.sampler.indices(0, config.steps * config.global_batch_size)
    windows = torch.from_numpy(loader.split.read(order, length)[:, :length].astype(np.int64))
    # The vocabulary is padded as ours, so that both multiply the same matrices.
    shape = replace(config.model_config, vocab_size=config.model_config.padded_vocab_size)
    model = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(shape)))
    model.load_state_dict(to_hf_state_dict(GPT(config.model_config).state_dict(), shape))
    model.config.use_cache = False
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    engine = dict.fromkeys(auto, "auto") | {"bf16": {"enabled": "auto"}, "zero_optimization": config.ds_config["zero_optimization"]}
    params = config.optimizer["params"]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            deepspeed=engine,
            bf16=True,
            use_cpu=not on_gpu,
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            max_steps=config.steps,
            optim="adamw_torch_fused",
            learning_rate=config.lr,
            weight_decay=params["weight_decay"],
            adam_beta1=params["betas"][0],
            adam_beta2=params["betas"][1],
            adam_epsilon=params["eps"],
            max_grad_norm=config.ds_config["gradient_clipping"],
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": config.scheduler["params"]["min_lr"] / config.lr},
            warmup_steps=config.warmup_steps,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=on_gpu,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=config.seed,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in windows],
        callbacks=[Interleaved()],
    )
    loss = trainer.train().training_loss
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(folder, "trainer.json").write_text(json.dumps({"seconds": seconds, "peak_memory_bytes": peak, "loss": loss}))
    os._exit(0)  # an interpreter with two process groups may abort while it shuts down


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train both sides; one record."""
    if arguments.architecture != "gpt2":
        raise UsageError(f"--architecture {arguments.architecture}: must be gpt2, which is the model of the Trainer's side; leave it out")
    batches = {"micro_batch_size": arguments.micro_batch_size, "global_batch_size": arguments.global_batch_size}
    flags = report.run_flags(arguments, set="zero_optimization.stage=2", **batches)
    if arguments.side:
        train_with_trainer(flags, arguments.side)
    resolve(flags)  # a mistake is reported once, here
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError('the Trainer needs accelerate; install it: pip install -e ".[bench]" -c constraints.txt')
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        scripts = [["launch/pretrain.py", *flags, "--runs_dir", folder, "--run_name", "r"], [__file__, "--side", folder, *sys.argv[1:]]]
        report.train_interleaved(scripts, folder)
        lines = report.step_lines(Path(folder, "r"))
        trainer = json.loads(Path(folder, "trainer.json").read_text())
    # `seconds` does not include the other side's turns.
    ours = [line["seconds"] - before["seconds"] for before, line in itertools.pairwise(lines)][WARM_UP_STEPS - 1 :]
    theirs = trainer["seconds"][WARM_UP_STEPS:]
    print(f"mean loss: ours {statistics.mean(line['loss'] for line in lines):.4f}, the Trainer's {trainer['loss']:.4f}")
    name = Path(arguments.deepspeed_config).stem
    what = f"Hugging Face Trainer / {name}, both at ZeRO stage 2, {arguments.preset}"
    peaks = lines[-1]["peak_memory_bytes"], trainer["peak_memory_bytes"]
    rows = [
        report.ratio_row(f"step time of {what}", theirs, ours, "at least 1.5" if "fused" in name else ""),
        report.Row(f"peak memory of {what}", f"{peaks[1] / peaks[0]:.2f}"),
    ]
    details: dict[str, Any] = {"config": arguments.deepspeed_config, "preset": arguments.preset}
    for side, seconds, peak in zip(("ours", "trainer"), (ours, theirs), peaks, strict=True):
        details[side] = {"step": report.spread(seconds), "mean_ms": 1e3 * statistics.mean(seconds), "peak_memory_bytes": peak}
    yield rows, details


def main() -> None:
    parser = report.run_parser(__doc__, deepspeed_config="ds_configs/fused_kernels.json", steps=60)
    parser.add_argument("--micro_batch_size", type=whole_number(1), help="sequences of a micro-batch (the preset's)")
    parser.add_argument("--global_batch_size", type=whole_number(1), help="sequences per step (the preset's)")
    parser.add_argument("--side", metavar="FOLDER", help=argparse.SUPPRESS)  # train with the Trainer, in a process of its own
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
