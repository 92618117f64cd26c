"""The validation loss of the full model at full length."""

from __future__ import annotations

import torch

from data_pipeline.loader import Loader
from launch.config.run_config import RunConfig
from launch.training.distributed import Collectives
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer


class Evaluation:
    """The loss on a fixed set of validation windows: `eval_batches` global batches, the same for every number of ranks."""

    def __init__(self, config: RunConfig, collectives: Collectives, observer: Observer):
        self.config, self.collectives, self.observer = config, collectives, observer
        corpus = config.corpus
        self.loader = Loader(
            corpus.val, None, config.shape.seq_len, corpus.vocab_size, collectives.rank, collectives.world_size, collectives.device
        )
        self.windows = min(config.eval_batches * config.global_batch_size, corpus.val.windows(config.shape.seq_len))

    @torch.no_grad()
    def loss(self, engine: TrainingEngine, step: int) -> float:
        """Mean cross-entropy in nats per token. Its traffic is not counted."""
        engine.deepspeed.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.collectives.device)  # sum over windows, windows
        with self.collectives.uncounted(), engine.techniques.evaluation_weights(), self.observer.evaluation(step):
            for tokens, weight in self.loader.validation_batches(self.windows, self.config.micro_batch_size):
                loss = engine.loss(tokens)
                if weight:
                    self.observer.after_evaluated_batch()
                    total += torch.stack([loss.double() * weight, torch.full_like(total[0], weight)])
            self.collectives.all_reduce(total)
        engine.deepspeed.train()
        return float(total[0] / total[1])
