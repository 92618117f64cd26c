"""The validation loss of the full model at full length."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from data_pipeline.loader import Loader
from launch.config.run_config import RunConfig
from launch.training.distributed import Collectives
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer


class Evaluation:
    """The loss on fixed validation windows, the same for every number of ranks.

    windows: the number that an evaluation during the run reads, at most `eval_batches` global batches. all_windows: of the whole split.
    """

    def __init__(self, config: RunConfig, collectives: Collectives, observer: Observer):
        self.config, self.collectives, self.observer = config, collectives, observer
        corpus = config.corpus
        self.loader = Loader(
            corpus.val, None, config.shape.seq_len, corpus.vocab_size, collectives.rank, collectives.world_size, collectives.device
        )
        self.all_windows = corpus.val.windows(config.shape.seq_len)
        self.windows = min(config.eval_batches * config.global_batch_size, self.all_windows)

    @torch.no_grad()
    def loss(self, engine: TrainingEngine, step: int, whole: bool = False) -> float:
        """Mean cross-entropy in nats per token. Its traffic is not counted. whole: of the whole split, which no observer watches."""
        windows, watching = (self.all_windows, nullcontext()) if whole else (self.windows, self.observer.evaluation(step))
        engine.deepspeed.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.collectives.device)  # sum over windows, windows
        with self.collectives.uncounted(), engine.techniques.evaluation_weights(), watching:
            for tokens, weight in self.loader.validation_batches(windows, self.config.micro_batch_size):
                loss = engine.loss(tokens)
                if weight:
                    if not whole:
                        self.observer.after_evaluated_batch()
                    total += torch.stack([loss.double() * weight, torch.full_like(total[0], weight)])
            self.collectives.all_reduce(total)
        engine.deepspeed.train()
        return float(total[0] / total[1])
