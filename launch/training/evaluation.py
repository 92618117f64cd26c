"""The validation loss of the full model at full length."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from data_pipeline.loader import Loader
from launch.training.engine import TrainingEngine

#: Evaluated batches of the whole split between two checks for a signal, which all ranks make together.
BATCHES_BETWEEN_SIGNALS = 16


class Evaluation:
    """The loss on fixed validation windows, the same for every number of ranks.

    windows: number in an evaluation during the run, at most `eval_batches` global batches. all_windows: number in the whole split.
    """

    def __init__(self, engine: TrainingEngine):
        self.engine, self.collectives = engine, engine.collectives
        config, ranks = engine.config, engine.collectives
        corpus, length = config.corpus, config.shape.seq_len
        self.loader = Loader(corpus.val, None, length, corpus.vocab_size, ranks.rank, ranks.world_size, ranks.device)
        self.all_windows = corpus.val.windows(length)
        self.windows = min(config.eval_batches * config.global_batch_size, self.all_windows)

    def loss(self) -> float:
        """Mean cross-entropy in nats per token. Its traffic is not counted."""
        return self._mean(self.windows)[0]

    def loss_of_whole_split(self, agree_to_stop: Callable[[], int]) -> tuple[float, int]:
        """The loss on the whole split, and the signal that stopped the evaluation (0: none).

        agree_to_stop: returns the signal for which all ranks stop; all call it together, every `BATCHES_BETWEEN_SIGNALS` batches.
        """
        return self._mean(self.all_windows, agree_to_stop)

    @torch.no_grad()
    def _mean(self, windows: int, agree_to_stop: Callable[[], int] = lambda: 0) -> tuple[float, int]:
        """The mean over `windows` windows, and the signal that stopped it (0: none); the mean is NaN if it was stopped.

        All ranks run the same number of batches. The last one of a rank may be a filler without weight.
        """
        engine = self.engine
        engine.ds_engine.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.collectives.device)  # sum over windows, windows
        with engine.techniques.evaluation_weights():
            for number, (tokens, weight) in enumerate(self.loader.validation_batches(windows, engine.config.micro_batch_size), 1):
                loss = engine.loss(tokens)
                if weight:
                    total += torch.stack([loss.double() * weight, torch.full_like(total[0], weight)])
                if number % BATCHES_BETWEEN_SIGNALS == 0 and (stop_signal := agree_to_stop()):
                    return math.nan, stop_signal
            self.collectives.all_reduce(total)
        engine.ds_engine.train()
        return float(total[0] / total[1]), 0
