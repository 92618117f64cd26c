"""`--no_cross_document`: the logits and gradients of a document are those of the document alone, whatever stands before it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from launch.config.explain import explain
from launch.config.run_config import resolve
from model import accounting, gpt
from model.gpt import GPT
from model.layout import DocumentBounds, Layout, document_mask, document_starts
from model.presets import ARCHITECTURES, GPTConfig
from recipes.activation_checkpointing.technique import ActivationCheckpointing
from recipes.fused_kernels.attention import blockwise_attention
from tests.helpers import config_of, generate

END = 3
SIZES = {"n_layer": 3, "n_head": 2, "d_model": 32, "seq_len": 24}
CONFIGS = {name: config_of(name, SIZES, vocab_size=100, init_seed=1, document_end=END) for name in ARCHITECTURES}
CONFIG = CONFIGS["gpt2"]
#: Attention of initial weights is all but uniform and its scores all but zero: larger weights make what it sees matter.
SCALE = 8
TOLERANCE = 1e-5


def model_of(config: GPTConfig = CONFIG, device: str = "cpu") -> GPT:
    model = GPT(config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(SCALE)
    return model


def document(length: int, seed: int) -> list[int]:
    """`length` tokens, of which the last is the end."""
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(END + 1, CONFIG.vocab_size, (length - 1,), generator=generator).tolist(), END]


def rows(*documents: list[int]) -> torch.Tensor:
    return torch.tensor([[token for one in documents for token in one]])


@pytest.fixture(params=["dense mask", "boundaries"])
def form(request, monkeypatch) -> None:
    """Both forms of a mask of documents."""
    if request.param == "boundaries":
        monkeypatch.setattr(accounting, "DENSE_LENGTH", 0)


def test_starts_and_mask_of_a_row_by_hand():
    tokens = torch.tensor([[7, END, END, 8, 9], [END, 7, 8, 9, END]])
    starts = document_starts(tokens, END)
    assert starts.tolist() == [[0, 0, 2, 3, 3], [0, 1, 1, 1, 1]]
    mask = document_mask(starts, torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((2, 1, 5, 5), torch.bfloat16)
    seen = [["x....", "xx...", "..x..", "...x.", "...xx"], ["x....", ".x...", ".xx..", ".xxx.", ".xxxx"]]
    assert [["".join("x" if value == 0 else "." for value in row) for row in one[0].tolist()] for one in mask] == seen
    assert set(mask.flatten().tolist()) == {0.0, -torch.inf}


def test_boundaries_of_rows_by_hand():
    tokens = torch.tensor([[7, END, END, 8, 9], [END, 7, 8, 9, END]])
    documents = DocumentBounds.beginning_at(document_starts(tokens, END))
    assert documents.lengths == [2, 1, 2, 1, 4]
    kept = documents.at(torch.tensor([1, 3, 4]))
    assert (kept.lengths, kept.row_length) == ([1, 0, 2, 0, 3], 3)
    assert kept.at(torch.tensor([0, 2])).lengths == [1, 0, 1, 0, 2]


@pytest.mark.parametrize(("length", "kind"), [(accounting.DENSE_LENGTH, torch.Tensor), (accounting.DENSE_LENGTH + 1, DocumentBounds)])
def test_only_long_rows_have_no_dense_mask(length, kind):
    assert isinstance(document_mask(torch.zeros(1, length, dtype=torch.int64), torch.float32), kind)


def qkv_of(length: int, heads: tuple[int, int, int] = (4, 2, 2)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, n, 16, generator=generator, requires_grad=True) for n in heads]


def some_starts(length: int) -> torch.Tensor:
    """Two rows: short documents and the rest, and two halves."""
    tokens = torch.ones(2, length, dtype=torch.int64)
    tokens[0, [3, 4, length // 5, length // 3]] = tokens[1, length // 2] = 0
    return document_starts(tokens, 0)


@pytest.mark.parametrize("attend", [gpt.attend, blockwise_attention])
def test_boundaries_give_what_the_dense_mask_gives(attend, monkeypatch, device):
    """At 1,024 tokens, and of those that random-LTD keeps; with shared heads."""
    found, starts, kept = [], some_starts(1024).to(device), torch.randperm(1024, generator=torch.Generator().manual_seed(1))[:700]
    for dense_length in (1024, 0):
        monkeypatch.setattr(accounting, "DENSE_LENGTH", dense_length)
        mask = document_mask(starts, torch.float32)
        for part in (Layout(mask), Layout(mask).at(kept.sort().values.to(device))):
            length = 700 if part.mask is not mask else 1024
            qkv = [one.detach().to(device).requires_grad_() for one in qkv_of(length)]
            y = attend(*qkv, part.mask, 0.0)
            y.square().sum().backward()
            found.append([y.detach(), *(one.grad for one in qkv)])
    for ours, expected in zip(found[2] + found[3], found[0] + found[1], strict=True):
        assert (ours - expected).abs().max() <= 1e-6 * expected.abs().max()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return found


@pytest.mark.parametrize("attend", [gpt.attend, blockwise_attention])
def test_no_tensor_of_long_rows_has_t_x_t_elements(attend):
    """Of a training step on 4,096 tokens: one document, and many."""
    T = 4096
    model = GPT(config_of("qwen3", {"n_layer": 1, "n_head": 1, "d_model": 16, "seq_len": T}, vocab_size=20, document_end=END))
    model.h[0].attn.attend = attend
    for documents in ([document(T, 1)], [document(T // 16, seed) for seed in range(16)]):
        tokens = rows(*documents) % 20
        with Largest() as largest:
            model(tokens, tokens).backward()
        assert largest.elements <= T * T / 8


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_of_a_document_are_those_of_the_document_alone(device, architecture):
    config = CONFIGS[architecture]
    model = model_of(config, device)
    last, tail = document(9, 1), document(6, 2)[:-1]  # the window cuts the last document short
    alone = [model(rows(one).to(device))[0] for one in (last, tail)]
    plain = model_of(replace(config, document_end=None), device)
    torch.testing.assert_close(alone[0], plain(rows(last).to(device))[0], atol=TOLERANCE, rtol=0)
    befores = [document(7, 3), document(7, 4), document(4, 5), [*document(3, 6), *document(2, 7), END], []]
    for before in befores:
        tokens = rows(before, last, tail).to(device)
        logits = model(tokens)[0, len(before) :]
        torch.testing.assert_close(logits, torch.cat(alone), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(model(torch.cat([tokens.roll(1), tokens]))[1:, len(before) :], logits[None], atol=TOLERANCE, rtol=0)
        if before:
            crossing = plain(tokens)[0, len(before) :]
            assert (crossing - torch.cat(alone)).abs().max() > 0.1, "a model in which attention does not matter shows nothing"


@pytest.mark.usefixtures("form")
def test_the_loss_of_a_later_document_has_no_gradient_at_earlier_ones(device):
    model, embedded = model_of(device=device), []
    model.wte.register_forward_hook(lambda module, inputs, output: (output.retain_grad(), embedded.append(output))[0])
    before, after = [*document(5, 1), *document(4, 2)], document(10, 3)
    tokens = rows(before, after).to(device)
    targets = tokens.roll(-1, dims=1)
    targets[:, : len(before)] = -100
    model(tokens, targets).backward()
    gradient = embedded[0].grad[0].abs().sum(dim=1)
    assert gradient[: len(before)].eq(0).all()
    assert gradient[len(before) :].gt(0).all()
    assert model.wpe.weight.grad.abs().sum(dim=1).gt(0).tolist() == [place < len(after) for place in range(CONFIG.seq_len)]


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("section", [{}, {"number_checkpoints": 2}, {"number_checkpoints": 1, "cpu_checkpointing": True}], ids=str)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_blocks_that_are_computed_again_are_computed_under_their_own_layout(section, architecture):
    """Forward passes of other micro-batches and an evaluation lie between a forward pass and its backward pass, in any order."""
    micro_batches = [rows(document(5, 1), document(11, 2)), rows(document(12, 3), document(4, 4)), rows(document(9, 5))]
    for order in ((0, 1, 2), (2, 0, 1), None):
        found = []
        for checkpointed in (False, True):
            model = model_of(replace(CONFIGS[architecture], dropout=0.1))
            if checkpointed:
                technique = ActivationCheckpointing(section, SimpleNamespace(shape=model.config))
                technique.attach(SimpleNamespace(module=model), None)
            torch.manual_seed(1)
            losses = [model(tokens, tokens.roll(-1, dims=1)) for tokens in micro_batches]
            with torch.no_grad():
                model.eval()(rows(document(2, 6), document(2, 7)))
            model.train()
            for place in order or ():
                losses[place].backward()
            if order is None:
                sum(losses).backward()
            assert all(block.attn.layout == Layout() for block in model.h), "nothing is kept of a step that is over"
            found.append((torch.stack(losses), gradients(model)))
        (losses, expected), (again, recomputed) = found
        assert torch.equal(losses, again)
        for name, gradient in expected.items():
            assert torch.equal(recomputed[name], gradient), name


def test_without_it_nothing_changes(monkeypatch):
    """Bit for bit: the same kernel is asked for the same thing, although tokens that end documents are among the rows."""
    monkeypatch.setattr(gpt, "document_starts", None)
    monkeypatch.setattr(gpt, "document_mask", None)
    attention, asked = F.scaled_dot_product_attention, []

    def counted(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options)
        return attention(*tensors, **options)

    tokens = rows(document(5, 1), document(11, 2))
    model = model_of(GPTConfig(**vars(CONFIG) | {"document_end": None}))
    x = model.wte(tokens) + model.wpe(torch.arange(16))
    for block in model.h:
        q, k, v = (part.view(1, 16, 2, 16).transpose(1, 2) for part in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1))
        x = x + block.attn.c_proj(attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 16, 32))
        x = x + block.mlp(block.ln_2(x))
    expected = model.lm_head(model.ln_f(x), tokens)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    loss = model(tokens, tokens)
    loss.backward()
    assert torch.equal(loss, expected)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name
    assert asked == 3 * [{"attn_mask": None, "is_causal": True, "dropout_p": 0.0, "enable_gqa": False}]


def test_a_sample_goes_on_from_its_own_document_alone():
    model = model_of().eval()
    continued = [generate(model, [*before, 7, 8], 6, CONFIG.seq_len, temperature=0)[-6:] for before in ([], document(9, 1), document(3, 2))]
    assert continued[0] == continued[1] == continued[2]


@pytest.mark.parametrize("end", [-1, 100, 7.0, True])
def test_an_end_that_is_no_token_is_refused(end):
    with pytest.raises(ValueError, match=re.escape(f"document_end is {end!r}: it must be a token, from 0 to 99")):
        GPTConfig(**vars(CONFIG) | {"document_end": end})


# --- the flag -----------------------------------------------------------------------------------------------------------------------


def resolved(corpus, *flags: str):
    return resolve(["--deepspeed_config", "ds_configs/zero2_bf16.json", "--data", str(corpus), *flags])[0]


def test_the_flag_is_the_models_end_of_document(corpus):
    end = json.loads((corpus / "manifest.json").read_text())["eot_id"]
    assert resolved(corpus, "--no_cross_document").model_config.document_end == end
    assert resolved(corpus).model_config.document_end is None
    assert resolved(corpus, "--no_cross_document").as_json()["no_cross_document"] is True


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_plan_of_memory_has_the_mask_once(precision, corpus):
    """B T^2 elements, however many blocks there are, and with activation checkpointing too."""
    file = ["--deepspeed_config", f"ds_configs/zero1_{precision}.json"]
    without, within = (
        explain(resolved(corpus, *file, "--micro_batch_size", "2", "--seq_len", "512", *flags))["memory_per_rank"]["cuda"]
        for flags in ([], ["--no_cross_document"])
    )
    mask = 2 * 512**2 * {"bf16": 2, "fp32": 4}[precision]
    assert within["activations"] - without["activations"] == mask
    assert within["checkpointed_activations"] - without["checkpointed_activations"] == mask
    assert within["peak"] - without["peak"] == mask


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_plan_of_long_rows_has_no_mask(precision, corpus):
    """One kernel runs bf16 on CUDA; else each block keeps the output of attention twice, of every document and of all."""
    file = ["--deepspeed_config", f"ds_configs/zero1_{precision}.json", "--preset", "nano", "--seq_len", "4096", "--micro_batch_size", "1"]
    for device in ("cpu", "cuda"):
        without, within = (
            explain(resolved(corpus, *file, *flags))["memory_per_rank"][device]["activations"] for flags in ([], ["--no_cross_document"])
        )
        shape, twice = resolved(corpus, *file).model_config, precision == "fp32" or device == "cpu"
        assert within - without == twice * shape.n_layer * 4096 * shape.d_model * {"bf16": 2, "fp32": 4}[precision]
