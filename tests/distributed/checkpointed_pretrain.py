"""`launch/pretrain.py` with torch.utils.checkpoint around every block.

deepspeed tests/distributed/checkpointed_pretrain.py FLAGS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    from launch import pretrain
    from launch.run.errors import run_command
    from recipes import registry
    from recipes.technique import Techniques
    from tests.distributed.memory_jobs import CheckpointedBlocks

    registry.make_techniques = lambda run: Techniques([CheckpointedBlocks({}, run)])
    run_command(pretrain.main)
