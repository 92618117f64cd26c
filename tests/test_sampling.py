"""Tokens are drawn as the flags say, and keys and values that are kept change none of them."""

from __future__ import annotations

import math

import pytest
import torch

from model import gpt
from model.cache import Reader, linear_of_few_rows
from model.gpt import GPT
from model.presets import GPTConfig
from model.sampling import Cached, Followers, Recomputing, Sampling, stream, window_start

END = 7
TINY = {"n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 16, "vocab_size": 100}
CONFIGS = [GPTConfig(**TINY), GPTConfig(**TINY, document_end=END)]
IDS = ["one_text", "documents"]
#: Of logits of order 10 in fp32, whose sums are taken in other orders: measured 4e-6.
TOLERANCE = 5e-5


def model_of(config: GPTConfig) -> GPT:
    """With weights 8 times larger: of initial ones, attention is all but uniform, and what it sees would not matter."""
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def seeded(*seeds: int) -> list[torch.Generator | None]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# --- keys and values that are kept


@pytest.mark.parametrize("parts", [[16], [1] * 16, [5, 1, 1, 4, 5], [1, 15]], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_what_is_read_in_parts_is_what_is_read_at_once(config, parts):
    model = model_of(config)
    tokens = torch.randint(0, 100, (3, 16), generator=torch.Generator().manual_seed(1))
    tokens[0, 4] = tokens[0, 5] = tokens[1, 0] = tokens[2, 15] = END
    reader, end = Reader(model), 0
    for size in parts:
        end += size
        logits = reader.read(tokens[:, end - size : end])
        torch.testing.assert_close(logits, model(tokens[:, :end])[:, -1], rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match="17 tokens: this model has positions for 16"):
        reader.read(tokens[:, :1])


@pytest.mark.parametrize("slide", [1, 5, 16])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, 20, 0.9, 3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [[3], [1, 2, END, 4], list(range(20, 60))], ids=["one", "short", "longer_than_the_context"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_tokens_are_the_same_with_and_without_it(config, prompt, sampling, slide):
    model = model_of(config)
    texts = [
        list(stream(engine, prompt, 40, sampling, seeded(1, 2, 3), END))
        for engine in (Cached(model, slide), Recomputing(model, config.seq_len, slide))
    ]
    assert texts[0] == texts[1]


def test_it_leaves_the_model_as_it_was():
    model = model_of(CONFIGS[0])
    reader = Reader(model)
    reader.read(torch.tensor([[1, 2, 3]]))
    assert all(block.attn.attend is gpt.attend for block in model.h)
    with pytest.raises(IndexError):
        reader.read(torch.tensor([[1000]]))
    model.block_runner = lambda blocks, x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        reader.read(torch.tensor([[1]]))
    assert all(block.attn.attend is gpt.attend for block in model.h)


def test_every_token_is_computed_once():
    """The prompt once for all samples, then one token a sample and step."""
    model, rows = model_of(CONFIGS[0]), []
    model.h[0].attn.c_attn.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[:2].numel()))
    list(stream(Cached(model), [1, 2, 3, 4, 5], 10, Sampling(), seeded(1, 2, 3)))
    assert rows == [5] + 9 * [3]


@pytest.mark.parametrize("shape", [(1, 35, 35), (3, 36, 105), (8, 48, 64), (2, 7, 1)], ids=str)
def test_few_rows_are_multiplied_as_many(shape):
    rows, n_in, n_out = shape
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((rows, 1, n_in), (n_out, n_in), (n_out,)))
    for b in (bias, None):
        torch.testing.assert_close(linear_of_few_rows(x, weight, b), torch.nn.functional.linear(x, weight, b), atol=1e-5, rtol=0)


# --- samples


def test_a_sample_depends_on_its_own_seed_alone():
    model = model_of(CONFIGS[0])

    def texts(*seeds: int) -> list[list[int]]:
        drawn = list(stream(Cached(model), [1, 2], 30, Sampling(1.0, 50), seeded(*seeds)))
        return [[tokens[row] for tokens in drawn] for row in range(len(seeds))]

    together = texts(5, 6, 7)
    assert [texts(seed)[0] for seed in (5, 6, 7)] == together
    assert together[0] != together[1] != together[2]


def test_a_sample_ends_with_its_end_and_all_of_it_when_all_have():
    order = iter([[1, END, 3], [END, 9, 3], [9, 9, END], [9, 9, 9]])

    def next_logits(texts):
        return torch.nn.functional.one_hot(torch.tensor(next(order)), 10).float()

    drawn = list(stream(next_logits, [1], 100, Sampling(0.0), seeded(1, 2, 3), END))
    assert drawn == [[1, END, 3], [END, None, 3], [None, None, END]]


# --- how a token is drawn


def test_top_p_keeps_the_fewest_likeliest_that_reach_it():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()

    def drawn(**options) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {Sampling(**options).pick(logits, generator=generator) for _ in range(500)}

    assert drawn(top_p=1.0) == {0, 1, 2, 3}
    assert drawn(top_p=0.9001) == {0, 1, 2, 3}
    assert drawn(top_p=0.89) == {1, 2, 3}
    assert drawn(top_p=0.69) == {1, 2}
    assert drawn(top_p=0.39) == drawn(top_p=1e-9) == {1}
    assert drawn(top_p=0.55, top_k=2) == {1}  # of the two likeliest, 4/7 is the first one's
    assert drawn(top_p=0.6, top_k=2) == {1, 2}


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(None, 0.7, 1.0), (12, 0.8, 0.6), (5, None, 1.5), (None, 0.3, 2.0)])
def test_what_can_be_drawn_is_what_transformers_would_draw(top_k, top_p, temperature, monkeypatch):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p else []
    seen = {}

    def note(probabilities, count, generator=None):
        seen["probabilities"] = probabilities
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", note)
    for seed in range(20):
        logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
        expected = logits[None]
        for warper in chain:
            expected = warper(None, expected)
        Sampling(temperature, top_k, top_p).pick(logits)
        found = seen["probabilities"] / seen["probabilities"].sum()
        torch.testing.assert_close(found, expected.softmax(-1)[0])


def test_a_rounding_that_swaps_two_tokens_changes_no_draw():
    """As the cache's other order of sums does: two tokens as likely as each other, on either side of a third."""
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2))
    logits[20] = logits[150] = logits[77].item()
    other = logits.clone()
    other[20] += 1e-6
    for seed in range(200):
        first, second = (Sampling(1.0, 50, 0.95).pick(one, generator=torch.Generator().manual_seed(seed)) for one in (logits, other))
        assert first == second


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_tokens_in_a_row_occur_twice(size):
    from transformers import NoRepeatNGramLogitsProcessor

    theirs = NoRepeatNGramLogitsProcessor(size)
    ids = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(size)).tolist()
    text: list[int] = []
    followers = Followers(size, text)
    for token in ids:
        text.append(token)
        followers.grown()
        banned = followers.banned()
        assert banned == Followers(size, text).banned()  # as for a prompt
        assert banned == (theirs(torch.tensor([text]), torch.zeros(1, 6)) == -math.inf)[0].nonzero().flatten().tolist()


def test_greedy_text_without_repetition_is_that_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    from model.hf import hf_config, to_hf_state_dict

    config = GPTConfig(**TINY | {"seq_len": 64})
    model = model_of(config)
    theirs = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(config))).eval()
    theirs.load_state_dict(to_hf_state_dict(model.state_dict(), config))
    prompt = [1, 2, 3]
    for size in (None, 2):
        ours = [tokens[0] for tokens in stream(Cached(model), prompt, 50, Sampling(0.0, no_repeat_ngram_size=size), seeded(0))]
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=50, do_sample=False, no_repeat_ngram_size=size or 0, eos_token_id=None, pad_token_id=0
        )
        assert ours == expected[0, 3:].tolist()


def test_a_token_without_a_choice_left_is_drawn_nevertheless():
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert Sampling(0.0).pick(logits, [1]) == 2
    assert Sampling(0.0).pick(logits, [0, 1, 2]) == 1
    assert Sampling(1.0, 3, 0.9).pick(logits, [0, 1]) == 2


@pytest.mark.parametrize("options", [{"temperature": 1e-39}, {"temperature": 1e-320}, {"top_p": 1e-300}], ids=str)
def test_the_least_that_is_allowed_takes_the_likeliest(options):
    assert Sampling(**options).pick(torch.tensor([0.0, 2.0, 1.0])) == 1


@pytest.mark.parametrize(("length", "slide", "start"), [(16, 1, 0), (17, 1, 1), (30, 1, 14), (17, 5, 5), (21, 5, 5), (22, 5, 10)])
def test_the_window_moves_by_what_it_is_told(length, slide, start):
    assert window_start(length, 16, slide) == start


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size is 0"),
    ],
)
def test_nonsense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


# --- DeepSpeed's blocks


def test_deepspeeds_blocks_give_the_same_logits(monkeypatch):
    """Its own blocks and its own cache, with what it computes in place of kernels where it has none: those want CUDA.

    There GELU is the exact one, which moves these logits of order 10 by at most 1e-3; a token at a wrong position moves them by 1 and more.
    """
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    from launch.trained_model.inference import DeepSpeedInference

    monkeypatch.setattr(BaseOp, "inference_module", object())  # has no kernel
    for config in CONFIGS:
        model = model_of(config)
        texts = [[9, END, 2, 3], [9, END, 2, 3]]
        plain, theirs = Recomputing(model, 16, 4), DeepSpeedInference(model_of(config), 4, rows=2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(24):
            torch.testing.assert_close(theirs(texts), plain(texts), rtol=0, atol=5e-3)
            for ids in texts:
                ids.append(int(torch.randint(8, 100, (1,), generator=generator)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_deepspeeds_kernels_give_the_same_logits(dtype):
    """fp16 rounds activations of order 10 to 1e-2."""
    from launch.trained_model.inference import DeepSpeedInference

    config = GPTConfig(2, 4, 256, 64, vocab_size=1000)
    model = model_of(config).cuda()
    plain = Recomputing(lambda tokens: model(tokens.cuda()), 64, 16)
    theirs = DeepSpeedInference(model_of(config).to("cuda", dtype), 16, rows=1)
    for prompt in ([5], [1, 2, 3, 4]):
        texts = [list(prompt)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(80):
            torch.testing.assert_close(theirs(texts).float(), plain(texts).float(), rtol=0, atol=2e-2 if dtype is torch.float32 else 0.3)
            texts[0].append(int(torch.randint(1000, (1,), generator=generator)))
