"""Fused kernels: the same mathematics in fewer passes over memory. Each kernel has its own key.

    deepspeed launch/pretrain.py --recipe recipes/fused_kernels

The kernels depend on the device; README.md has a table and the measurements.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch.utils.cpp_extension import CUDA_HOME

from model.gpt import GPT, Block
from model.presets import GATED, GPTConfig
from recipes.fused_kernels.attention import KEPT_LENGTH, QUERIES, attention_blocks, blockwise_attention
from recipes.fused_kernels.cross_entropy import LOGITS_BYTES, ROWS, in_one, in_rows, linear_cross_entropy
from recipes.fused_kernels.gelu import CompiledGELU
from recipes.optimizers import adam_arguments
from recipes.technique import Declaration, Run, Technique, decouples_weight_decay

SWITCH = {"enum": [True, False], "auto": True}


class FusedKernels(Technique):
    """`"fused_kernels": {"adamw": "auto", "attention": true, ...}`, or `"fused_kernels": "auto"` for all of them: a section of our own.

    A key is true (refused if the device does not support it), false (as if left out) or "auto": on if the device supports it and it is
    faster. The log has a line for each kernel that is skipped.

    adamw: the optimizer's update in one pass: DeepSpeed's FusedAdam on CUDA at stages 1 to 3 if it can be built, else torch's.
    attention: causal attention without the T x T scores in memory: torch's flash kernels on CUDA, blocks of queries on a CPU.
    cross_entropy: the output layer and its loss in one kernel, which writes the gradient over the logits.
    gelu: compiled by torch.compile, if the blocks are not. "auto" leaves it out for a model without GELU; true is then refused.
    compile: torch.compile, one block at a time, which works at every stage and with every technique. On a CPU, "auto" compiles only blocks
        with components that have no fused kernel there: RMSNorm, SwiGLU, rotary positions.
    """

    declaration = Declaration(
        section="fused_kernels",
        keys=dict.fromkeys(("adamw", "attention", "cross_entropy", "gelu", "compile"), SWITCH),
        same_algorithm=True,
    )

    def __init__(self, section: dict[str, Any], run: Run):
        self.run = run
        self.asked = {name: section.get(name, False) for name in self.declaration.keys}
        if not any(self.asked.values()):
            raise ValueError(f"'fused_kernels' switches no kernel on; write \"auto\", or true for some of {', '.join(self.asked)}")
        if self.asked["adamw"] is True and run.optimizer["type"] not in ("Adam", "AdamW"):
            raise ValueError(f"'fused_kernels.adamw' is a kernel of Adam, and the optimizer is {run.optimizer['type']}; write false")
        if run.shape.mlp != "gelu":
            if self.asked["gelu"] is True:
                raise ValueError(f"'fused_kernels.gelu' is a kernel of gelu, and this model has {run.shape.mlp}; write \"auto\" or false")
            self.asked["gelu"] = False
        if run.shape.dropout and self.asked["attention"] is True:  # then only CUDA has a fused kernel
            self.needs_cuda = {"fused_kernels.attention": (0, 0)}
        self.missing_packages = tuple(
            f"'fused_kernels.{name}' needs a C++ compiler, which is not on the path; install g++, or write \"auto\""
            for name in ("gelu", "compile")
            if self.asked[name] is True and not _has_compiler()
        )
        self._autocast = run.matmul_dtype != run.precision
        if self._autocast and self.asked["cross_entropy"] is True:
            raise ValueError(
                "'fused_kernels.cross_entropy' computes in the weights' type, which torch_autocast does not; write \"auto\" or false"
            )

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        """Return the memory of blockwise attention and of the loss head.

        For short sequences, attention keeps the probabilities of each block. The loss head holds a part of its logits, some rows in fp32,
        and the gradients of its input and weight, which are summed in fp32 if there are several parts.
        """
        w, B, T = 4 if self.run.precision == "fp32" else 2, self.run.micro_batch_size, model.seq_len
        terms = {}
        if self.asked["attention"] and device == "cpu" and not model.dropout:
            pairs = sum((end - start) * end for start, end in attention_blocks(T))  # of queries and keys
            terms["attention"] = B * model.n_head * pairs * w if T <= KEPT_LENGTH else 0
        if self.asked["cross_entropy"] and not self._autocast:
            tokens, V, C = B * T, model.padded_vocab_size, model.d_model
            rows = min(tokens, max(1, LOGITS_BYTES // (V * w)))
            weight = V * C * (w if device == "cpu" and self.run.precision == "bf16" else 4) + (V * C * 4 if rows < tokens else 0)
            terms["loss_head"] = rows * V * w + min(ROWS, tokens) * V * 4 + tokens * C * w + weight
        return terms

    def _say(self, name: str, what: str) -> None:
        self.notes = (*self.notes, f"fused_kernels.{name}: {what}")

    def prepare(self, model: GPT) -> None:
        from deepspeed.accelerator import get_accelerator  # a second to import, for which --help should not wait

        self.device = get_accelerator().device_name()
        self.notes = ()
        for name, asked in self.asked.items():
            if asked:
                getattr(self, f"_use_{name}")(model)

    # --- one kernel each ---------------------------------------------------------------------------------------------------------------

    def _use_adamw(self, model: GPT) -> None:
        offloads = (self.run.engine["zero_optimization"].get("offload_optimizer") or {}).get("device") or "none"
        if self.run.optimizer["type"] not in ("Adam", "AdamW"):
            return self._skip("adamw", f"the optimizer is {self.run.optimizer['type']}")
        if offloads != "none":
            return self._say("adamw", "DeepSpeed's CPUAdam, as for every offloaded optimizer")
        if self.device == "cuda" and self.run.zero_stage and CUDA_HOME is not None and not self.run.optimizer["params"].get("amsgrad"):
            self.extensions = ("FusedAdamBuilder",)
            return self._say("adamw", "DeepSpeed's FusedAdam")
        self._say("adamw", "torch's fused kernel, as without this key")

    def _use_attention(self, model: GPT) -> None:
        if self.device == "cpu" and not self.run.shape.dropout:
            for block in cast("Iterable[Block]", model.h):
                block.attn.attend = blockwise_attention
            return self._say("attention", f"blocks of {QUERIES} queries")
        self._say("attention", "torch's, as without this key")

    def _use_cross_entropy(self, model: GPT) -> None:
        if self._autocast:
            return self._say("cross_entropy", "skipped, it computes in the weights' type, which torch_autocast does not")
        compiled = self.device == "cuda" and find_spec("triton") is not None
        model.lm_head.loss = partial(linear_cross_entropy, kernel=torch.compile(in_one) if compiled else in_rows)
        self._say("cross_entropy", f"the gradient is written over the logits{', by a compiled kernel' if compiled else ''}")

    def _use_gelu(self, model: GPT) -> None:
        if self._compiles():
            return self._say("gelu", "skipped, it is compiled with its block")
        if not _has_compiler():
            return self._say("gelu", "skipped, there is no C++ compiler")
        for block in cast("Iterable[Block]", model.h):
            block.mlp.act = CompiledGELU()  # type: ignore[assignment]
        self._say("gelu", "compiled by torch.compile; the first step waits for it")

    def _compiles(self) -> bool:
        """Whether blocks are compiled."""
        if self.asked["compile"] != "auto":
            return bool(self.asked["compile"])
        shape = self.run.shape
        has_unfused = shape.norm == "rmsnorm" or shape.mlp in GATED or shape.positions == "rotary"
        return self.device == "cuda" or (has_unfused and _has_compiler())

    def _use_compile(self, model: GPT) -> None:
        if not self._compiles():
            return self._say("compile", "skipped, on a CPU it is not faster than the other kernels for this model")
        for block in model.h:
            block.compile()
        self._say("compile", "a block at a time; the first step takes longer")

    # --- the optimizer -----------------------------------------------------------------------------------------------------------------

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """DeepSpeed's FusedAdam if `prepare` has chosen it."""
        if "FusedAdamBuilder" not in self.extensions:
            return None
        from deepspeed.ops.adam import FusedAdam  # a second to import, for which --help should not wait

        lr, betas, eps, weight_decay, bias_correction = adam_arguments(self.run.optimizer["params"])
        return FusedAdam(
            param_groups,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adam_w_mode=decouples_weight_decay(self.run.optimizer),
        )


def _has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler. It also needs one on a GPU, to build the code that launches its kernels."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
