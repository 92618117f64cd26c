"""The validation loss, and a sample of text, by the full model at full length. All ranks call these functions together."""

from __future__ import annotations

import torch

from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from data_pipeline.tokenizer import Tokenizer
from launch.config.run_config import RunConfig
from launch.training.distributed import Collectives
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from model.sampling import generate


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


def sample_text(engine: TrainingEngine, config: RunConfig, collectives: Collectives) -> str:
    """`config.prompt` and `config.sample_tokens` tokens sampled after it (temperature 0.8, top-k 50), as text.

    If a host has no tokenizer for the corpus, or the tokenizer cannot encode the prompt, the text is the reason.
    """
    missing = ""
    try:
        tokenizer = Tokenizer.load(config.corpus.path, config.corpus.manifest["tokenizer"])
        start = 0 if config.corpus.eot_id is None else config.corpus.eot_id
        prompt = [start, *tokenizer.encode(config.prompt).tolist()]
    except DataError as reason:
        missing = str(reason)
    with collectives.uncounted():  # one host may have tiktoken's file and another not, and the model runs on all ranks or on none
        if collectives.any(bool(missing)):
            return f"(none: {missing or 'another host lacks the tokenizer'})"
    generator = torch.Generator().manual_seed(config.seed)
    engine.deepspeed.eval()
    with collectives.uncounted(), engine.techniques.evaluation_weights():
        ids = generate(
            lambda tokens: engine.deepspeed(tokens.to(collectives.device)),
            prompt,
            config.sample_tokens,
            config.shape.seq_len,
            temperature=0.8,
            top_k=50,
            generator=generator,
        )
    engine.deepspeed.train()
    return tokenizer.decode(ids[1:])
