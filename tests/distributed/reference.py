"""The plain PyTorch loop that the engine is held against: no DeepSpeed, no distributed, no code of ours but the model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from data_pipeline.sampler import shuffled_positions
from data_pipeline.shards import open_corpus
from model.gpt import GPT
from model.presets import GPTConfig


def reference_losses(
    corpus_path: Path, shape: dict, steps: int, batch: int, lr: float, warmup: int, seed: int, clip: float = 1.0
) -> list[float]:
    """Losses of `steps` steps in fp32 over the whole global batch at once, the gradient norm taken in fp64."""
    corpus = open_corpus(corpus_path)
    length = shape["seq_len"]
    data = np.concatenate(
        [np.fromfile(corpus.path / shard["file"], dtype=corpus.manifest["dtype"]) for shard in corpus.manifest["splits"]["train"]["shards"]]
    )
    order = shuffled_positions((len(data) - 1) // length, f"{corpus.fingerprint}:{seed}", 0, steps * batch)
    model = GPT(GPTConfig(**shape, vocab_size=corpus.vocab_size, init_seed=seed))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), eps=1e-8
    )
    losses = []
    for step in range(1, steps + 1):
        if step < warmup:
            rate = lr * step / warmup
        else:
            rate = 0.1 * lr + 0.9 * lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = [data[i * length : i * length + length + 1] for i in order[(step - 1) * batch : step * batch]]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
