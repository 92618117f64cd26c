"""Model states on each rank, measured in live engines, against what the ZeRO paper says: 16 bytes a parameter, split over the ranks.

    python benchmarks/model_states.py                         # nano, two ranks, about a minute on two cores
    python benchmarks/model_states.py --preset gpt2 --ranks 4 --precisions bf16

Rajbhandari et al., arXiv 1910.02054, section 3.1 and figure 1, for Adam in mixed precision on N ranks: 2 bytes of weights, 2 of gradients
and 12 of optimizer state (fp32 weights and two moments) a parameter; stage 1 divides the last by N, stage 2 the gradients too, stage 3 all.
Counted is every tensor that the engine keeps, each storage once and whole, after the backward pass of a step after which they are most:
with two micro-batches, since stage 1 has whole gradients only between the two. In fp32 (4 + 4 + 8) stages 1 to 3 keep their master weights
beside the weights: 4 bytes a parameter over N more than the paper's 16 bytes, which the table's last column has too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

STAGES = (0, 1, 2, 3)
QUICK = ("--precisions", "bf16")


def rows(record: dict[str, Any]) -> list[Row]:
    errors = [abs(sum(row[3:7]) / row[7] - 1) for row in record["rows"]]
    sides = f"model states in live engines / the ZeRO paper's, {record['preset']}, {record['ranks']} ranks"
    return [Row(sides, f"at most {100 * max(errors):.1f}% apart", bar="at most 5%")]


def bytes_per_parameter(stage: int, ranks: int, precision: str) -> float:
    """Of model states on one rank, as the paper has them; in fp32 with the master weights that DeepSpeed keeps from stage 1 on."""
    weights, gradients, optimizer = (2, 2, 12) if precision != "fp32" else (4, 4, 8 if stage == 0 else 12)
    return weights / (ranks if stage >= 3 else 1) + gradients / (ranks if stage >= 2 else 1) + optimizer / (ranks if stage >= 1 else 1)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--preset", default="nano", help="model size (nano)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (2)")
    parser.add_argument("--precisions", default="bf16,fp16,fp32", help="precisions (bf16,fp16,fp32)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from benchmarks.report import append
    from launch.config.run_config import resolve
    from model.accounting import parameter_count
    from tests.distributed.memory_jobs import PARTS
    from tests.distributed.ranks import Ranks

    sequences = 2 * arguments.ranks  # two micro-batches of one sequence on each
    table = []
    print(f"{'':15}{'':>5}  {'bytes a parameter':^48}  {'':^25}")
    print(
        f"{'':11} rank  {'weights':>8} {'gradients':>9} {'master':>8} {'moments':>8} {'sum':>8}  {'ZeRO says':>9}  measured / said",
        flush=True,
    )
    with Ranks(arguments.ranks) as pool:
        for precision in arguments.precisions.split(","):
            for stage in STAGES:
                flags = [
                    "--deepspeed_config",
                    f"ds_configs/zero{stage}_{precision}.json",
                    "--preset",
                    arguments.preset,
                    "--data",
                    arguments.data,
                ]
                flags += ["--micro_batch_size", "1", "--global_batch_size", str(sequences)]
                config, _ = resolve(flags, ranks=arguments.ranks)
                parameters = parameter_count(config.model_config)
                said = bytes_per_parameter(stage, arguments.ranks, precision)
                for rank, states in enumerate(pool.run("tests.distributed.memory_jobs:largest_states", flags=flags)):
                    measured = [states[part] / parameters for part in PARTS]
                    print(
                        f"{precision} ZeRO {stage} {rank:>5}  "
                        + " ".join(f"{value:>{width}.2f}" for value, width in zip(measured, (8, 9, 8, 8), strict=True))
                        + f" {sum(measured):8.2f}  {said:9.2f}  {sum(measured) / said:.3f}",
                        flush=True,
                    )
                    table.append([precision, stage, rank, *(states[part] for part in PARTS), round(said * parameters)])
    errors = [abs(sum(row[3:7]) / row[7] - 1) for row in table]
    print(f"largest deviation of {len(table)} ranks: {100 * max(errors):.1f}%")
    if not arguments.no_record:
        columns = ["precision", "stage", "rank", *PARTS, "paper"]
        append("model_states", {"preset": arguments.preset, "ranks": arguments.ranks, "columns": columns, "rows": table}, "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
