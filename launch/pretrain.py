"""Pretrain a GPT through the DeepSpeed engine: build, then one loop.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano
    deepspeed launch/pretrain.py --recipe recipes/zero_2 --run_name demo

Everything goes to `runs/<run_name>/`: `metrics.jsonl`, `log.txt`, TensorBoard events, `checkpoints/`, `loss.png`. The first loss is
about ln(vocab_size), 9.0 for the corpus of `make data`. Exit codes: 0 done, 1 failed, 2 the user's mistake; 130, 143 and 75 stopped by
Ctrl-C, by SIGTERM, and by SIGUSR1 or SIGUSR2, which ask for the run to be requeued, after writing a checkpoint from which `--resume`
continues.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Import from the checkout's root, which may not be installed. Python would put this script's folder first, where `launch/config` and
# `launch/training` would be top-level modules.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.explain import as_text, explain
from launch.config.flags import MUST
from launch.config.ranks import learn_rank, require_launcher
from launch.config.run_config import RunConfig, resolve
from launch.config.step_time import hardware_of
from launch.errors import TrainingFailed, UsageError, ignore_output_errors, print_once, run_command
from launch.formats.checkpoint_files import what_resume_does
from launch.formats.metrics import evaluated_losses
from launch.training.observers import Observer, Observers
from launch.training.ranks.signals import StopRequest, exit_code
from launch.training.run_folder.folder import NoFolder, RunFolder, check_run_folder, nothing_to_resume, open_run_folder
from launch.training.run_folder.monitors import check_monitors
from recipes import registry
from recipes.technique import step_without_techniques

if TYPE_CHECKING:  # imports torch and DeepSpeed
    from data_pipeline.loader import Loader
    from launch.training.checkpoints.checkpoint import Checkpoints
    from launch.training.engine import TrainingEngine
    from launch.training.evaluation import Evaluation
    from launch.training.meter import Meter
    from launch.training.spikes import SpikeRule

#: The largest corpus, in bytes, whose hashes rank 0 checks at the start while the others wait: about ten seconds.
LARGEST_VERIFIED = 10e9


def main() -> int:
    """Check everything that can be checked before ranks meet, then train."""
    stop = StopRequest()
    learn_rank()
    config, flags = resolve(sys.argv[1:])
    if flags.explain:
        explained = explain(config, hardware_of(flags, config))
        print_once(json.dumps(explained, indent=2) if flags.explain == "json" else as_text(explained, flags.explain == "full"))
        return 0
    ignore_output_errors()
    require_launcher(config.ranks)
    if config.lacks:
        raise UsageError(*config.lacks)
    # After parsing: imports torch and DeepSpeed.
    from launch.training.checkpoints.store import CheckpointStore, check_store
    from launch.training.engine import check_device
    from launch.training.ranks.distributed import have_met, leave_ranks

    check_device(config)  # before the run's folder is made
    folder: RunFolder | NoFolder = NoFolder()
    if os.environ.get("RANK", "0") == "0":
        path = check_run_folder(config.runs_dir, config.run_name, config.resume, stored=bool(config.checkpoint_store))
        check_monitors(config.ds_config, path)
        if store := CheckpointStore.of(config):
            check_store(store, path, config.resume)
        if verified := config.corpus.n_bytes <= LARGEST_VERIFIED:
            config.corpus.verify()
        folder = open_run_folder(config, path)
        if not verified:
            folder.log(f"note: the hashes of a large corpus are not checked here: data_pipeline/prepare.py --verify {config.data} does")
    try:
        code = train(config, folder, stop)
    except UsageError:
        folder.abandon()
        raise
    finally:
        folder.close()
        # If the ranks have not met, rank 0 may have been refused, because the folder is that of a running job.
        for swapped in config.swap_folders.values() if have_met() else ():
            shutil.rmtree(swapped, ignore_errors=True)
    leave_ranks()
    return code


class Parts(NamedTuple):
    """What the loop calls."""

    engine: TrainingEngine
    loader: Loader
    checkpoints: Checkpoints
    observer: Observers
    spikes: SpikeRule
    meter: Meter
    evaluation: Evaluation

    def evaluate(self, state: dict[str, Any], folder: RunFolder | NoFolder) -> dict[str, float]:
        """Evaluate outside of a step, and write a line of its own. Returns the losses."""
        losses = self.evaluation.losses()
        state["val_loss"] = losses["val_loss"]
        folder.write_metrics({"step": state["step"], "tokens": state["tokens"], "seconds": self.meter.seconds(), **losses})
        return losses


def train(config: RunConfig, folder: RunFolder | NoFolder, stop: StopRequest, observers: Sequence[Observer] = ()) -> int:
    """Train on this rank. Returns the exit code.

    observers: watch the run (`launch/training/observers.py`); the same on all ranks.
    """
    from launch.training.run_folder.progress import Progress

    parts, state = start_run(config, folder, stop, observers)
    engine, loader, checkpoints, observer, spikes, meter, evaluation = parts
    techniques, data_ranks = engine.techniques, engine.data_ranks
    stop_signal = 0
    stop.defer()  # from here on a signal takes effect at the end of its step
    try:
        with observer.training(), checkpoints, Progress(config, state, folder) as progress:
            while state["tokens"] < config.total_tokens and not stop_signal:
                step = state["step"] + 1
                work = techniques.on_step(step, step_without_techniques(config))
                tokens = state["tokens"] + work.tokens * data_ranks
                observer.on_step(step)
                meter.start_step()
                lr = engine.set_learning_rate(tokens)
                for batch in loader.micro_batches(state["samples"], work.micro_batch_size, work.accumulation):
                    batch = techniques.on_batch(batch)
                    observer.on_batch(batch)
                    loss_so_far = engine.backward_and_step(engine.loss(batch), work.accumulation)
                mean_loss, stop_signal = meter.reduce_loss_and_signal(loss_so_far, stop.poll())
                metrics = dict(**meter.end_step(work), **techniques.metrics())  # no name may occur twice
                observer.after_step(step)

                samples = state["samples"] + work.sequences * data_ranks
                state = {"step": step, "tokens": tokens, "samples": samples, "val_loss": None, "spike_window": spikes.window()}
                last = tokens >= config.total_tokens
                saving = bool(stop_signal or last or (config.save_every and step % config.save_every == 0))
                evaluated = {}
                if config.eval_every and (last or (step % config.eval_every == 0 and not stop_signal)):
                    evaluated = evaluation.losses()
                    state["val_loss"] = evaluated["val_loss"]
                line = dict(step=step, tokens=tokens, seconds=meter.seconds(), loss=mean_loss, lr=lr, **metrics, **observer.metrics())
                line |= evaluated
                folder.write_metrics(line, durable=saving)
                progress.update(line)
                engine.require_finite(mean_loss)
                if rewound := spikes.rewind(state, checkpoints):
                    state, saving = rewound, False
                if saving:
                    checkpoints.save(state, last=bool(stop_signal or last))
    except TrainingFailed as reason:
        raise fail(reason, parts, state, folder) from None
    return end(parts, state, stop_signal, config, folder, stop)


def start_run(
    config: RunConfig, folder: RunFolder | NoFolder, stop: StopRequest, observers: Sequence[Observer]
) -> tuple[Parts, dict[str, Any]]:
    """Join the ranks, build the engine, load the checkpoint of a resume, and evaluate the initial weights of a new run.

    Returns the parts and the state: optimizer steps done, tokens and samples consumed, the validation loss after the last step, if it was
    evaluated, and the losses before it that the spike rule compares with, if it is on.
    """
    # Here, so that --help does not wait seconds for torch and DeepSpeed.
    from launch.training.checkpoints.checkpoint import Checkpoints, check_shared
    from launch.training.checkpoints.store import CheckpointStore
    from launch.training.engine import CHECKPOINT, start_engine
    from launch.training.evaluation import Evaluation
    from launch.training.meter import Meter
    from launch.training.profiling import profilers
    from launch.training.ranks.distributed import start_ranks
    from launch.training.ranks.heartbeat import Heartbeat
    from launch.training.run_folder.progress import describe_start
    from launch.training.spikes import SpikeRule

    collectives = start_ranks()
    path = Path(config.runs_dir) / config.run_name
    check_shared(path, collectives)
    engine = start_engine(config, registry.make_techniques(config), collectives)
    checkpoints = Checkpoints(
        path / "checkpoints",
        config.keep,
        engine.ds_engine,
        engine.techniques,
        collectives,
        on_failure=stop.request,
        log=folder.log,
        run_id=folder.run_id,
        store=CheckpointStore.of(config),
        on_wait=lambda: engine.on_phase(CHECKPOINT),
        check_data=config.corpus.check_unchanged,
    )
    state: dict[str, Any] = {"step": 0, "tokens": 0, "samples": 0, "val_loss": None, "spike_window": None}
    if (config.resume or config.branch_from) and (found := checkpoints.load_newest()):
        state = {key: found.get(key) for key in state}
        if state["tokens"] - config.total_tokens >= config.tokens_per_step:  # the last step of a curriculum may pass the end
            raise UsageError(f"{path}: this run is at step {state['step']:,}, and --steps {config.steps:,} is less; give more steps")
    elif config.resume == MUST:
        raise UsageError(nothing_to_resume(path))
    elif config.branch_from:  # the run's folder existed, without a checkpoint
        raise UsageError(f"{path}: has no complete checkpoint to resume from; remove it, and --branch_from makes it again")
    elif config.init_from and engine.config.start is None:
        raise UsageError(f"--init_from {config.init_from}: a host lacks the folder, or has checkpoints that rank 0 lacks")
    profiles = profilers(config, state["step"], collectives, folder.log)
    folder.begin(state["step"])
    meter = Meter(engine, collectives, folder.seconds_before, on_lost=stop.request)
    spikes = SpikeRule(config.spike_rule, folder, collectives, state)
    watched = config.hang_timeout and collectives.world_size > 1
    heartbeat = [Heartbeat(path, config.hang_timeout, state["step"], collectives, folder.log)] if watched else []
    observer = Observers([*heartbeat, spikes, *profiles, *observers])
    engine.on_phase = observer.on_phase
    observer.start(engine)
    evaluation = Evaluation(engine)
    folder.log_start(config, describe_start(config, engine, meter, evaluation), state)
    loader = config.training_loader(collectives)
    parts = Parts(engine, loader, checkpoints, observer, spikes, meter, evaluation)
    weights = f"the weights of {config.init_from}" if config.init_from else "untrained"
    if state["step"] == 0 and config.eval_every:
        folder.log(f"step 0, {weights}: {evaluated_losses(parts.evaluate(state, folder))}")
    elif state["step"] == 0 and config.init_from:
        folder.log(f"step 0, {weights}")
    return parts, state


def fail(reason: TrainingFailed, parts: Parts, state: dict[str, Any], folder: RunFolder | NoFolder) -> TrainingFailed:
    """After a step whose gradients (then no update was made) or loss are not finite: save, unless an earlier update has broken the weights.

    Before the first update there is nothing to save: a resume starts with the same weights. Returns `reason` with what a resume does.
    """
    checkpoints = parts.checkpoints
    what = what_resume_does(checkpoints.folder)
    if state["step"] and parts.engine.weights_are_finite():
        try:
            what = f"--resume continues from {checkpoints.save(state, last=True)}"
        except (SystemExit, TrainingFailed):  # it could not be written, or the corpus has changed
            folder.log_failure(str(reason))
            raise
    elif state["step"]:
        what = f"the weights contain NaN or Inf and were not saved; {what}"
    reason = TrainingFailed(f"{reason}; {what}")
    folder.log_failure(str(reason))
    checkpoints.finish_uploads(lambda: signal.SIGTERM)
    return reason


def end(parts: Parts, state: dict[str, Any], stop_signal: int, config: RunConfig, folder: RunFolder | NoFolder, stop: StopRequest) -> int:
    """Evaluate what is left, close the log, and wait for uploads. Returns the exit code."""
    whole: dict[str, float] = {}
    if config.eval_every and not stop_signal and state["val_loss"] is None:  # a resume that ends the run at a step without an evaluation
        parts.evaluate(state, folder)
    if config.whole_eval and not stop_signal:  # after the checkpoint: it may take long, and a resume repeats it
        whole, stop_signal = parts.evaluation.losses_of_whole_split(lambda: parts.meter.reduce_loss_and_signal(0.0, stop.poll())[1])
    folder.log_end(state, whole, stop_signal)
    if not parts.checkpoints.finish_uploads(lambda: stop_signal or stop.poll()):
        stop_signal = stop_signal or stop.poll()  # a resume uploads the checkpoint
    return exit_code(stop_signal) if stop_signal else 0


if __name__ == "__main__":
    run_command(main, os._exit)
