"""A GPT on DeepSpeed's inference kernels (`deepspeed.init_inference` with `replace_with_kernel_inject`).

    python launch/generate.py runs/demo --prompt "def " --engine deepspeed --dtype fp16

DeepSpeed replaces the blocks of transformers' GPT2LMHeadModel by ones of its own, whose kernels keep keys and values themselves. They are
called here one after the other: the walk over the blocks in transformers 5 hands them arguments that DeepSpeed 0.19 takes for others (its
cache for a mask).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from launch.config.hardware import quiet_deepspeed
from launch.errors import UsageError, one_line
from launch.training.distributed import ROOT, load_extension
from model.gpt import GPT
from model.hf import hf_config, to_hf_state_dict
from model.sampling import window_start


class DeepSpeedInference:
    """The next token's logits of texts: a `model.sampling.NextLogits`, of always the same number of texts.

    Where documents are kept apart, a text is over when its document is: the kernels know one beginning for all rows.

    Args:
        model: on the device, in the dtype in which it is to be computed. Its weights are given to DeepSpeed.
        slide: tokens by which a full context moves on.
        rows: texts at a time; DeepSpeed makes room for so many.

    Raises:
        UsageError: the kernels cannot be built or used here, one line with DeepSpeed's reason.
    """

    def __init__(self, model: GPT, slide: int, rows: int):
        config = self.config = model.config
        self._slide, self._rows = slide, rows
        self._start, self._read = 0, 0  # the window's beginning in the texts, and how many of its tokens have been read
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
        quiet_deepspeed()
        from transformers import GPT2Config, GPT2LMHeadModel

        with torch.device("meta"):
            theirs = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(config)))
        theirs.load_state_dict(to_hf_state_dict(model.state_dict(), config), assign=True)
        theirs.tie_weights()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints what it replaces, and the standard output is the text's
                _load_kernels()
                import deepspeed

                engine = deepspeed.init_inference(
                    theirs.eval(),
                    dtype=model.wte.weight.dtype,
                    replace_with_kernel_inject=True,
                    max_out_tokens=config.seq_len,
                )
        except Exception as reason:  # compilers, drivers, DeepSpeed's own checks
            raise UsageError(f"--engine deepspeed: {type(reason).__name__}: {one_line(str(reason))[:300]}; leave it out") from None
        self._model: Any = engine.module

    @torch.no_grad()
    def __call__(self, texts: Sequence[list[int]]) -> torch.Tensor:
        length, end = len(texts[0]), self.config.document_end
        assert len(texts) == self._rows, (len(texts), self._rows)
        start = window_start(length, self.config.seq_len, self._slide)
        if end is not None:
            # The kernels see a whole text: what belongs to an earlier document is not given to them. A sample that is over has ended one
            # since, and nobody reads how its row goes on.
            start = max(start, min(max((place + 1 for place, token in enumerate(ids[:-1]) if token == end), default=0) for ids in texts))
        if start != self._start or self._start + self._read != length - 1 or not self._read:
            self._start, self._read = start, 0
            self._forget()
        tokens = torch.tensor([ids[self._start + self._read :] for ids in texts], device=self._model.lm_head.weight.device)
        positions = torch.arange(self._read, self._read + tokens.shape[1], device=tokens.device)
        transformer = self._model.transformer
        x = transformer.wte(tokens) + transformer.wpe(positions)  # (B, T, C)
        for block in transformer.h:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        self._read += tokens.shape[1]
        return self._model.lm_head(transformer.ln_f(x[:, -1:]))[:, 0]  # (B, 1, V) -> (B, V)

    def _forget(self) -> None:
        """A text of one token is no prompt to the kernels, which then go on from what they count as read."""
        from deepspeed.model_implementations.transformers.ds_transformer import DeepSpeedTransformerInference

        workspace = DeepSpeedTransformerInference.workspace
        if workspace is not None and workspace.is_allocated():
            DeepSpeedTransformerInference.reset_cache()


def _load_kernels() -> None:
    """Build DeepSpeed's `transformer_inference`, or load it where it has been built."""
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    if BaseOp.inference_module is None:  # where DeepSpeed's own operations look for it
        load_extension("InferenceBuilder")
