"""Tokens are drawn as documented, and the KV cache changes none of them."""

from __future__ import annotations

import pytest
import torch

from model import cache as cache_of_model
from model.cache import KVCache
from model.gpt import GPT
from model.presets import ARCHITECTURES, GPTConfig
from model.sampling import Sampling, stream
from tests.helpers import config_of, in_transformers, recomputed

END = 7
TINY = {"n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 16, "vocab_size": 100}
CONFIGS = [GPTConfig(**TINY), GPTConfig(**TINY, document_end=END)]
GROUPED = {"n_layer": 2, "n_head": 4, "d_model": 32, "seq_len": 16, "n_kv_head": 2}
CONFIGS += [config_of("llama", GROUPED, vocab_size=100), config_of("qwen3", GROUPED, vocab_size=100, document_end=END)]
IDS = ["one_text", "documents", "llama", "qwen3_documents"]
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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the KV cache


@pytest.mark.parametrize("ends", [[16], list(range(1, 17)), [5, 6, 7, 11, 16], [1, 16], [9, 4, 12, 12]], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("piece", [3, 1024])
def test_the_logits_are_those_of_the_whole_text(config, ends, piece, monkeypatch):
    """Read in parts, at most `piece` tokens at a time; the last list also goes back to an earlier length, and repeats one."""
    monkeypatch.setattr(cache_of_model, "PIECE", piece)
    model, rows = model_of(config), []
    model.h[0].ln_1.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    tokens = torch.randint(0, 100, (3, 16), generator=torch.Generator().manual_seed(1))
    tokens[0, 4] = tokens[0, 5] = tokens[1, 0] = tokens[2, 15] = END
    tokens[2, :3] = tokens[1, :3]
    cache = KVCache(model)
    for row in tokens:
        for end in ends:
            rows.clear()
            found = cache(row[:end].tolist())
            assert max(rows) <= piece
            torch.testing.assert_close(found, model(row[None, :end])[0, -1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, 20, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [[3], [1, 2, END, 4], list(range(20, 60))], ids=["one", "short", "longer_than_the_context"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_tokens_are_the_same_with_and_without_it(config, prompt, sampling):
    model = model_of(config)
    texts = [
        list(stream(next_logits, prompt, 40, sampling, seeded(1), END))
        for next_logits in (KVCache(model), recomputed(model, config.seq_len))
    ]
    assert texts[0] == texts[1]


def test_every_token_is_computed_once():
    """The prompt once for all samples, then one token a step."""
    model, rows = model_of(CONFIGS[0]), []
    model.h[0].ln_1.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    cache = KVCache(model)
    for seed in (1, 2):
        list(stream(cache, [1, 2, 3, 4, 5], 10, Sampling(), seeded(seed)))
    assert rows == [5] + 9 * [1] + 10 * [1]


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.3)], ids=str)
def test_the_cache_on_a_gpu(dtype, tolerance):
    """fp16 rounds activations of order 10 to 1e-2."""
    config = GPTConfig(2, 4, 256, 64, vocab_size=1000)
    model, other = model_of(config).cuda(), model_of(config).to("cuda", dtype)
    plain, cache, ids = recomputed(lambda tokens: model(tokens.cuda()), 64), KVCache(other), [1, 2, 3, 4]
    for token in torch.randint(1000, (80,), generator=seeded(0)).tolist():
        torch.testing.assert_close(cache(ids).float(), plain(ids), rtol=0, atol=tolerance)
        ids.append(token)


# --- a text


def test_a_text_ends_with_its_end():
    order = iter([1, END, 3])

    def next_logits(ids):
        return torch.nn.functional.one_hot(torch.tensor(next(order)), 10).float()

    assert list(stream(next_logits, [1], 100, Sampling(0.0), end=END)) == [1, END]


def test_a_text_follows_its_generator_and_has_a_beginning():
    model = model_of(CONFIGS[0])
    first, again, other = (list(stream(KVCache(model), [1], 20, Sampling(), seeded(seed))) for seed in (0, 0, 1))
    assert first == again != other
    with pytest.raises(ValueError, match="prompt is empty"):
        next(stream(KVCache(model), [], 1, Sampling()))


# --- how a token is drawn


def test_top_p_keeps_the_fewest_likeliest_that_reach_it():
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()

    def drawn(**options) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {Sampling(**options).pick(logits, generator) for _ in range(500)}

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
        first, second = (Sampling(1.0, 50, 0.95).pick(one, seeded(seed)) for one in (logits, other))
        assert first == second


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_that_of_transformers(architecture):
    config = config_of(architecture, {"n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 64}, vocab_size=100)
    model = model_of(config)
    theirs = in_transformers(model)
    prompt = [1, 2, 3]
    ours = list(stream(KVCache(model), prompt, 50, Sampling(0.0)))
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours == expected[0, 3:].tolist()
