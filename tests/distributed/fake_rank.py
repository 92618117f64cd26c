"""One rank of many without the others, on torch's fake process group. What it holds and sends is as among real ranks; its numbers are not.

    python -m tests.distributed.fake_rank RANK RANKS FLAGS...

FLAGS are those of `launch/pretrain.py`; prints JSON. A gather returns what this rank sent, in place of what others would. So at stage 3
only rank 0 starts: the others compare their order of modules with its. `launch.pretrain.train` does not run: its checkpoints need a second
group, of gloo.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from launch.config.explain import bytes_of
from launch.config.run_config import resolve
from launch.training.engine import start_engine
from launch.training.meter import Meter
from launch.training.ranks.distributed import start_ranks
from recipes.registry import make_techniques
from recipes.technique import step_without_techniques
from tests.distributed.memory_jobs import PARTS, StatesInStep, plan_of

#: In its third step, stage 3 gathers as in all later ones.
STEPS = 3


def states_and_bytes(flags: list[str]) -> dict[str, tuple[int, int]]:
    """Model states after the last backward pass of the second step, and bytes sent in the third; each as found and as planned."""
    config, collectives = resolve(flags)[0], start_ranks()
    techniques = make_techniques(config)
    engine = start_engine(config, techniques, collectives)
    loader, meter, states = config.training_loader(collectives), Meter(engine, collectives, 0.0, on_lost=lambda: None), StatesInStep()
    states.start(engine)
    for step in range(1, STEPS + 1):  # as `launch.pretrain.train`
        work = techniques.on_step(step, step_without_techniques(config))
        meter.start_step()
        engine.set_learning_rate(step * work.tokens * engine.data_ranks)
        for batch in loader.micro_batches((step - 1) * work.sequences * engine.data_ranks, work.micro_batch_size, work.accumulation):
            loss = engine.backward_and_step(engine.loss(techniques.on_batch(batch)), work.accumulation)
        meter.reduce_loss_and_signal(loss, 0)
        sent = meter.end_step(work)["bytes_sent"]
    parts = plan_of(config).parts
    return {name: (states.found[-1][name], parts[name]) for name in PARTS} | {"sent": (sent, bytes_of(config, config.model_config))}


if __name__ == "__main__":
    rank, ranks, *words = sys.argv[1:]
    names = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= names | {"DS_ACCELERATOR": "cpu"}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=int(ranks))
    print(json.dumps(states_and_bytes(words)))
