"""The time of a run by a roofline: its FLOPs at an assumed MFU, and the bytes that it sends at the rate of the network. Does not train.

    python launch/plan.py --preset llama3-8b --gpus 16 --device h100 --tokens 1T --interconnect 400gbit

The MFU is that of a step without communication. A collective is a ring: while each rank sends n bytes, n bytes leave each host, so the rate
is that of all adapters of a host together, or on one host that of a GPU's link. An exchange of all ranks with all, as in 1-bit Adam and
Muon, is no ring: g times the bytes of a rank leave a host of g GPUs. Slices of sequences are exchanged over the GPUs' links if the ranks of
a row are on one host.

What overlaps: with `overlap_comm`, stage 2 reduces gradients during the backward pass, stage 1 during that of the last micro-batch, and
stage 3 sends everything during forward and backward passes. All other communication is added to the arithmetic, as are the exchanges of
slices, for which attention waits. Not in the plan: latency, offload, evaluation, checkpoints and restarts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from launch.config.memory import MemorySizes
from launch.config.run_config import RunConfig
from launch.errors import UsageError
from model.accounting import block_flops_per_token, flops_per_token, known_device, parameter_count, peak_flops
from model.presets import PRESETS, GPTConfig, shape_of
from recipes import registry

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks/gpu/utilization.json"
BACKWARD = 2 / 3  # its share of a step's FLOPs


class Hardware(NamedTuple):
    """What a run is planned for.

    Attributes:
        device: the GPU, and its peak with the arithmetic of the matrix products, for the reader.
        flops: FLOP/s of a GPU that the arithmetic reaches: its peak times the MFU.
        assumed: the MFU and its source, for the reader.
        network: bits per second; None: communication takes no time.
        link: bits per second of a GPU's link within its host, for slices of sequences; None: `network`.
    """

    device: str
    flops: float
    assumed: str
    network: float | None
    link: float | None = None


def hardware_of(flags: argparse.Namespace, run: RunConfig) -> Hardware | None:
    """The hardware that --device, --mfu and --interconnect describe; None without the name of a GPU.

    Raises:
        UsageError: a GPU is missing, or its peak in the run's precision is not known.
    """
    if (device := known_device(flags.device or "")) is None:
        if (flags.mfu, flags.interconnect, flags.gpu_link) != (None, None, None):
            raise UsageError("--mfu, --interconnect and --gpu_link plan the time on a GPU; name it too, for example --device h100")
        return None
    dtype = registry.make_techniques(run).matmul_dtype or run.precision
    if (peak := peak_flops(device, dtype)) is None:
        raise UsageError(f"--device {flags.device}: it has no {dtype}, or its peak is not known; plan for another precision or device")
    mfu, source = (flags.mfu, "--mfu") if flags.mfu is not None else measured_mfu(run.model_config)
    arithmetic = f"{device}, {peak / 1e12:,.4g} TFLOP/s in {dtype}"
    return Hardware(arithmetic, peak * mfu, f"MFU {mfu:.3g} ({source})", flags.interconnect, flags.gpu_link)


def measured_mfu(model: GPTConfig) -> tuple[float, str]:
    """The newest MFU of the measured model whose number of parameters is nearest to that of `model`, and which one it is."""

    def distance(record: dict[str, Any]) -> float:
        shape = shape_of(PRESETS[record["preset"]].shape, record["architecture"], {})
        measured = parameter_count(GPTConfig(**vars(shape), vocab_size=PRESETS[record["preset"]].vocab_size))
        return abs(math.log(measured / parameter_count(model)))

    newest = [records[-1] for records in json.loads(MEASURED.read_text(encoding="utf-8")).values()]
    nearest = min(newest, key=distance)
    return nearest["mfu"], f"measured: {nearest['cell']}, one {nearest['device']}"


def time_of(run: RunConfig, hardware: Hardware, sent: int, flops: int, steps: int) -> dict[str, float]:
    """Seconds of a mean step, and what follows for the run.

    Args:
        sent: bytes that a rank sends in a mean step.
        flops: those of the run, without recomputed activations.
        steps: of the run.
    """
    model, techniques = run.model_config, registry.make_techniques(run)
    terms, again = techniques.memory_terms(model, "cuda"), 0
    if techniques.checkpointed_segments:  # the forward pass of the blocks runs twice
        again = model.n_layer * block_flops_per_token(model, model.seq_len)
    if "tile" in terms:  # that of the MLPs once more, and that of the head unless a kernel has its loss
        again += 6 * model.n_layer * model.d_model * (model.active_c_fc_width + model.d_ff)
        again += 6 * model.d_model * model.vocab_size * ("loss_head" not in terms)
    flops += round(flops * again / flops_per_token(model) / 3)
    compute = flops / steps / run.ranks / hardware.flops
    exchanged, link = techniques.bytes_sent_in_blocks(steps), hardware.link or hardware.network
    around = 8 * (sent - exchanged) / hardware.network if hardware.network else 0.0
    communication = around + (8 * exchanged / link if link else 0.0)
    overlapping, during = _overlap(run, sent - exchanged)
    hidden = min(around * overlapping, during * compute)
    seconds = compute + communication - hidden
    return {
        "arithmetic_seconds": compute,
        "communication_seconds": communication,
        "overlapped_seconds": hidden,
        "step_seconds": seconds,
        "tokens_per_second_and_gpu": run.total_tokens / steps / seconds / run.ranks,
        "days": steps * seconds / 86_400,
        "days_without_overlap": steps * (compute + communication) / 86_400,
        "gpu_hours": steps * seconds * run.ranks / 3_600,
    }


def _overlap(run: RunConfig, sent: int) -> tuple[float, float]:
    """The share of the bytes sent that overlaps with arithmetic, and the share of the step's arithmetic during which it can."""
    sizes = MemorySizes(run, run.model_config, "cuda", 0)
    if sizes.stage == 0 or sizes.has_bf16_optimizer or not sizes.zero["overlap_comm"] or not sent:
        return 0.0, 0.0
    if sizes.stage == 3:
        return 1.0, 1.0
    gathered = sizes.w * sum(sizes.owned) * (run.ranks - 1)  # the weights, after the update
    return 1 - gathered / sent, BACKWARD / (1 if sizes.stage == 2 else run.gradient_accumulation_steps)
