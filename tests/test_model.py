"""The model is GPT-2, Llama, Qwen3, Mixtral or Qwen3-MoE, its weights depend on seed and name only, and its arithmetic is right."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.accounting import flops_per_token, model_tensors, parameter_count, peak_flops
from model.experts import choose
from model.gpt import GPT, MLPS, NORMS, POSITIONS, run_all_blocks, weight_decay_groups
from model.hf import hf_config, hf_tensors
from model.layout import rotation_at
from model.presets import CHOICES, PRESETS, GPTConfig, ModelShape, shape_of
from tests.helpers import config_of, in_transformers

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = {"n_layer": 2, "n_head": 2, "d_model": 32, "seq_len": 16}


def tokens_of(config: GPTConfig, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets, int64 (batch, length)."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, config.vocab_size, (batch, length), generator=generator) for _ in range(2))


# --- against transformers


SMALL = {"n_layer": 3, "n_head": 4, "d_model": 64, "seq_len": 32}
#: Name -> (the model, its batch, the length of its rows).
MODELS: dict[str, tuple[GPTConfig, int, int]] = {
    "gpt2, one token": (GPTConfig(1, 1, 16, 8, vocab_size=128), 1, 1),
    "gpt2, padded vocabulary": (GPTConfig(2, 4, 64, 32, vocab_size=300), 3, 32),
    "gpt2, three heads": (GPTConfig(3, 3, 48, 24, vocab_size=1000), 40, 17),  # 680 rows of logits: more than the head takes at a time
    "gpt2, untied": (GPTConfig(2, 4, 64, 32, vocab_size=300, tied_head=False, d_ff=100, norm_eps=1e-6), 3, 32),
    "llama": (config_of("llama", SMALL, vocab_size=300), 3, 32),
    "llama, tied with biases": (config_of("llama", {**SMALL, "tied_head": True, "bias": True, "rope_theta": 123.0}, vocab_size=300), 3, 32),
    "llama, one key head": (config_of("llama", {**SMALL, "n_kv_head": 1, "d_ff": 88, "d_head": 32}, vocab_size=300), 3, 17),
    "qwen3": (config_of("qwen3", SMALL, vocab_size=300), 3, 32),
    "mixtral": (config_of("mixtral", SMALL, vocab_size=300), 3, 32),
    "qwen3_moe": (config_of("qwen3_moe", {**SMALL, "n_expert": 5, "n_expert_active": 3, "d_expert": 40}, vocab_size=300), 3, 32),
    "qwen3, untied": (config_of("qwen3", {**SMALL, "tied_head": False, "d_head": 32, "n_kv_head": 4}, vocab_size=300), 3, 32),
}


def spread_weights(model: GPT) -> None:
    """Weights 4 times larger (activations of order 1, where the two forms of GELU differ), biases and norms away from 0 and 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            else:
                parameter.mul_(4)


def test_every_choice_has_a_component():
    assert {"positions": set(POSITIONS), "norm": set(NORMS), "mlp": set(MLPS)} == {name: set(values) for name, values in CHOICES.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_equal_transformers(name, attention):
    from transformers.core_model_loading import revert_weight_conversion  # of each expert by itself, as in files

    config, batch, length = MODELS[name]
    model = GPT(config)
    spread_weights(model)
    theirs = in_transformers(model, attn_implementation=attention)

    tokens, targets = tokens_of(config, batch, length)
    targets[0, 1:3] = -100
    logits = theirs(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    ours = model(tokens, targets)
    ours.backward()

    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, loss, atol=1e-5, rtol=0)
    expected = revert_weight_conversion(theirs, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    zero = 1e-7 * max(float(gradient.norm()) for gradient in expected.values())  # such as those of the biases of GPT-2's keys
    parts = hf_tensors(config)
    found = {part.name: part.of(parameter.grad) for name, parameter in model.named_parameters() for part in parts[name]}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + zero, name
    assert not model.wte.weight.grad[config.vocab_size :].any()
    assert not model.lm_head.weight.grad[config.vocab_size :].any()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_router_chooses_as_transformers(name, monkeypatch):
    config, batch, _ = MODELS[name]
    model = GPT(config)
    spread_weights(model)
    ours, theirs = [], []

    def chosen(logits, active):
        found = choose(logits, active)
        ours.append(found[1:])
        return found

    monkeypatch.setattr("model.experts.choose", chosen)
    other = in_transformers(model)
    for module in other.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda router, x, found: theirs.append(found[1:]))
    tokens = torch.randint(0, config.vocab_size, (40 * batch, config.seq_len), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        model(tokens), other(tokens)
    assert len(ours) == len(theirs) == config.n_layer
    for (shares, experts), (their_shares, their_experts) in zip(ours, theirs, strict=True):
        assert torch.equal(experts, their_experts)
        torch.testing.assert_close(shares, their_shares, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_is_what_is_built(name):
    config = MODELS[name][0]
    model = GPT(config)
    assert [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()] == list(model_tensors(config).items())
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"positions": "rotary"}, "the nearest is gpt2, but for --positions rotary"),
        ({"bias": False}, "the nearest is gpt2, but for --bias false"),
        ({"norm": "rmsnorm", "mlp": "swiglu", "bias": False}, "the nearest is llama, but for --positions learned"),
    ],
)
def test_an_architecture_that_transformers_lacks_is_trained_but_not_converted(fields, said):
    config = GPTConfig(**TINY, **fields, vocab_size=200)
    assert GPT(config)(*tokens_of(config, 2, 16)).isfinite()
    with pytest.raises(ValueError, match=said):
        hf_config(config)


def test_the_head_of_its_own_and_the_rotation_start_as_documented():
    config = config_of("llama", TINY, vocab_size=200)
    weights = GPT(config).state_dict()
    head, embedding = weights["lm_head.weight"], weights["wte.weight"]
    assert not torch.equal(head, embedding)
    assert not head[200:].any()
    assert abs(head[:200].std().item() / 0.02 - 1) < 0.04
    cos, sin = rotation_at(torch.tensor([0, 1, 5000]), 8, 10_000.0, torch.float32)
    angles = torch.tensor([[p / 10_000 ** (2 * i / 8) for i in range(4)] for p in (0, 1, 5000)], dtype=torch.float64)
    torch.testing.assert_close(cos[0, :, 0].double(), angles.cos(), atol=5e-4, rtol=0)  # fp32 has 5,000 radians to 2.4e-4
    torch.testing.assert_close(sin[0, :, 0].double(), angles.sin(), atol=5e-4, rtol=0)


# --- names, shapes, numbers


def test_state_dict_names_stay():
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    block = [f"h.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    names = ["wte.weight", "wpe.weight", *block, "ln_f.weight", "ln_f.bias", "lm_head.weight"]
    assert list(GPT(GPTConfig(1, 2, 32, 16, vocab_size=200)).state_dict()) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(dtype):
    config = GPTConfig(**TINY, vocab_size=1000)
    loss = GPT(config).to(dtype)(*tokens_of(config, 8, 16))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.item() - math.log(1000)) < 0.05  # ln 1000 = 6.908


def test_token_losses_of_another_shape_are_refused():
    model = GPT(GPTConfig(**TINY, vocab_size=64))
    model.lm_head.token_losses.append(lambda logits, targets: logits.logsumexp(-1, keepdim=True))
    with pytest.raises(AssertionError, match=r"token_losses returned shapes \[\(64, 1\)\]; each must be \(64,\)"):
        model(*tokens_of(model.config, 4, 16))


def test_token_losses_in_fp16_are_summed_in_fp32():
    """The largest number of fp16 is 65,504."""
    model = GPT(GPTConfig(**TINY, vocab_size=64)).half()
    tokens = tokens_of(model.config, 8, 16)
    plain = model(*tokens)
    model.lm_head.token_losses.append(lambda logits, targets: logits.logsumexp(-1) + 2000)  # 128 tokens
    assert model(*tokens).item() == plain.item()


def test_padded_rows_get_no_probability_and_no_gradient():
    config = GPTConfig(**TINY, vocab_size=129)
    model = GPT(config)
    assert model.wte.weight.shape == (256, 32)
    with torch.no_grad():
        model.wte.weight[129:] = 5.0  # padded rows that would win every softmax, were they let in
    tokens, targets = tokens_of(config, 4, 16)
    loss = model(tokens, targets)
    loss.backward()
    assert model.wte.weight.grad[129:].eq(0).all()
    assert model.wte.weight.grad[:129].ne(0).any(dim=1).all()
    logits = model(tokens)
    assert logits.shape == (4, 16, 129)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="17 tokens: this model has positions for 16"):
        GPT(GPTConfig(**TINY, vocab_size=128))(torch.zeros(1, 17, dtype=torch.int64))


def test_no_token_sees_its_future():
    config = GPTConfig(**TINY, vocab_size=128)
    model, (tokens, other) = GPT(config), tokens_of(config, 1, 16)
    other[:, :9] = tokens[:, :9]
    torch.testing.assert_close(model(tokens)[:, :9], model(other)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9:], model(other)[:, 9:])


def test_dropout_acts_in_training_and_not_in_evaluation():
    config = GPTConfig(**TINY, dropout=0.5, vocab_size=128)
    model, (tokens, _) = GPT(config), tokens_of(config, 2, 16)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    undropped = GPT(GPTConfig(**TINY, vocab_size=128))
    assert torch.equal(model(tokens), undropped(tokens))


def test_the_block_runner_is_the_one_hook():
    config = GPTConfig(**TINY, vocab_size=128)
    model, (tokens, _) = GPT(config), tokens_of(config, 2, 16)
    whole = model(tokens)
    model.block_runner = lambda blocks, x: run_all_blocks(blocks[:1], x)
    first_only = GPT(GPTConfig(**TINY | {"n_layer": 1}, vocab_size=128))
    first_only.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(tokens), first_only(tokens))
    assert not torch.allclose(model(tokens), whole)

    block, x = model.h[0], torch.randn(2, 16, 32)
    middle = x + 2 * block.attn(block.ln_1(x))
    torch.testing.assert_close(block(x, branch_scale=2.0), middle + 2 * block.mlp(block.ln_2(middle)))


# --- initial weights


def test_weights_depend_on_seed_and_name_only():
    config = GPTConfig(**TINY, vocab_size=200, init_seed=3)
    torch.manual_seed(1)
    first, state = GPT(config), torch.get_rng_state()
    torch.manual_seed(2)
    torch.randn(5)
    second = GPT(config).state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second[name]), name
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "building the model took numbers from the global generator"

    # a deeper model with a longer vocabulary begins with the same layer 0, up to the residual scale
    deeper = GPT(GPTConfig(**TINY | {"n_layer": 8}, vocab_size=250, init_seed=3)).state_dict()
    assert torch.equal(deeper["h.0.mlp.c_fc.weight"], second["h.0.mlp.c_fc.weight"])
    torch.testing.assert_close(deeper["h.0.mlp.c_proj.weight"] * 2, second["h.0.mlp.c_proj.weight"])
    assert torch.equal(deeper["wte.weight"][:200], second["wte.weight"][:200])

    other_seed = GPT(GPTConfig(**TINY, vocab_size=200, init_seed=4)).state_dict()
    drawn = [name for name in second if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight", "wte.weight", "wpe.weight"))]
    for name in drawn:
        assert not torch.equal(other_seed[name], second[name]), name
    values = [second[name].flatten()[:8] for name in drawn]
    assert all(not torch.allclose(a / a.norm(), b / b.norm()) for i, a in enumerate(values) for b in values[:i]), "two names, one draw"


def test_initial_weights_are_gpt2s():
    config = GPTConfig(n_layer=8, n_head=2, d_model=128, seq_len=64, vocab_size=1000)
    for name, tensor in GPT(config).state_dict().items():
        if name.endswith(".bias"):
            assert tensor.eq(0).all(), name
        elif "ln_" in name:
            assert tensor.eq(1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
            rows = tensor[:1000] if name in ("wte.weight", "lm_head.weight") else tensor
            # at least 64 x 128 numbers: the standard error of their deviation is 0.8%
            assert abs(rows.std().item() / std - 1) < 0.04, name
            assert abs(rows.mean().item()) < 0.05 * std, name
            assert tensor[len(rows) :].eq(0).all(), name


def differences_under_zero_init() -> dict[str, list[str]]:
    """Run by a rank: by precision, what `deepspeed.zero.Init` changes."""
    import deepspeed

    # 15 x 36 = 540 positions' weights, no multiple of 16: torch's normal_ draws such a tensor's last 16 differently in bf16.
    config = GPTConfig(n_layer=2, n_head=2, d_model=36, seq_len=15, vocab_size=200, init_seed=5)
    plain, found = dict(GPT(config).named_parameters()), {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        ds_config = {"train_batch_size": 1, "zero_optimization": zero, "bf16": {"enabled": precision == "bf16"}}
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = GPT(config)
        parameters = dict(model.named_parameters())
        found[precision] = [name for name, parameter in parameters.items() if parameter.numel()]  # not partitioned
        found[precision] += [] if model.lm_head.weight is model.wte.weight else ["the head"]
        with deepspeed.zero.GatheredParameters([*parameters.values()]):
            expected = {name: parameter.to(dtype) for name, parameter in plain.items()}
            found[precision] += [name for name, one in parameters.items() if one.dtype != dtype or not torch.equal(one, expected[name])]
        # Embeddings and 4 matrices a block; 4 biases and 2 norms a block, ln_f.
        found[precision] += [] if [len(group["params"]) for group in weight_decay_groups(model, 0.1)] == [10, 18] else ["the groups"]
    return found


@pytest.mark.long
def test_zero_init_builds_the_same_model(one_rank):
    assert one_rank.run("tests.test_model:differences_under_zero_init") == [{"fp32": [], "bf16": []}]


# --- optimizer groups


def test_weight_decay_spares_biases_and_norms_and_takes_each_parameter_once():
    model = GPT(GPTConfig(**TINY, vocab_size=200))
    decayed, kept = weight_decay_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(name.endswith(".bias") or "ln_" in name for name in (name_of[id(p)] for p in kept["params"]))
    assert not any(name.endswith(".bias") or "ln_" in name for name in (name_of[id(p)] for p in decayed["params"]))
    ids = [id(p) for p in decayed["params"] + kept["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(name_of)


# --- arithmetic


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_of_their_name_and_values_that_fit_together(name):
    published = {  # in millions, with their own vocabulary; nano and micro with our 8,192
        "nano": 5.29, "micro": 13.9, "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6,
        "gpt3-1.3b": 1316, "gpt3-2.7b": 2652, "gpt3-6.7b": 6658, "gpt3-13b": 12853,
        "llama-7b": 6738, "llama3-8b": 8030, "llama3.1-8b": 8030, "qwen3-8b": 8191, "qwen3-0.6b": 596,
        "moe-7b-a1b": 6919, "mixtral-8x7b": 46703, "qwen3-30b-a3b": 30532,
    }  # fmt: skip
    preset = PRESETS[name]
    shape = shape_of(preset.shape, preset.architecture, preset.published)
    config = GPTConfig(**vars(shape), vocab_size=8192 if name in ("nano", "micro") else preset.vocab_size)
    count = parameter_count(config)
    assert abs(count / 1e6 / published[name] - 1) < 0.001
    with torch.device("meta"):
        assert count == sum(p.numel() for p in GPT(config).parameters())
    assert preset.global_batch_size % preset.micro_batch_size == 0
    assert preset.warmup_steps < preset.steps
    if name.startswith("gpt"):
        batch_tokens = preset.global_batch_size * preset.shape.seq_len
        assert batch_tokens in (2**19, 2**20, 2**21)
        assert abs(preset.steps * batch_tokens / count - 20) < 0.01
        assert abs(preset.warmup_steps * batch_tokens / 375e6 - 1) < 0.002


def test_flops_of_gpt2_by_hand():
    config = GPTConfig(12, 12, 768, 1024, vocab_size=50257)
    # 50,257 x 768 = 38,597,376; 12 x (12 x 768^2 + 13 x 768) = 85,054,464; last norm 1,536; positions 1,024 x 768 = 786,432
    assert 38_597_376 + 85_054_464 + 1_536 + 786_432 == 124_439_808
    assert parameter_count(config) == 124_439_808 + 47 * 768
    n = 124_439_808 - 786_432
    assert flops_per_token(config) == 6 * n + 12 * 12 * 768 * 1024 == 855_166_464
    # half the blocks, at a quarter of the length: what was dropped is not counted
    assert flops_per_token(config, seq_len=256, kept_blocks=6) == 6 * (n - 85_054_464 // 2) + 12 * 6 * 768 * 256


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # no bf16 tensor cores
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("AMD Instinct MI300X", "fp16", 1307.4),
        ("cpu", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_peak_of_the_device_found(name, dtype, tera):
    assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer is 0"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"n_head": 2.0}, "n_head is 2.0"),
        ({"n_layer": True}, "n_layer is True"),
        ({"d_model": 33}, "d_model is 33 and n_head is 2: d_model must be a multiple"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"n_kv_head": 3}, "n_head is 2 and n_kv_head is 3: n_head must be a multiple"),
        ({"n_kv_head": -1}, "n_kv_head is -1"),
        ({"positions": "alibi"}, "positions is 'alibi': it must be learned or rotary"),
        ({"positions": "rotary", "d_head": 5}, "d_head is 5: rotary positions rotate pairs"),
        ({"qk_norm": 1}, "qk_norm is 1: it must be true or false"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelShape(**TINY | change)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        GPTConfig(**TINY, vocab_size=0)


def test_presets_and_accounting_import_no_torch():
    code = "import sys, model.presets, model.accounting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(REPOSITORY)}).returncode == 0
