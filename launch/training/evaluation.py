"""The validation loss of the full model at full length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from data_pipeline.loader import Loader
from launch.training.engine import TrainingEngine

#: Evaluated batches of the whole split between two checks for a signal, which all ranks make together.
BATCHES_BETWEEN_SIGNALS = 16


class Evaluation:
    """The loss on fixed validation windows, the same for every number of ranks.

    windows: number in an evaluation during the run, at most `eval_batches` global batches. all_windows: number in the whole split.
    sources: the names of the sources of a mixture. No window has tokens of two of them.
    """

    def __init__(self, engine: TrainingEngine):
        self.engine, self.collectives = engine, engine.collectives
        config, corpus, length = engine.config, engine.config.corpus, engine.config.shape.seq_len
        data_rank, device = config.data_rank(engine.collectives.rank), engine.collectives.device
        self.loader = Loader(corpus.val, None, length, corpus.vocab_size, data_rank, engine.data_ranks, device)
        self.all_windows = corpus.val.windows(length)
        self.windows = min(config.eval_batches * config.global_batch_size, self.all_windows)
        self.sources = corpus.names
        self._ends = np.cumsum(corpus.val.group_windows(length, len(corpus.mixture)))  # windows are numbered source by source

    def losses(self) -> dict[str, float]:
        """`val_loss`, the mean cross-entropy in nats per token; of a mixture also `val_loss/NAME`, that of the windows of each source that
        has any; and what techniques measure. Their traffic is not counted."""
        return self._means(self.windows)[0] | self.engine.techniques.evaluation_metrics()

    def losses_of_whole_split(self, agree_to_stop: Callable[[], int]) -> tuple[dict[str, float], int]:
        """The losses on the whole split, and the signal that stopped the evaluation (0: none).

        agree_to_stop: returns the signal for which all ranks stop; all call it together, every `BATCHES_BETWEEN_SIGNALS` batches.
        """
        return self._means(self.all_windows, agree_to_stop)

    def windows_by_source(self, windows: int) -> list[np.ndarray]:
        """The numbers of `windows` windows of the split, those of each source."""
        numbers = self.loader.validation_windows(windows)
        return np.split(numbers, np.searchsorted(numbers, self._ends[:-1]))

    @torch.no_grad()
    def _means(self, windows: int, agree_to_stop: Callable[[], int] = lambda: 0) -> tuple[dict[str, float], int]:
        """The means over `windows` windows, and the signal that stopped it (0: none); no means if it was stopped.

        A batch has windows of one source. All ranks run the same number of batches; the last one of a rank and source may be a filler
        without weight.
        """
        engine = self.engine
        sums = torch.zeros(len(self._ends), 2, dtype=torch.float64, device=self.collectives.device)  # of each source: losses, windows
        engine.ds_engine.eval()
        with engine.techniques.common_weights():
            number = 0
            for source, of_source in zip(sums, self.windows_by_source(windows), strict=True):
                for tokens, weight in self.loader.validation_batches(of_source, engine.config.micro_batch_size):
                    loss = engine.loss(tokens)
                    if weight:
                        source += torch.stack([loss.double() * weight, torch.full_like(source[0], weight)])
                    number += 1
                    if number % BATCHES_BETWEEN_SIGNALS == 0 and (stop_signal := agree_to_stop()):
                        return {}, stop_signal
            self.collectives.all_reduce(sums)
        engine.ds_engine.train()
        total, seen = sums.sum(0).tolist()
        by_source = {f"val_loss/{name}": loss / count for name, (loss, count) in zip(self.sources, sums.tolist(), strict=False) if count}
        return {"val_loss": total / seen, **by_source}, 0
