"""The similarity of each block's input and output is that of the model on the validation set, the same on any number of ranks."""

from __future__ import annotations

import json

import pytest

from tests.distributed.test_histograms import flags


def lines(tmp_path, name: str) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / name / "blocks.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("config", ["zero1_fp32", "zero3_fp32"])
def test_it_is_the_same_on_one_and_two_ranks_and_changes_no_loss(config, one_rank, two_ranks, corpus, tmp_path):
    watched = ["--eval_every", "2", "--eval_batches", "1", "--block_similarity"]
    found = {}
    for name, pool in (("one", one_rank), ("two", two_ranks)):
        pool.train(flags(corpus, tmp_path, config, name, *watched))
        found[name] = lines(tmp_path, name)
    assert [line["step"] for line in found["one"]] == [0, 2, 4]
    for one, two in zip(found["one"], found["two"], strict=True):
        for key in ("norm_ratio", "cosine_similarity"):
            assert one[key] == pytest.approx(two[key], abs=1e-6)
            assert len(one[key]) == 3
        assert all(0 < value <= 1 for value in one["cosine_similarity"])
    plain = two_ranks.train(flags(corpus, tmp_path, config, "plain", *watched[:4]))
    seen = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "val_loss", "bytes_sent"):
        assert [line.get(key) for line in plain] == [line.get(key) for line in seen]
    assert (tmp_path / "two" / "blocks.png").stat().st_size > 10_000


def test_it_is_what_the_blocks_do():
    """By hand: a block that doubles and one that turns by 90 degrees."""
    from types import SimpleNamespace

    import torch
    from torch import nn

    from launch.training.similarity import BlockSimilarity

    class Doubling(nn.Module):
        def forward(self, x):
            return 2 * x

    class Turning(nn.Module):
        def forward(self, x):
            return torch.stack([-x[..., 1], x[..., 0]], dim=-1)

    class Alone:
        device = torch.device("cpu")

        def all_reduce(self, tensor):
            return tensor

        def write_similarity(self, line):
            self.line = line

    alone = Alone()
    blocks = nn.ModuleList([Doubling(), Turning()])
    similarity = BlockSimilarity(alone)
    similarity.start(SimpleNamespace(deepspeed=SimpleNamespace(module=SimpleNamespace(h=blocks)), collectives=alone))
    with similarity.evaluation(7):
        for taken in (True, False):  # the second is a filler
            x = torch.randn(3, 5, 2) if taken else torch.full((1, 5, 2), torch.nan)
            for block in blocks:
                x = block(x)
            if taken:
                similarity.after_evaluated_batch()
    assert alone.line["step"] == 7
    assert alone.line["norm_ratio"] == pytest.approx([2, 1])
    assert alone.line["cosine_similarity"] == pytest.approx([1, 0], abs=1e-6)


def test_it_wants_evaluations(tmp_path):
    from launch.config.run_config import resolve
    from launch.errors import UsageError

    with pytest.raises(UsageError, match="--block_similarity is measured at evaluations, and --eval_every 0 makes none"):
        resolve(["--deepspeed_config", "ds_configs/zero1_bf16.json", "--eval_every", "0", "--block_similarity", "--explain"])
