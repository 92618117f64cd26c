"""A mixture of experts: what the router chooses, how experts are balanced, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from launch.config.run_config import resolve
from model.accounting import flops_per_token, in_words, parameter_count
from model.experts import Balance, ExpertLinear, choose
from model.gpt import GPT
from model.presets import PRESETS, GPTConfig, ModelShape, shape_of
from recipes.lamb.optimizer import Lamb
from recipes.muon.optimizer import Matrix, _joined, orthogonalized
from recipes.muon.technique import hidden_matrices
from recipes.one_bit_lamb.optimizer import CompressedLamb
from tests.helpers import config_of, refusal
from tests.test_one_bit_adam import OneRank

SMALL = {"n_layer": 2, "n_head": 4, "d_model": 64, "seq_len": 32}
TOKENS = torch.randint(0, 200, (3, 33), generator=torch.Generator().manual_seed(3))
RUN = ["--deepspeed_config", "ds_configs/mixture_of_experts.json", "--preset", "nano", "--explain"]


@pytest.fixture
def model() -> GPT:
    model = GPT(config_of("qwen3_moe", SMALL, vocab_size=200))
    with torch.no_grad():
        for block in model.h:
            block.mlp.router.weight.mul_(20)  # a router that prefers some
    return model


def test_each_token_gets_the_sum_of_its_experts(model):
    """Computed one token and one expert at a time."""
    mlp, x = model.h[0].mlp, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    probabilities = (x @ mlp.router.weight.T).softmax(-1)
    for token, likely, found in zip(x.flatten(0, 1), probabilities.flatten(0, 1), mlp(x).flatten(0, 1), strict=True):
        best = sorted(range(8), key=lambda expert: -likely[expert])[:2]
        expected = torch.zeros(64)
        for expert in best:
            gate, up = (mlp.c_fc.weight[expert] @ token).chunk(2)
            expected += likely[expert] / sum(likely[one] for one in best) * (mlp.c_proj.weight[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_shares_of_the_chosen_add_up_to_one():
    probabilities, shares, experts = choose(torch.tensor([[0.1, 0.6, 0.3]]).log(), 2)
    assert probabilities[0].tolist() == pytest.approx([0.1, 0.6, 0.3])
    assert experts.tolist() == [[1, 2]] and shares[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    layer = ExpertLinear(4, 3, config_of("qwen3_moe", {**SMALL, "n_expert": 3}, vocab_size=200), "one")
    layer(torch.ones(5, 4), torch.tensor([2, 0, 3])).sum().backward()
    assert layer.weight.grad[1].eq(0).all() and layer.weight.grad[0].ne(0).all()


def test_one_kernel_for_all_experts_gives_the_same(monkeypatch):
    """Of CUDA, which torch also has for a CPU."""
    found = []
    for at_once in (False, True):
        monkeypatch.setattr("model.experts.has_one_kernel", lambda x, weight, at_once=at_once: at_once)
        layer = ExpertLinear(16, 8, config_of("qwen3_moe", {**SMALL, "n_expert": 3}, vocab_size=200), "one").bfloat16()
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(4)).bfloat16().requires_grad_()
        y = layer(x, torch.tensor([2, 0, 4]))
        (y * torch.arange(48).view(6, 8).bfloat16()).sum().backward()
        found.append((y, x.grad, layer.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("loads", [[5, 0, 40, 3], [0, 0, 48, 0], [1, 30, 0, 17]], ids=str)
def test_rows_that_are_computed_twice_leave_no_trace(loads):
    """In bf16, whose products begin among the rows of the expert before."""
    layer = ExpertLinear(8, 6, config_of("qwen3_moe", {**SMALL, "n_expert": 4}, vocab_size=200), "one").bfloat16()
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(4)).bfloat16().requires_grad_()
    y = layer(x, torch.tensor(loads))
    (y * torch.arange(288).view(48, 6).bfloat16()).sum().backward()
    rows, weights = x.detach().float().requires_grad_(), layer.weight.detach().float().requires_grad_()
    expected = torch.cat([part @ weight.T for part, weight in zip(rows.split(loads), weights, strict=True)])
    (expected * torch.arange(288).view(48, 6)).sum().backward()
    for found, exact in ((y, expected), (x.grad, rows.grad), (layer.weight.grad, weights.grad)):
        assert (found.float() - exact).norm() < 1e-2 * exact.norm()


def test_weights_that_are_released_are_those_of_the_backward_pass():
    """As ZeRO-3 does: a view that the forward pass saved would keep all gathered weights in memory."""
    layer = ExpertLinear(4, 3, config_of("qwen3_moe", {**SMALL, "n_expert": 2}, vocab_size=200), "one")
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    y, weights = layer(x, torch.tensor([2, 3])), layer.weight.data
    layer.weight.data = torch.empty(0)
    layer.weight.data = 2 * weights
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], 2 * weights[0].sum(0))


def test_experts_start_different(model):
    weights = model.h[0].mlp.c_fc.weight
    assert weights.std().item() == pytest.approx(0.02, rel=0.02) and not torch.equal(weights[0], weights[1])


def balanced(model: GPT, weight: torch.Tensor, counted: int) -> list[torch.Tensor]:
    """Balances of both layers, of the mean over `counted` tokens. Returns what they sum."""
    sums = [torch.zeros(17, dtype=torch.float64) for _ in model.h]
    for block, trained in zip(model.h, sums, strict=True):
        block.mlp.balance = Balance(torch.tensor(1 / counted), weight, trained, torch.zeros_like(trained))
    return sums


def test_the_gradients_of_the_balance_loss_are_those_of_a_loss_that_is_added(model):
    weight = torch.rand(8, generator=torch.Generator().manual_seed(2))
    probabilities: list[torch.Tensor] = []
    for block in model.h:
        block.mlp.router.register_forward_hook(lambda router, x, y: probabilities.append(y.softmax(-1)))
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    (loss + sum((p @ weight).mean() for p in probabilities)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    chosen = [torch.bincount(p.topk(2).indices.flatten(), minlength=8) for p in probabilities]
    model.zero_grad()
    sums = balanced(model, weight, counted=TOKENS[:, 1:].numel())
    again = model(TOKENS[:, :-1], TOKENS[:, 1:])
    assert torch.equal(loss, again), "what is logged is the cross-entropy"
    again.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-7, rtol=1e-5)
    for found, load, p in zip(sums, chosen, probabilities[:2], strict=True):
        entropy = -(p * p.log()).sum()
        assert found.tolist() == pytest.approx([*load.tolist(), *p.sum(0).tolist(), entropy.item()], rel=1e-6)


def test_a_recomputed_layer_counts_its_load_once(model):
    from torch.utils.checkpoint import checkpoint

    weight = torch.rand(8)
    sums = balanced(model, weight, counted=96)
    model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    once, gradient = [one.clone() for one in sums], model.h[0].mlp.router.weight.grad.clone()
    for use_reentrant in (False, True):
        for one in sums:
            one.zero_()
        model.zero_grad()

        def run(blocks, x, use_reentrant=use_reentrant):
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

        model.block_runner = run
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        assert all(torch.equal(a, b) for a, b in zip(sums, once, strict=True))
        torch.testing.assert_close(model.h[0].mlp.router.weight.grad, gradient)


# --- accounting


def test_published_models_have_their_published_parameters():
    """Qwen3's technical report, table 2, and Mistral's page of Mixtral: 30.5 and 3.3 B, 46.7 and 12.9 B."""
    for name, whole, active in (("qwen3-30b-a3b", 30.53e9, 3.35e9), ("mixtral-8x7b", 46.70e9, 12.88e9)):
        preset = PRESETS[name]
        config = GPTConfig(**vars(shape_of(preset.shape, preset.architecture, preset.published)), vocab_size=preset.vocab_size)
        assert parameter_count(config) == pytest.approx(whole, rel=1e-3)
        assert parameter_count(config, active=True) == pytest.approx(active, rel=1e-3)
        assert f"{parameter_count(config) / 1e6:,.1f} M parameters, {parameter_count(config, active=True) / 1e6:,.1f} M active" in in_words(
            config
        )


def test_flops_are_those_of_the_active_experts(model):
    """But for attention, which torch counts with its causal half and this project whole, as the paper does."""
    config = model.config
    with FlopCounterMode(display=False) as counter:
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(flops for operation, flops in counts.items() if "attention" not in str(operation))
    attention = 12 * config.n_layer * config.attention_width * config.seq_len
    norms = 6 * (parameter_count(config) - sum(p.numel() for p in model.parameters() if p.ndim > 1))
    padding = 6 * (config.padded_vocab_size - config.vocab_size) * config.d_model
    assert flops_per_token(config) - attention - norms + padding == pytest.approx(matmuls / TOKENS[:, 1:].numel(), rel=0.01)


def test_by_default_as_many_weights_are_active_as_in_the_dense_form():
    dense, experts = (shape_of(ModelShape(4, 4, 256, 128), name, {}) for name in ("qwen3", "qwen3_moe"))
    assert (experts.n_expert, experts.n_expert_active, experts.d_expert) == (8, 2, dense.d_ff // 2)
    assert experts.d_ff == dense.d_ff


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "'expert_balance' is for a mixture of experts"),
        (["--architecture", "qwen3_moe", "--n_expert_active", "9"], "n_expert must be at least n_expert_active"),
        (["--architecture", "qwen3", "--d_expert", "64"], "2 or more for experts"),
        (["--architecture", "qwen3_moe", "--n_expert_active", "1"], "n_expert_active is 1: the share of one expert is 1"),
        (["--n_expert", "8"], "experts have no biases; add --bias false, or use --architecture qwen3_moe"),
        (["--architecture", "qwen3_moe", "--d_ff", "512", "--d_expert", "100"], "d_ff must be this product, or be left out"),
        (["--architecture", "qwen3_moe", "--set", "expert_balance.coefficient=-1"], "expert_balance.coefficient"),
        (["--architecture", "qwen3_moe", "--set", 'fp8={"emulate": true}'], "fp8 does not convert the matrices of experts"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_line(flags, said):
    assert said in refusal(*RUN, *flags)


def test_experts_without_balance_are_noted():
    run = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--preset", "nano", "--explain"]
    for architecture, noted in (("mixtral", True), ("qwen3", False)):
        config, _ = resolve([*run, "--architecture", architecture])
        assert any("nothing balances the experts" in note for note in config.notes) == noted


# --- optimizers


@pytest.mark.parametrize("cls", [Lamb, CompressedLamb])
def test_lamb_has_a_ratio_for_each_expert(cls):
    """Also an expert with small gradients, whose variance 1-bit LAMB must not raise to a share of the others' when it freezes it."""
    generator = torch.Generator().manual_seed(5)
    weights, gradients = torch.randn(3, 4, 5, generator=generator), torch.randn(6, 3, 4, 5, generator=generator).tanh() + 2
    weights *= torch.tensor([0.1, 1.0, 5.0])[:, None, None]
    gradients *= torch.tensor([1.0, 0.03, 1.0])[:, None, None]
    together, alone = torch.nn.Parameter(weights.clone()), [torch.nn.Parameter(one.clone()) for one in weights]
    optimizers = [cls([{"params": one}], 0.1, (0.9, 0.95), 1e-8, 0.1) for one in ([together], alone)]
    for step, gradient in enumerate(gradients):
        together.grad = gradient.clone()
        for one, its in zip(alone, gradient, strict=True):
            one.grad = its.clone()
        for optimizer in optimizers:
            if cls is CompressedLamb:
                if step == 0:
                    optimizer.bind(OneRank())
                optimizer.compressing = step >= 2
            optimizer.step()
    torch.testing.assert_close(together, torch.stack([*alone]), atol=0, rtol=0)
    assert optimizers[0].trust_ratio == optimizers[1].trust_ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_orthogonalizes_each_expert_and_no_router(dtype, model):
    parts = hidden_matrices(model.config)
    assert not [name for name in parts if "router" in name]
    assert parts["h.0.mlp.c_fc.weight"] == [(128, 64)] * 16 and parts["h.0.mlp.c_proj.weight"] == [(64, 128)] * 8
    matrices = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(6)) * torch.tensor([1e-3, 1.0, 40.0])[:, None, None]
    each = torch.stack([orthogonalized(one, 5, dtype) for one in matrices])
    torch.testing.assert_close(orthogonalized(matrices, 5, dtype), each, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_muon_takes_experts_together_up_to_the_size_of_the_largest_matrix():
    sides = [(8, 8), *[(2, 8)] * 5, (4, 4)]
    starts = [0, *range(64, 144, 16), 144]
    matrices = [Matrix(rows, columns, start, (rows * columns,)) for (rows, columns), start in zip(sides, starts, strict=True)]
    assert [(one.start, one.lengths) for one in _joined(matrices, 0)] == [(0, (64,)), (64, (64,)), (128, (16,)), (144, (16,))]
