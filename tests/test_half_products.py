"""Products of bf16 and fp16 where oneDNN has none: those of fp32, rounded once, in a process that is told that it has none."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import run_script


@pytest.fixture
def printed(tmp_path: Path) -> Callable[..., list[str]]:
    """What code prints in a process of its own, in which oneDNN has no product of bf16 or fp16."""

    def run(code: str, **values: object) -> list[str]:
        start = f"""
            import torch, warnings
            from launch.training.deepspeed_fixes import half_products
            warnings.simplefilter("error")
            for name in ("bf16", "fp16"):
                setattr(torch.ops.mkldnn, f"_is_mkldnn_{{name}}_supported", lambda: False)
            half_products.train_on_cpu_in("bf16")
            globals().update({values!r})
            torch.manual_seed(0)
            """
        (file := tmp_path / "code.py").write_text(textwrap.dedent(start) + textwrap.dedent(code), encoding="utf-8")
        done = run_script(str(file))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_are_those_of_fp32_rounded_once(dtype, printed):
    code = """
        dtype = getattr(torch, dtype)
        a, b, c = (torch.randn(*shape).to(dtype) for shape in ((33, 40), (40, 65), (33, 65)))
        A, B, C = (torch.randn(3, *shape).to(dtype) for shape in ((33, 40), (40, 65), (33, 65)))
        wide = lambda function, *operands, **scales: function(*(one.float() for one in operands), **scales).to(dtype)
        for function, operands, scales in (
            (torch.mm, (a, b), {}),
            (torch.mm, (b.t(), a.t()), {}),
            (torch.addmm, (c, a, b), {"beta": 0.5, "alpha": 2}),
            (torch.addmm, (c[0], a, b), {}),
            (torch.bmm, (A, B), {}),
            (torch.bmm, (B.mT, A.mT), {}),
            (torch.baddbmm, (C, A, B), {"beta": 0.5, "alpha": 2}),
        ):
            expected = wide(function, *operands, **scales)
            found = function(*operands, **scales)
            rows = torch.empty(0, dtype=dtype)
            function(*operands, **scales, out=rows)
            columns = torch.empty_like(expected.mT.contiguous()).mT
            function(*operands, **scales, out=columns)
            print(*(torch.equal(one, expected) for one in (found, rows, columns)))
        """
    assert printed(code, dtype=dtype) == ["True"] * 21


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_linear_layer_has_the_gradients_of_fp32_rounded_once(dtype, printed):
    code = """
        def results(dtype, weight, bias, x):
            leaves = [one.to(dtype).detach().requires_grad_() for one in (weight, bias, x)]
            y = torch.nn.functional.linear(leaves[2], *leaves[:2])
            y.backward(torch.ones_like(y))
            return [y, *(leaf.grad for leaf in leaves)]

        dtype = getattr(torch, dtype)
        values = [torch.randn(*shape).to(dtype) for shape in ((64, 32), (64,), (2, 5, 32))]
        for found, expected in zip(results(dtype, *values), results(torch.float32, *values), strict=True):
            print(found.dtype == dtype and torch.equal(found, expected.to(dtype)))
        """
    assert printed(code, dtype=dtype) == ["True"] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_has_the_gradients_of_fp32_rounded_once(dtype, masked, printed):
    code = """
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        dtype = getattr(torch, dtype)
        grad, q, k, v = (torch.randn(2, 3, 70, 16).to(dtype) for _ in range(4))
        mask = torch.randn(2, 1, 70, 70).to(dtype) if masked else None
        out, logsumexp = attention(q, k, v, 0.0, not masked, attn_mask=mask)
        halves = [grad, q, k, v, out]
        wide_mask = None if mask is None else mask.float()
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(*halves, logsumexp, 0.0, not masked, attn_mask=mask)
        expected = backward(*(half.float() for half in halves), logsumexp, 0.0, not masked, attn_mask=wide_mask)
        leaves = [one.detach().requires_grad_() for one in (q, k, v)]
        torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=not masked).backward(grad)
        for one, wide, leaf in zip(found, expected, leaves, strict=True):
            print(torch.equal(one, wide.to(dtype)) and torch.equal(leaf.grad, one))
        """
    assert printed(code, dtype=dtype, masked=masked) == ["True"] * 3


def test_fp32_keeps_the_kernels_of_torch(printed):
    code = """
        a, b = torch.randn(33, 40), torch.randn(40, 65)
        print(torch.allclose(a @ b, (a.double() @ b.double()).float(), atol=1e-5))
        out = torch.empty(33, 65)
        print(torch.mm(a, b, out=out) is out and torch.equal(out, a @ b))
        """
    assert printed(code) == ["True", "True"]


def test_deepspeed_accepts_fp16_in_runs_of_fp16_alone(printed):
    """DeepSpeed's Muon computes in fp16 where the accelerator claims to support it."""
    code = """
        from deepspeed.accelerator import get_accelerator
        shipped = bool(get_accelerator().is_fp16_supported())
        half_products.train_on_cpu_in("fp16")
        print(get_accelerator().is_fp16_supported())
        half_products.train_on_cpu_in("bf16")
        print(bool(get_accelerator().is_fp16_supported()) == shipped)
        """
    assert printed(code) == ["True", "True"]
