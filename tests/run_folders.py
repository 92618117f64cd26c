"""Run folders as training writes them, without the training: the real description of a run, and the lines that a test wants."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from launch.config.run_config import ROOT, resolve
from launch.training.run_folder.provenance import describe_run

#: Of `description` without other flags: 8 sequences of 128 tokens, 20 steps.
TOKENS = 1024


def description(corpus: Path, *flags: str, seed: int = 1) -> dict[str, Any]:
    """What `run.json` holds of a run of 20 steps of `nano` on two ranks; `flags` come after, with the DeepSpeed JSON or the recipe.

    Runs of one seed were interleaved.
    """
    return json.loads(_described(corpus, flags)) | {"seed": seed, "interleaved": f"group-{seed}"}


@cache
def _described(corpus: Path, flags: tuple[str, ...]) -> str:
    named = [str(ROOT / flag) if flag.startswith(("recipes/", "ds_configs/")) else flag for flag in flags]
    config, _ = resolve(["--data", str(corpus), "--preset", "nano", "--steps", "20", *named], ranks=2)
    return json.dumps(describe_run(config))


def line(step: int, loss: float | None = 5.0, **metrics: Any) -> dict[str, Any]:
    """A step's line: 0.5 s a step and 100 bytes of it; step 0 has no loss."""
    at = {"step": step, "tokens": TOKENS * step, "seconds": 1 + 0.5 * step}
    own = {"loss": loss, "step_seconds": 0.5, "tokens_per_second": 2048.0, "peak_memory_bytes": 1000 + step, "bytes_sent": 100}
    return at | (own if step else {}) | metrics


def lines(final: float | None = 4.0, steps: int = 20, **metrics: Any) -> list[dict[str, Any]]:
    """`steps` steps, evaluated at 0, where it is 6, and at the end, where it is `final`."""
    made = [line(step, **(metrics if step else {})) for step in range(steps + 1)]
    made[0]["val_loss"], made[-1]["val_loss"] = 6.0, final
    return made


def write_run(folder: Path, described: dict[str, Any], of_steps: list[dict[str, Any]], log: str = "") -> Path:
    """Write the folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    own = described | {"run_name": folder.name, "runs_dir": str(folder.parent)}
    (folder / "run.json").write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in of_steps), encoding="utf-8")
    (folder / "log.txt").write_text(log, encoding="utf-8")
    return folder
