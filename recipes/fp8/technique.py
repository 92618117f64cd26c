"""fp8: the linear layers of the blocks multiply in 8 bits, forward and backward, on the tensor cores of Ada, Hopper and Blackwell.

    pip install -e ".[fp8]" -c constraints.txt
    deepspeed launch/pretrain.py --recipe recipes/fp8

Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433. The layers are torchao's (`torchao.float8`): both factors of a matmul
are scaled by their current largest values, so that nothing is kept between steps. Weights, gradients, the optimizer and all other layers
stay as in bf16.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from model.accounting import block_tensors
from model.gpt import GPT
from recipes.technique import Declaration, RunForTechniques, Technique, without_auto

#: Ada, NVIDIA's first GPUs with fp8.
CAPABILITY = (8, 9)
#: torchao's names of the ways to scale a factor into the range of 8 bits.
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The first version for torch 2.11 and later.
TORCHAO = (0, 17)
#: The command that installs it, in the project's folder.
INSTALL = 'pip install -e ".[fp8]" -c constraints.txt'
#: Every dimension of a weight must be a multiple of it, for the tensor cores.
MULTIPLE = 16


class Fp8(Technique):
    """`"fp8": {"enabled": true, "scaling": "auto", "emulate": false}`: a section of this project's own.

    scaling: "tensorwise" (one scale for a tensor, gradients in e5m2: the fastest; "auto"), "rowwise" (one for each row, a power of two,
        e4m3 throughout: more accurate) or "rowwise_with_gw_hp" (and the weights' gradients stay in bf16).
    emulate: round the factors as fp8 does and multiply in a wider format, on any device: the loss of fp8 without its hardware, slower
        than without.
    """

    declaration = Declaration(
        section="fp8",
        keys={"scaling": {"enum": list(SCALINGS), "auto": True}, "emulate": {"types": ["boolean"]}},
        exclusive=("the arithmetic of matrix products",),
        same_algorithm=True,
    )
    needs_cuda = {"fp8": CAPABILITY}
    matmul_dtype = "fp8"

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.scaling = without_auto(section).get("scaling", SCALINGS[0])
        self.emulate = section.get("emulate", False)
        if self.emulate:
            self.needs_cuda, self.matmul_dtype = {}, ""
        if run.precision != "bf16":
            raise ValueError(f"'fp8' is for bf16 runs, and this run is in {run.precision}; use the bf16 JSON of the same stage")
        if run.shape.n_expert:
            raise ValueError("'fp8' does not convert the matrices of experts, which are most of this model's arithmetic; leave it out")
        for name, sides in block_tensors(run.shape).items():
            if len(sides) == 2 and any(side % MULTIPLE for side in sides):
                raise ValueError(
                    f"'fp8' needs matrices whose sides are multiples of {MULTIPLE}, but {name} is {sides[0]} x {sides[1]};"
                    " change --d_model, --d_ff or the heads"
                )
        if run.zero_stage == 3 and "activation_checkpointing" not in run.techniques:
            # torchao's layers save the gathered weight, which stays on the device until their backward pass.
            raise ValueError(
                "'fp8' at stage 3 keeps the gathered weights of all blocks from the forward to the backward pass, so that stage 3 "
                'saves no memory; add "activation_checkpointing": {"enabled": true}, or use stage 2'
            )
        self.notes = (f"fp8: {self.scaling} scaling in the 4 linear layers of each block; embeddings, attention and head stay bf16",)
        if self.emulate:
            self.notes = (f"{self.notes[0]}; emulated, and slower than bf16",)
        if (missing := _missing_torchao()) is not None:
            self.missing_packages = (f"'fp8' needs torchao {TORCHAO[0]}.{TORCHAO[1]} or later, {missing}; {INSTALL}",)

    def prepare(self, model: GPT) -> None:
        """Replace the linear layers of the blocks by torchao's, with the same parameters under the same names."""
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # the import warns about kernels that are not used here
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # an optional dependency
        finally:
            logging.disable(before)
        # Pads the tokens of a micro-batch, the inner dimension of the weights' gradients, to a multiple of 16.
        config = replace(Float8LinearConfig.from_recipe_name(self.scaling), emulate=self.emulate, pad_inner_dim=True)
        convert_to_float8_training(model.h, config=config)


def _missing_torchao() -> str | None:
    """Why the installed torchao cannot be used; None if it can."""
    try:
        found = version("torchao")
    except PackageNotFoundError:
        return "which is not installed"
    return None if tuple(map(int, re.findall(r"\d+", found)[:2])) >= TORCHAO else f"and {found} is installed"
