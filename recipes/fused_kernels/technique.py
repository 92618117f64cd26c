"""Fused kernels: the same mathematics in fewer passes over memory. Each kernel has its own key.

    deepspeed launch/pretrain.py --recipe recipes/fused_kernels

The kernels depend on the device; README.md has a table and the measurements.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from model import accounting
from model.gpt import GPT, Block
from model.presets import GPTConfig
from recipes.fused_kernels.attention import KEPT_LENGTH, QUERIES, attention_blocks, blockwise_attention
from recipes.fused_kernels.cross_entropy import LOGITS_BYTES, ROWS, in_one, in_rows, linear_cross_entropy, write_gradient
from recipes.fused_kernels.gelu import CompiledGELU
from recipes.technique import Declaration, RunForTechniques, Technique

SWITCH = {"enum": [True, False], "auto": True}
#: The lowest compute capability that Triton supports; Liger's kernels and those of torch.compile are written in it.
TRITON_CAPABILITY = (7, 0)
#: Kernel -> the field of the model that names its component, and the component's name.
COMPONENTS = {
    "layer_norm": ("norm", "layernorm"),
    "gelu": ("mlp", "gelu"),
    "rms_norm": ("norm", "rmsnorm"),
    "swiglu": ("mlp", "swiglu"),
    "rotary": ("positions", "rotary"),
}
#: Kernels from Liger-Kernel, for CUDA only: where it is in `liger_kernel.ops`, and what is used on another device.
LIGER_KERNELS = {
    "layer_norm": ("layer_norm.LigerLayerNormFunction", "torch's is one kernel already"),
    "rms_norm": ("rms_norm.LigerRMSNormFunction", "torch's operations are used"),
    "swiglu": ("swiglu.LigerFusedGateUpSiLUMulFunction", "torch's operations are used"),
    "rotary": ("rope.LigerRopeFunction", "torch's operations are used"),
}
#: Components that only torch.compile fuses on a CPU.
FUSED_BY_COMPILE = ("rms_norm", "swiglu", "rotary")
#: The command that installs Liger-Kernel, in the project's folder.
INSTALL = 'pip install -e ".[liger]" -c constraints.txt'


class FusedKernels(Technique):
    """`"fused_kernels": {"attention": true, "gelu": "auto", ...}`, or `"fused_kernels": "auto"` for all of them: a section of our own.

    A key is true (refused if the device does not support it), false (as if left out) or "auto": on if the device supports it and it is
    faster. The log has a line for each kernel that is skipped.

    attention: causal attention without the T x T scores in memory: torch's flash kernels on CUDA, blocks of queries on a CPU.
    cross_entropy: the output layer and its loss in one kernel, which writes the gradient over the logits.
    layer_norm, rms_norm, swiglu, rotary: Liger-Kernel's, on CUDA, if the blocks are not compiled.
    gelu: compiled by torch.compile, if the blocks are not.
    compile: torch.compile, one block at a time, which works at every stage and with every technique. On a CPU, "auto" compiles only blocks
        with components that have no fused kernel there: RMSNorm, SwiGLU, rotary positions.

    "auto" leaves out the kernels of components that the model does not have; true for one of them is refused.
    """

    declaration = Declaration(
        section="fused_kernels",
        keys=dict.fromkeys(("attention", "cross_entropy", *COMPONENTS, "compile"), SWITCH),
        same_algorithm=True,
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.run = run
        self.asked = {name: section.get(name, False) for name in self.declaration.keys}
        if not any(self.asked.values()):
            raise ValueError(f"'fused_kernels' switches no kernel on; write \"auto\", or true for some of {', '.join(self.asked)}")
        for name, (field, component) in COMPONENTS.items():
            has = getattr(run.shape, field)
            if name == "layer_norm" and not run.shape.bias:
                has += " without biases"  # which Liger-Kernel's does not support
            if self.asked[name] is True and has != component:
                raise ValueError(f"'fused_kernels.{name}' is a kernel of {component}, and this model has {has}; write \"auto\" or false")
            self.asked[name] = self.asked[name] if has == component else False
        # With dropout only CUDA has a fused kernel for attention.
        cuda_only = dict.fromkeys(LIGER_KERNELS, TRITON_CAPABILITY) | ({"attention": (0, 0)} if run.shape.dropout else {})
        self.needs_cuda = {f"fused_kernels.{name}": capability for name, capability in cuda_only.items() if self.asked[name] is True}
        self.missing_packages = tuple(self._missing())

    def _missing(self) -> Iterator[str]:
        """Packages that keys set to true need and that are not installed."""
        for name in LIGER_KERNELS:
            if self.asked[name] is True and not _has_liger():
                yield f"'fused_kernels.{name}' needs liger-kernel, which is not installed; {INSTALL}, or write \"auto\""
        for name in ("gelu", "compile", *LIGER_KERNELS):
            if self.asked[name] is True and (lacking := _lacking_to_compile()):
                yield f"'fused_kernels.{name}' needs {lacking}, or write \"auto\""

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        """Return the memory of blockwise attention and of the loss head.

        For short sequences, attention keeps the probabilities of each block. The loss head holds a part of its logits, some rows in fp32,
        and the gradients of its input and weight, which are summed in fp32 if there are several parts.
        """
        w, B, T = 4 if self.run.precision == "fp32" else 2, self.run.micro_batch_size, model.seq_len
        terms = {}
        if self.asked["attention"] and device == "cpu" and not model.dropout:
            pairs = sum((end - start) * end for start, end, _, _ in attention_blocks([T]))  # of queries and keys
            terms["attention"] = B * model.n_head // self.run.ranks_per_row * pairs * w if T <= KEPT_LENGTH else 0
        if self.asked["cross_entropy"]:
            tokens, V, C = B * T // self.run.ranks_per_row, model.padded_vocab_size, model.d_model
            rows = min(tokens, max(1, LOGITS_BYTES // (V * w)))
            weight = V * C * (w if device == "cpu" and self.run.precision == "bf16" else 4) + (V * C * 4 if rows < tokens else 0)
            terms["loss_head"] = rows * V * w + min(ROWS, tokens) * V * 4 + tokens * C * w + weight
        return terms

    def _say(self, name: str, what: str) -> None:
        self.notes = (*self.notes, f"fused_kernels.{name}: {what}")

    def _skip(self, name: str, why: str) -> None:
        self._say(name, f"skipped, {why}")

    def prepare(self, model: GPT) -> None:
        from deepspeed.accelerator import get_accelerator  # a second to import, for which --help should not wait

        self.device = get_accelerator().device_name()
        self.notes = ()
        for name, asked in self.asked.items():
            if asked and name in LIGER_KERNELS:
                self._use_liger(name, model)
            elif asked:
                getattr(self, f"_use_{name}")(model)

    # --- one kernel each ---------------------------------------------------------------------------------------------------------------

    def _use_attention(self, model: GPT) -> None:
        if self.device == "cpu" and not self.run.shape.dropout:
            for block in cast("Iterable[Block]", model.h):
                block.attn.attend = blockwise_attention
            return self._say("attention", f"blocks of {QUERIES} queries")
        self._say("attention", "torch's, as without this key")

    def _use_cross_entropy(self, model: GPT) -> None:
        compiled = self.device == "cuda" and find_spec("triton") is not None and not _lacking_to_compile()
        kernel = partial(in_one, write=torch.compile(write_gradient)) if compiled else in_rows
        model.lm_head.loss = partial(linear_cross_entropy, kernel=kernel)
        self._say("cross_entropy", f"the gradient is written over the logits{', by a compiled kernel' if compiled else ''}")

    def _use_liger(self, name: str, model: GPT) -> None:
        """Use Liger-Kernel's kernel, or note why not."""
        function, instead = LIGER_KERNELS[name]
        if self._compiles():
            return self._skip(name, "it is compiled with its block")
        if self.device != "cuda":
            return self._skip(name, f"{instead} on a {self.device}, and Liger-Kernel's needs CUDA")
        if not _has_liger():
            return self._skip(name, f"liger-kernel is not installed ({INSTALL})")
        if lacking := _lacking_to_compile():  # Triton compiles what launches a kernel
            return self._skip(name, f"it needs {lacking}")
        module, _, function = function.partition(".")
        kernel = getattr(import_module(f"liger_kernel.ops.{module}"), function)  # an optional dependency
        for part in model.modules():
            if name == "layer_norm" and isinstance(part, nn.LayerNorm):
                part.forward = _liger_layer_norm(part, kernel)  # type: ignore[method-assign]
            elif name == "rms_norm" and isinstance(part, nn.RMSNorm):
                part.forward = _liger_rms_norm(part, kernel)  # type: ignore[method-assign]
            elif name == "swiglu" and isinstance(part, Block):
                part.mlp.act.forward = kernel.apply
            elif name == "rotary" and isinstance(part, Block):
                part.attn.rotate = partial(liger_rotate, kernel)
        self._say(name, "Liger-Kernel's")

    def _use_gelu(self, model: GPT) -> None:
        if self._compiles():
            return self._skip("gelu", "it is compiled with its block")
        if lacking := _lacking_to_compile():
            return self._skip("gelu", f"it needs {lacking}")
        for block in cast("Iterable[Block]", model.h):
            block.mlp.act = CompiledGELU()
        self._say("gelu", "compiled by torch.compile; the first step waits for it")

    def _compiles(self) -> bool:
        """Whether blocks are compiled."""
        if self.asked["compile"] != "auto":
            return bool(self.asked["compile"])
        return not _lacking_to_compile() and (self._has_unfused() if self.device == "cpu" else find_spec("triton") is not None)

    def _has_unfused(self) -> bool:
        """Whether the model has a component that no other kernel fuses on a CPU."""
        return any(getattr(self.run.shape, field) == component for field, component in (COMPONENTS[name] for name in FUSED_BY_COMPILE))

    def _use_compile(self, model: GPT) -> None:
        if not self._compiles():
            if self.device == "cpu" and not self._has_unfused():
                return self._skip("compile", "on a CPU it is not faster than the other kernels for this model")
            return self._skip("compile", f"it needs {_lacking_to_compile() or 'triton, which is not installed'}")
        for block in cast("Iterable[Block]", model.h):
            if model.config.document_end is not None and model.config.seq_len > accounting.DENSE_LENGTH:
                block.attn.attend = torch.compiler.disable(block.attn.attend)  # the lengths of documents would be constants of a graph
            if model.config.n_expert:
                block.mlp.forward = torch.compiler.disable(block.mlp.forward)  # type: ignore[method-assign]  # so would loads
            block.compile()
        self._say("compile", "a block at a time; the first step takes longer")


def _has_liger() -> bool:
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def _lacking_to_compile() -> str:
    """What torch.compile lacks here, and the fix; empty if nothing. It needs a C++ compiler and Python's headers on a GPU too, to build the
    code that launches its kernels."""
    if shutil.which(compiler := os.environ.get("CXX", "g++")) is None:  # torch tries no other
        return f"a C++ compiler, and {compiler!r} is not on the path; install g++, or set CXX"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():  # where torch and Triton look
        return "Python's headers; install them (python3-dev on Debian and Ubuntu)"
    if " " in tempfile.gettempdir() and not torch.cuda.is_available():  # torch 2.13 does not quote the paths that it compiles on a CPU
        return f"a folder for temporary files without a space in its name, and it is {tempfile.gettempdir()!r}; set TMPDIR"
    return ""


def _liger_layer_norm(norm: Any, function: Any) -> Any:
    """A `forward` for `norm`, an nn.LayerNorm: x (..., C) -> (..., C)."""
    return lambda x: function.apply(x, norm.weight, norm.bias, norm.eps)


def _liger_rms_norm(norm: Any, function: Any) -> Any:
    """A `forward` for `norm`, an nn.RMSNorm: x (..., C) -> (..., C). In fp32 throughout, as torch's; it does not write into gradients."""
    return lambda x: function.apply(x, norm.weight, norm.eps, 0.0, "gemma", False)


def liger_rotate(
    function: Any, q: torch.Tensor, k: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`model.layout.rotate` by Liger-Kernel's function, which takes (B, heads, T, d_head), and half of the cosines."""
    cos, sin = (part.squeeze(2) for part in rotation)  # (., T, 1, d_head / 2) -> (., T, d_head / 2)
    q, k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, 2 * cos.shape[-1])
    return q.transpose(1, 2), k.transpose(1, 2)
