"""The validation loss of the full model at full length."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from data_pipeline.loader import Loader
from launch.config.run_config import RunConfig
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.ranks.distributed import Collectives

#: Evaluated batches of the whole split between two checks for a signal, which all ranks make together.
BATCHES_BETWEEN_SIGNALS = 16


class Evaluation:
    """The loss on fixed validation windows, the same for every number of ranks.

    windows: number in an evaluation during the run, at most `eval_batches` global batches. all_windows: number in the whole split.
    """

    def __init__(self, config: RunConfig, collectives: Collectives, observer: Observer):
        self.config, self.collectives, self.observer = config, collectives, observer
        corpus = config.corpus
        self.loader = Loader(
            corpus.val, None, config.shape.seq_len, corpus.vocab_size, collectives.rank, collectives.world_size, collectives.device
        )
        self.all_windows = corpus.val.windows(config.shape.seq_len)
        self.windows = min(config.eval_batches * config.global_batch_size, self.all_windows)

    def loss(self, engine: TrainingEngine, step: int) -> float:
        """Mean cross-entropy in nats per token. Its traffic is not counted."""
        with self.observer.evaluation(step):
            return self._mean(engine, self.windows, after_batch=self.observer.after_evaluated_batch)[0]

    def loss_of_whole_split(self, engine: TrainingEngine, agree_to_stop: Callable[[], int]) -> tuple[float, int]:
        """The loss on the whole split, without observers, and the signal that stopped the evaluation (0: none).

        agree_to_stop: returns the signal for which all ranks stop; all call it together, every `BATCHES_BETWEEN_SIGNALS` batches.
        """
        return self._mean(engine, self.all_windows, agree_to_stop=agree_to_stop)

    @torch.no_grad()
    def _mean(
        self,
        engine: TrainingEngine,
        windows: int,
        after_batch: Callable[[], None] = lambda: None,
        agree_to_stop: Callable[[], int] = lambda: 0,
    ) -> tuple[float, int]:
        """The mean over `windows` windows, and the signal that stopped it (0: none); the mean is NaN if it was stopped.

        All ranks run the same number of batches. A rank whose last batch is a filler does not call `after_batch` for it.
        """
        engine.ds_engine.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.collectives.device)  # sum over windows, windows
        with engine.techniques.evaluation_weights():
            for number, (tokens, weight) in enumerate(self.loader.validation_batches(windows, self.config.micro_batch_size), 1):
                loss = engine.loss(tokens)
                if weight:
                    total += torch.stack([loss.double() * weight, torch.full_like(total[0], weight)])
                    after_batch()
                if number % BATCHES_BETWEEN_SIGNALS == 0 and (stopped := agree_to_stop()):
                    return math.nan, stopped
            self.collectives.all_reduce(total)
        engine.ds_engine.train()
        return float(total[0] / total[1]), 0
