"""The training loop against the Hugging Face Trainer with DeepSpeed at ZeRO stage 2, bf16: the same model, tokens and optimizer, in turns.

    python benchmarks/trainer.py                          # preset micro; about three minutes on two cores
    python benchmarks/trainer.py --preset nano --steps 40 --segment 10

Both start from the same weights and read the same windows of the corpus in the same order, in micro-batches of the same size, with torch's
fused AdamW in the same two groups, the same schedule and clipping. One is `launch/pretrain.py`'s own loop with the given JSON; the other is
GPT2LMHeadModel in transformers' Trainer (evaluation, checkpoints and reports off, logging rare, no loader processes, DeepSpeed's stage 2 as
ds_configs/zero2_bf16.json has it). Each is a process of its own; one waits while the other makes a segment of steps, and which goes first
alternates. A step is everything from the begin of one to the begin of the next. A ratio above 1 says that our loop is faster.
Needs accelerate: pip install -e ".[bench]" -c constraints.txt
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--preset", "nano", "--steps", "20", "--segment", "5")
PEER_JSON = "ds_configs/zero2_bf16.json"


def rows(record: dict[str, Any]) -> list[Row]:
    sides = f"Hugging Face Trainer, DeepSpeed stage 2 / {Path(record['config']).stem}, {record['preset']}"
    memory = record["trainer"]["peak_memory_bytes"] / record["ours"]["peak_memory_bytes"]
    step = Row(f"step time of {sides}", f"{record['ratio']:.3f}", record["ratio_quartiles"], "at least 1.5" if "fused" in sides else "")
    return [step, Row(f"peak memory of {sides}", f"{memory:.2f}")]


class Turns:
    """The side's end of the wire: at the begin of each step it notes the time, and between segments it waits for the other side."""

    def __init__(self, segment: int):
        self.segment, self.step, self.seconds, self.since = segment, 0, [], 0.0
        self.wire = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not for the wire

    def at_step_begin(self) -> None:
        """Before each step, and once after the last."""
        _synchronize()
        if self.step:
            self.seconds.append(time.perf_counter() - self.since)
        if self.step % self.segment == 0:
            self.say({"seconds": self.seconds[-self.segment :]})
            if not sys.stdin.readline():
                os._exit(1)  # nobody is there any more
        self.step += 1
        self.since = time.perf_counter()

    def say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self.wire, flush=True)


def train_ours(arguments: argparse.Namespace, folder: str) -> float:
    """The steps through `launch/pretrain.py`'s loop; returns their mean loss."""
    from launch import pretrain
    from launch.formats.metrics import read_metrics
    from launch.training.folder import RunFolder
    from launch.training.provenance import describe_run
    from launch.training.signals import StopRequest
    from recipes import registry
    from recipes.technique import Technique, Techniques

    turns = Turns(arguments.segment)

    class TakesTurns(Technique):
        def on_step(self, step: int) -> None:
            turns.at_step_begin()

    config = resolved(arguments, arguments.deepspeed_config, "--runs_dir", folder, "--run_name", "r")
    make_techniques = registry.make_techniques
    registry.make_techniques = lambda run: Techniques([*make_techniques(run).members, TakesTurns({}, run)])
    run_folder = RunFolder(Path(folder) / "r", describe_run(config), quiet=True)
    try:
        pretrain.train(config, run_folder, StopRequest())
        lines = read_metrics(Path(folder) / "r" / "metrics.jsonl")
    finally:
        run_folder.close()
    turns.say({"peak_memory_bytes": lines[-1]["peak_memory_bytes"]})
    return statistics.mean(line["loss"] for line in lines)


def train_with_trainer(arguments: argparse.Namespace, folder: str) -> float:
    """The same steps through transformers' Trainer; returns their mean loss, which it logs."""
    import numpy as np
    import torch

    from launch.config.hardware import quiet_deepspeed
    from launch.training.distributed import start_ranks

    config = resolved(arguments, PEER_JSON)
    collectives = start_ranks()  # as ours: threads, no extension that nobody uses
    quiet_deepspeed()
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from model.gpt import GPT
    from model.hf import hf_config, to_hf_state_dict

    turns = Turns(arguments.segment)
    loader, length = config.training_loader(collectives), config.shape.seq_len
    losses: list[float] = []

    class Windows(torch.utils.data.Dataset):
        """The windows that our loader reads, in its order; the model shifts the labels itself."""

        def __len__(self) -> int:
            return config.steps * config.global_batch_size

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = loader.split.read(loader.sampler.indices(index, 1), length)[0, :length]
            ids = torch.from_numpy(tokens.astype(np.int64))
            return {"input_ids": ids, "labels": ids}

    class TakesTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.at_step_begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            losses.extend([logs["loss"]] if logs and "loss" in logs else [])

    # The vocabulary padded as ours, so that both multiply the same matrices.
    shape = replace(config.model_config, vocab_size=config.model_config.padded_vocab_size)
    model = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(shape)))
    model.load_state_dict(to_hf_state_dict(GPT(config.model_config).state_dict(), shape))
    model.config.use_cache = False
    engine = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": config.engine["zero_optimization"],
    }
    params = config.optimizer["params"]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            deepspeed=engine,
            bf16=True,
            use_cpu=collectives.device.type == "cpu",
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            max_steps=config.steps,
            optim="adamw_torch_fused",
            learning_rate=config.lr,
            weight_decay=params["weight_decay"],
            adam_beta1=params["betas"][0],
            adam_beta2=params["betas"][1],
            adam_epsilon=params["eps"],
            max_grad_norm=config.engine["gradient_clipping"],
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": config.min_lr / config.lr},
            warmup_steps=config.warmup_steps,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=collectives.device.type != "cpu",
            logging_steps=config.steps,  # once, at the end of the last step, which is not timed
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=config.seed,
        ),
        train_dataset=Windows(),
        callbacks=[TakesTurns()],
    )
    trainer.train()
    turns.say({"peak_memory_bytes": _peak_memory()})
    return losses[0]


def resolved(arguments: argparse.Namespace, file: str, *flags: str) -> Any:
    """The run of one side: a step more than is timed, whose begin ends the last one."""
    from launch.config.run_config import resolve

    run = ["--deepspeed_config", file, "--preset", arguments.preset, "--data", arguments.data, "--quiet", *flags]
    for key in ("micro_batch_size", "global_batch_size"):
        run += [f"--{key}", str(getattr(arguments, key))] if getattr(arguments, key) else []
    return resolve([*run, "--steps", str(arguments.steps + 1), "--eval_every", "0", "--save_every", "0"])[0]


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory() -> int:
    """As launch/training/meter.py has it: the allocator's on a GPU, the process's on a CPU."""
    import resource

    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Side:
    """A process that trains one side, and what it has said."""

    def __init__(self, name: str):
        self.name, self.seconds, self.last = name, [], {}
        command = [sys.executable, __file__, "--side", name, *sys.argv[1:]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.listen()

    def listen(self) -> None:
        """Wait for the end of its segment."""
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended with exit code {self.process.wait()}")
        said = json.loads(line)
        self.seconds += said.get("seconds", [])
        self.last |= said

    def go_on(self) -> None:
        """Let it make its next segment."""
        print(file=self.process.stdin, flush=True)
        self.listen()


def main() -> int:
    parser = report.step_parser(__doc__)
    parser.set_defaults(deepspeed_config="ds_configs/fused_kernels.json")
    parser.add_argument("--segment", type=int, default=10, help="steps that one side makes while the other waits; divides --steps (10)")
    parser.add_argument("--micro_batch_size", type=int, help="sequences taken at once (the preset's)")
    parser.add_argument("--global_batch_size", type=int, help="sequences of a step (the preset's)")
    parser.add_argument("--side", choices=("ours", "trainer"), help=argparse.SUPPRESS)  # what this process is to train
    arguments = parser.parse_args()
    if arguments.steps % arguments.segment or arguments.steps <= report.WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps} must be above {report.WARM_UP_STEPS}, and --segment {arguments.segment} must divide it")
    os.chdir(ROOT)
    if importlib.util.find_spec("accelerate") is None:
        print('error: the Trainer needs accelerate; install it: pip install -e ".[bench]" -c constraints.txt', file=sys.stderr)
        return 2
    if arguments.side:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            loss = (train_ours if arguments.side == "ours" else train_with_trainer)(arguments, folder)
        print(f"{arguments.side}: mean loss {loss:.4f} of {arguments.steps + 1} steps", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)  # nothing is left to do, and an interpreter with two process groups has better not try
    sides = [Side("ours"), Side("trainer")]
    for number in range(arguments.steps // arguments.segment):
        for side in sides if number % 2 else sides[::-1]:
            side.go_on()
    for side in sides:
        side.go_on()  # the last step, which is not timed; then its peak
        side.process.wait()
    ours, theirs = (side.seconds[report.WARM_UP_STEPS :] for side in sides)
    median, quartiles = report.ratio(theirs, ours)
    print(f"{arguments.preset}, {arguments.deepspeed_config} against {PEER_JSON} in the Trainer", flush=True)
    for side, seconds in zip(sides, (ours, theirs), strict=True):
        report.show_times(f"{side.name}, peak {side.last['peak_memory_bytes'] / 2**20:,.0f} MiB", seconds)
    print(f"a step of the Trainer takes {median:.3f} times ours (quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f})")
    if not arguments.no_record:
        results: dict[str, Any] = {"config": arguments.deepspeed_config, "preset": arguments.preset}
        for side, seconds in zip(sides, (ours, theirs), strict=True):
            memory = side.last["peak_memory_bytes"]
            results[side.name] = {"step": report.spread(seconds), "mean_ms": 1e3 * statistics.mean(seconds), "peak_memory_bytes": memory}
        report.append("trainer", {**results, "ratio": median, "ratio_quartiles": quartiles}, report.device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
