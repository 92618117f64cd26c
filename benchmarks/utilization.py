"""Model FLOPs utilization on a GPU: gpt2, gpt2-medium and gpt2-xl in bf16, each with the micro-batch that trains fastest.

    python benchmarks/utilization.py                                  # three presets; about 15 minutes on one GPU
    python benchmarks/utilization.py --presets gpt2 --deepspeed_config ds_configs/zero1_bf16.json
    python benchmarks/utilization.py --presets gpt2 --kernels         # what each key of the JSON's `fused_kernels` brings

Every figure is a run of `launch/pretrain.py` of its own: the median `mfu` of its metrics (model/accounting.py: 6N + 12 n_layer d_model
seq_len FLOPs a token over the device's dense peak), its first steps not counted. Micro-batches are doubled until memory is out. With
`--kernels`, runs at the best micro-batch with all keys on, all off, each alone off and each alone on, all in turns: the share of a key is
what the step loses without it, or gains by it alone, of what it gains by all. Without a GPU it says so and ends.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--presets", "gpt2", "--steps", "15", "--largest", "8")
KERNELS = ("adamw", "attention", "cross_entropy", "layer_norm", "gelu", "compile", "tf32", "cuda_graphs")


def rows(record: dict[str, Any]) -> list[Row]:
    config = Path(record["config"]).stem
    found = []
    for preset, sizes in record["presets"].items():
        best = max((one for one in sizes.values() if one), key=lambda one: one["mfu"])
        found.append(Row(f"MFU of {preset}, {config}, micro-batch {best['micro_batch_size']}", f"{best['mfu']:.3f}", best["mfu_quartiles"]))
    for preset, shares in record.get("kernels", {}).items():
        found.append(Row(f"a step without fused_kernels / with all, {preset}, {config}", f"{shares['gain']:.2f}"))
    return found


def run(preset: str, micro_batch_size: int, arguments: Any, *changes: str) -> dict[str, Any] | None:
    """A run's figures; None where the memory was not enough."""
    from launch.run.metrics import read_metrics

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, "launch/pretrain.py", "--deepspeed_config", arguments.deepspeed_config, "--preset", preset, "--quiet"]
        command += ["--data", arguments.data, "--steps", str(arguments.steps), "--eval_every", "0", "--save_every", "0"]
        command += ["--micro_batch_size", str(micro_batch_size), "--global_batch_size", str(micro_batch_size)]
        command += [text for change in changes for text in ("--set", change)]
        done = subprocess.run([*command, "--runs_dir", folder, "--run_name", "r"], cwd=ROOT, capture_output=True, text=True)
        file = Path(folder) / "r" / "metrics.jsonl"
        lines = read_metrics(file)[report.WARM_UP_STEPS :] if file.exists() else []
        if "out of memory" in done.stderr:
            return None
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    lower, mfu, upper = statistics.quantiles([line["mfu"] for line in lines], n=4)
    return {
        "micro_batch_size": micro_batch_size,
        "mfu": mfu,
        "mfu_quartiles": [lower, upper],
        "step": report.spread([line["step_seconds"] for line in lines]),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "peak_memory_bytes": lines[-1]["peak_memory_bytes"],
    }


def search(preset: str, arguments: Any) -> dict[str, dict[str, Any] | None]:
    """A run of each micro-batch size, doubled until memory is out; the last may be None."""
    sizes: dict[str, dict[str, Any] | None] = {}
    size = 1
    while size <= arguments.largest:
        found = sizes[str(size)] = run(preset, size, arguments)
        if found is None:
            print(f"{preset:12} micro-batch {size:>4}: out of memory", flush=True)
            break
        print(
            f"{preset:12} micro-batch {size:>4}: MFU {found['mfu']:.3f} (quartiles {found['mfu_quartiles'][0]:.3f} to "
            f"{found['mfu_quartiles'][1]:.3f}), {found['tokens_per_second']:,.0f} tokens/s, {found['peak_memory_bytes'] / 2**30:.1f} GiB",
            flush=True,
        )
        size *= 2
    return sizes


def variants() -> dict[str, list[str]]:
    """What is switched in each run, as values of --set. A key that is on is "auto": skipped where the device has no use for it."""

    def switched(on: set[str]) -> list[str]:
        return [f"fused_kernels.{key}={'auto' if key in on else 'false'}" for key in KERNELS]

    every = set(KERNELS)
    made = {"all": switched(every), "none": ["fused_kernels.enabled=false"]}
    made |= {f"without {key}": switched(every - {key}) for key in KERNELS}
    return made | {f"only {key}": switched({key}) for key in KERNELS}


def shares_of(seconds: dict[str, float]) -> dict[str, Any]:
    """From the step time of each of `variants`: how many times a step without all takes one with all, and each key's share of the gain."""
    gain = seconds["none"] - seconds["all"]
    return {
        "gain": seconds["none"] / seconds["all"],
        "lost_without": {key: (seconds[f"without {key}"] - seconds["all"]) / gain for key in KERNELS},
        "gained_alone": {key: (seconds["none"] - seconds[f"only {key}"]) / gain for key in KERNELS},
    }


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--presets", default="gpt2,gpt2-medium,gpt2-xl", help="model sizes (gpt2,gpt2-medium,gpt2-xl)")
    parser.add_argument(
        "--deepspeed_config", default="ds_configs/fused_kernels.json", help="the engine's JSON (ds_configs/fused_kernels.json)"
    )
    parser.add_argument("--steps", type=int, default=40, help=f"steps of a run, the first {report.WARM_UP_STEPS} not counted (40)")
    parser.add_argument("--largest", type=int, default=1024, help="largest micro-batch that is tried (1024)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    parser.add_argument("--kernels", action="store_true", help="also the share of each key of `fused_kernels` in the gain")
    parser.add_argument("--turns", type=int, default=3, help="runs of each of the kernels' variants (3)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    import torch

    if not torch.cuda.is_available():
        print("utilization: there is no GPU here, and without one no peak FLOP/s to compare with; nothing was measured")
        return 0
    if arguments.kernels and "fused_kernels" not in json.loads(Path(arguments.deepspeed_config).read_text(encoding="utf-8")):
        parser.error(f"--kernels: {arguments.deepspeed_config} has no section 'fused_kernels'; name a JSON that has one")
    presets, kernels = {}, {}
    for preset in arguments.presets.split(","):
        presets[preset] = sizes = search(preset, arguments)
        if not any(sizes.values()):
            del presets[preset]
            continue
        if arguments.kernels:
            best = max((one for one in sizes.values() if one), key=lambda one: one["mfu"])["micro_batch_size"]
            steps: dict[str, list[float]] = {name: [] for name in variants()}
            for _ in range(arguments.turns):
                for name, changes in variants().items():
                    found = run(preset, best, arguments, *changes)
                    steps[name] += [found["step"]["median_ms"] / 1e3] if found else []
            short = [name for name, times in steps.items() if not times]
            if short:
                print(f"{preset:12} micro-batch {best}: out of memory {', '.join(short)}; give --largest {best // 2}", flush=True)
                continue
            kernels[preset] = shares = shares_of({name: statistics.median(times) for name, times in steps.items()})
            print(f"{preset:12} a step without fused_kernels takes {shares['gain']:.2f} times one with all of them; of the gain")
            for key in KERNELS:
                print(f"  {key:14} {100 * shares['lost_without'][key]:5.1f}% lost without, {100 * shares['gained_alone'][key]:5.1f}% alone")
    if not arguments.no_record and presets:
        results = {"config": arguments.deepspeed_config, "presets": presets, "kernels": kernels}
        report.append("utilization", results, report.device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
