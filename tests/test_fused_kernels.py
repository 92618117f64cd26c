"""Each kernel of the recipe computes what the plain operations compute, values and gradients; and the section of the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch

from model import gpt
from model.layout import rotate, rotation_at
from recipes.fused_kernels import cross_entropy
from recipes.fused_kernels.attention import KEPT_LENGTH, QUERIES, blockwise_attention
from recipes.fused_kernels.gelu import _backward, _forward
from recipes.fused_kernels.technique import COMPONENTS, FusedKernels, liger_rotate
from tests import helpers

RUN = ("--deepspeed_config", "ds_configs/zero0_bf16.json", "--data", "no/corpus")
#: GPT-2's, padded to a multiple of 128, where there is no corpus.
VOCABULARY = 50_304
explained, refusal = partial(helpers.explained, *RUN), partial(helpers.refusal, *RUN)


def passes(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The value of `function`, and the gradients of a fixed weighing of it by its first input, and its second where that has some."""
    leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
    value = function(*leaves)
    weights = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(value)
    (value * weights).sum().backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, of all elements together."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# --- attention ---------------------------------------------------------------------------------------------------------------------------


def some_qkv(length: int, heads: int = 3, width: int = 20) -> torch.Tensor:
    return torch.randn(2, length, 3, heads, width, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


def documents(length: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of two rows, which hold documents of other lengths."""
    tokens = torch.ones(2, length, dtype=torch.int64)
    tokens[0, ::7], tokens[1, length // 2] = 0, 0
    return gpt.document_mask(gpt.document_starts(tokens, 0), dtype)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_blocks_shares_keys_and_values(masked):
    q = some_qkv(150, heads=6)[:, :, 0]
    k, v = some_qkv(150, heads=2)[:, :, 1:].unbind(2)
    mask = documents(150, torch.float64) if masked else None
    exact, found = (passes(lambda *qkv, f=f: f(*qkv, mask, 0.0), q, k, v) for f in (gpt.attend, blockwise_attention))
    repeated = passes(lambda q, k, v: gpt.attend(q, gpt.with_heads(k, 6), gpt.with_heads(v, 6), mask, 0.0), q, k, v)
    assert [error(*pair) < 1e-6 for pair in zip(found, exact, strict=True)] == [True] * 4
    assert [error(*pair) < 1e-12 for pair in zip(repeated, exact, strict=True)] == [True] * 4


def test_ligers_rotation_gets_what_it_reads():
    """The kernel's contract, written out: (B, heads, T, d_head), halves, cosines (1 or B, T, d_head / 2)."""

    class Written:
        @staticmethod
        def apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim):
            assert (position_ids, unsqueeze_dim, rotary_dim) == (None, 1, 20)
            assert cos.shape[1:] == sin.shape[1:] == (9, 10)
            cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in (cos, sin))
            return tuple(x * cos + torch.cat((-x[..., 10:], x[..., :10]), dim=-1) * sin for x in (q, k))

    q, k, _ = some_qkv(9).unbind(2)
    for positions in (torch.arange(9), torch.stack((torch.arange(9), torch.arange(9).flip(0)))):
        rotation = rotation_at(positions, 20, 100.0, torch.float64)
        for found, exact in zip(liger_rotate(Written, q, k, rotation), rotate(q, k, rotation), strict=True):
            torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 5, QUERIES, QUERIES + 1, 300, KEPT_LENGTH + 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_attention_in_blocks_is_torchs(dtype, tolerance, length, masked):
    qkv = some_qkv(length)
    exact = passes(lambda x: gpt.attend(*x.unbind(2), documents(length, x.dtype) if masked else None, 0.0), qkv)
    found = passes(lambda x: blockwise_attention(*x.unbind(2), documents(length, x.dtype) if masked else None, 0.0), qkv.to(dtype))
    assert [error(*pair) < tolerance for pair in zip(found, exact, strict=True)] == [True, True]


@pytest.mark.parametrize(("length", "kept"), [(KEPT_LENGTH, 4), (KEPT_LENGTH + 1, 0)])
def test_probabilities_are_kept_of_short_sequences_only(length, kept):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        blockwise_attention(*some_qkv(length).float().requires_grad_().unbind(2), None, 0.0)
    assert len(saved) == 3 + kept  # queries, keys, values


def test_no_query_sees_a_later_key():
    qkv = some_qkv(200).float().requires_grad_()
    blockwise_attention(*qkv.unbind(2), None, 0.0)[:, 150].sum().backward()
    assert qkv.grad is not None
    assert float(qkv.grad[:, 151:].abs().max()) == 0.0
    assert float(qkv.grad[:, :151, 1:].abs().amin(dim=(2, 3, 4)).min()) > 0.0


# --- the head and its loss ---------------------------------------------------------------------------------------------------------------


def some_head(rows: int = 150, width: int = 24, vocabulary: int = 70, used: int = 66) -> tuple[torch.Tensor, ...]:
    """x, weight, bias and targets: with padded columns, and rows that do not count."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, width, dtype=torch.float64, generator=generator) for n in (rows, vocabulary))
    bias = torch.zeros(vocabulary, dtype=torch.float64)
    bias[used:] = -torch.inf
    targets = torch.randint(0, used, (rows,), generator=generator)
    targets[::9] = -100
    return x, weight, bias, targets


def mean_of(head: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The mean of the losses whose sum `head` returns, as `Head` takes it."""
    return lambda x, weight, bias, targets, *kernel: head(x, weight, bias, targets, *kernel) / (targets != -100).sum()


@pytest.fixture(params=["in_rows", "in_one"])
def kernel(request):
    """The two kernels of the head, the second as it is before torch.compile."""
    return getattr(cross_entropy, request.param)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_loss_and_its_gradients_are_the_plain_heads(dtype, tolerance, parts, kernel, monkeypatch):
    x, weight, bias, targets = some_head()
    x, weight = x.to(dtype), weight.to(dtype)  # the exact values of what both get
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 150 * 70 * x.element_size() // parts)
    exact = passes(lambda x, w: torch.nn.functional.cross_entropy(x @ w.T + bias, targets), x.double(), weight.double())
    found = passes(lambda x, w: mean_of(cross_entropy.linear_cross_entropy)(x, w, bias.to(dtype), targets, kernel), x, weight)
    assert found[0].dtype == torch.float32
    assert [value.dtype for value in found[1:]] == [dtype, dtype]
    assert [error(*pair) < tolerance for pair in zip(found, exact, strict=True)] == [True] * 3
    assert float(found[2][66:].abs().max()) == 0.0, "padded rows get no gradient"


def test_a_target_of_probability_0_has_a_finite_loss(kernel):
    """exp(-400) is 0 in fp32."""
    logits = torch.zeros(2, 8)
    logits[:, 0] = 400.0
    assert float(kernel(logits, torch.tensor([3, 0]))) == pytest.approx(400.0)
    assert logits[0].tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert not logits[1].any()


def test_a_target_that_is_no_column_is_refused(kernel):
    """As the plain head refuses it: only -100 stands for no target."""
    for wrong in (-1, 8):
        with pytest.raises(RuntimeError, match="out of bounds"):
            kernel(torch.zeros(2, 8), torch.tensor([3, wrong]))


def test_in_fp16_small_gradients_survive():
    """A mean over many rows is a sum times 1/N: taken element by element, most of a softmax would be below what fp16 can hold."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (0.02 * torch.randn(n, 16, generator=generator) for n in (4096, 8192))
    targets = torch.randint(0, 8192, (4096,), generator=generator)
    exact = passes(lambda x, w: mean_of(gpt.linear_cross_entropy)(x, w, None, targets), x, weight)
    found = passes(lambda x, w: mean_of(cross_entropy.linear_cross_entropy)(x, w, None, targets) * 2**16, x.half(), weight.half())
    assert error(found[2] / 2**16, exact[2]) < 2e-2


@pytest.mark.parametrize("parts", [1, 4])
def test_in_fp16_a_frequent_target_overflows_only_where_the_plain_heads_does(parts, device, monkeypatch):
    """5,242 of 65,536 rows have one target: their sum of 1e5 is out of fp16's range, times 1/N and the loss scale it is within."""
    rows, width, vocabulary = 65_536, 8, 64
    generator = torch.Generator().manual_seed(0)
    x = 20 * torch.ones(rows, width) + torch.randn(rows, width, generator=generator)
    weight = 0.02 * torch.randn(vocabulary, width, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[: rows * 8 // 100] = 3
    x, weight, targets = x.half().to(device), weight.half().to(device), targets.to(device)
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", rows * vocabulary * 2 // parts)
    monkeypatch.setattr(cross_entropy, "COLUMNS", 48)  # 48 and 16
    exact = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ exact.T, targets).backward()
    for scale, fits in ((2.0**8, True), (2.0**14, True), (2.0**17, False)):
        gradients = []
        for head in (gpt.linear_cross_entropy, cross_entropy.linear_cross_entropy):
            leaf = weight.clone().requires_grad_()
            (mean_of(head)(x, leaf, None, targets) * scale).backward()
            gradients.append(leaf.grad)
        assert [bool(gradient.isfinite().all()) for gradient in gradients] == [fits, fits]
        assert not fits or error(gradients[1] / scale, exact.grad) < 1e-3


def test_in_bf16_the_sum_of_the_parts_is_rounded_once(monkeypatch):
    """After the scale, 1/910, so that the weight's gradient is as exact as the plain head's; rounded before it too,
    its error is 1.2 times as large."""
    x, weight, bias, targets = some_head(rows=1024)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1024 * 70 * 2 // 8)
    exact = passes(lambda x, w: torch.nn.functional.cross_entropy(x @ w.T + bias, targets), x.double(), weight.double())
    plain, fused = (
        passes(lambda x, w, head=head: mean_of(head)(x, w, bias, targets), x, weight)
        for head in (gpt.linear_cross_entropy, cross_entropy.linear_cross_entropy)
    )
    assert error(fused[2], exact[2]) < 1.1 * error(plain[2], exact[2])


def test_evaluation_computes_no_gradient(kernel, monkeypatch):
    x, weight, bias, targets = some_head()
    monkeypatch.setattr(torch, "mm", None)  # with which gradients are made
    with torch.no_grad():
        loss = mean_of(cross_entropy.linear_cross_entropy)(x.float().requires_grad_(), weight.float(), bias.float(), targets, kernel)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(x @ weight.T + bias, targets)), rel=1e-6)


# --- GELU --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_gelu_by_the_logistic_function_is_torchs(dtype, tolerance):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])]).to(dtype)
    exact = x.double().requires_grad_()
    torch.nn.functional.gelu(exact, approximate="tanh").sum().backward()
    assert exact.grad is not None
    bounded = x.abs() <= 50  # the square of 1e4 would drown all others
    value, slope = _forward(x), _backward(x, torch.ones_like(x))
    assert error(value[bounded], torch.nn.functional.gelu(exact.detach(), approximate="tanh")[bounded]) < tolerance
    assert error(slope, exact.grad) < tolerance
    assert value[~bounded].tolist() == [0.0, x[-1].item()]


# --- the section -------------------------------------------------------------------------------------------------------------------------

KERNELS = list(FusedKernels.declaration.keys)


def test_auto_is_every_kernel():
    said = explained("--set", "fused_kernels=auto")
    assert said["techniques"] == ["fused_kernels"]
    assert [said["engine"][f"fused_kernels.{name}"]["value"] for name in KERNELS] == ["auto"] * len(KERNELS)
    spelled_out = helpers.explained(*RUN[2:], "--deepspeed_config", "ds_configs/fused_kernels.json")
    assert said["engine"].keys() == spelled_out["engine"].keys()


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_kernel_of_a_component_that_the_model_lacks_is_refused_if_asked_for(name):
    own, other = ("gpt2", "llama") if name in ("layer_norm", "gelu") else ("llama", "gpt2")
    assert f"fused_kernels.{name} is a kernel of " in refusal("--architecture", other, "--set", f"fused_kernels.{name}=true")
    explained("--architecture", own, "--set", f"fused_kernels.{name}=true")
    explained("--architecture", other, "--set", f'fused_kernels={{"attention": "auto", "{name}": "auto"}}')


def test_a_key_beside_auto_is_told_where_that_stands():
    line = refusal("--set", "fused_kernels=auto", "--set", "fused_kernels.compile=true")
    assert "'fused_kernels' is a value in another --set, not a section; --set fused_kernels=VALUE changes it" in line


def test_what_only_cuda_has_is_said_where_a_run_is_explained():
    said = explained("--set", "fused_kernels.layer_norm=true")
    assert any("fused_kernels.layer_norm needs CUDA" in line or "'fused_kernels.layer_norm' needs CUDA" in line for line in said["needs"])
    assert explained("--set", "fused_kernels.layer_norm=auto")["needs"] == []


@pytest.mark.parametrize("name", ["gelu", "compile"])
def test_what_is_compiled_needs_a_compiler_and_a_folder_without_a_space(name, monkeypatch):
    assert explained("--set", f"fused_kernels.{name}=true")["lacks"] == explained()["lacks"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/my files")
    with_a_space = explained("--set", f"fused_kernels.{name}=true")["lacks"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    without_a_compiler = explained("--set", f"fused_kernels.{name}=true")["lacks"]
    assert "without a space in its name, and it is '/tmp/my files'; set TMPDIR, or write" in with_a_space[-1]
    assert f"fused_kernels.{name} needs a C++ compiler" in without_a_compiler[-1]
    assert explained("--set", f"fused_kernels.{name}=auto")["lacks"] == explained()["lacks"]


def test_a_plan_of_memory_knows_the_head_and_the_probabilities():
    plain, head, attention = (
        explained("--preset", "micro", *(["--set", f"fused_kernels.{name}=true"] if name else []))["memory_per_rank"]["cpu"]
        for name in ("", "cross_entropy", "attention")
    )
    logits = 8 * 256 * VOCABULARY
    assert plain["loss_head"] == (2 + 4) * logits + 4 * 512 * VOCABULARY
    # The logits, 64 rows in fp32, and the gradients of both factors.
    assert head["loss_head"] == 2 * logits + 4 * 64 * VOCABULARY + 2 * 384 * (8 * 256 + VOCABULARY)
    # Of 256 x 256 pairs the three quarters that two blocks of queries meet, for 6 heads of 8 sequences in 6 blocks.
    probabilities = 2 * 6 * 6 * 8 * 256 * 256 * 3 // 4
    assert attention["activations"] - plain["activations"] == pytest.approx(probabilities, rel=0.05)


def test_every_kernel_is_named_in_the_recipes_json():
    section = json.loads((helpers.ROOT / "ds_configs" / "fused_kernels.json").read_text())["fused_kernels"]
    assert section == dict.fromkeys(KERNELS, "auto")
