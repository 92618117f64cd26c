"""A small engine of DeepSpeed on which probes try its code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch

from launch.config.deepspeed_schema import deepspeed_silenced


@contextlib.contextmanager
def probe_engine(ds_engine: Any, offload: dict[str, Any] | None = None, rule: dict[str, Any] | None = None) -> Iterator[Any]:
    """An engine with two small weights and plain SGD, with the stage and precision of `ds_engine`.

    Args:
        offload: the section `offload_optimizer`; by default the CPU if `ds_engine` offloads its optimizer.
        rule: of the loss scale, which is fixed at 1 by default.
    """
    # Small buckets: stage 3 allocates its own as soon as it is built.
    stage = ds_engine.zero_optimization_stage()
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 64}
    if ds_engine.zero_use_cpu_optimizer():
        section["offload_optimizer"] = offload or {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": section,
        "bf16": {"enabled": ds_engine.bfloat16_enabled()},
        "fp16": {"enabled": ds_engine.fp16_enabled(), **(rule or {"loss_scale": 1})},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    with deepspeed_silenced():
        probe, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
        yield probe
        probe.destroy()


def step_probe(probe: Any, used: Any) -> None:
    """Run one step of the probe engine in which only the layers `used` get a gradient."""
    values = torch.ones(1, 8, device=probe.device, dtype=next(probe.module.parameters()).dtype)
    # The engine's own forward pass is not needed: its hooks are on the modules and the parameters.
    probe.optimizer.clear_backward_seen_flag()
    probe.backward(sum(layer(values).float().sum() for layer in used))
    probe.step()
