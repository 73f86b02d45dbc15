# SPDX-License-Identifier: Apache-2.0
"""Saved tensors that are more, or less, than strided bytes: sparse, quantized, nested, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from saved_case import case, run
from saved_trial import Trial
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Saves(torch.autograd.Function):
    """Saves tensors and hands what it gets back to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.seen = seen
        ctx.count = len(tensors)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *tensors = ctx.saved_tensors
        ctx.seen.extend(tensors)
        return (gradient * x, None, *([None] * ctx.count))


def _saved(trial: Trial, *tensors: torch.Tensor) -> list[Any]:
    """The tensors as a function's backward gets them."""
    seen: list[Any] = []
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = Saves.apply(x, seen, *tensors)
    trial.tick()
    y.sum().backward()
    trial.record(x.grad)
    assert len(seen) == len(tensors)
    for before, after in zip(tensors, seen, strict=True):
        assert after.dtype == before.dtype and after.layout == before.layout
        assert after.device == before.device
        assert after.is_conj() == before.is_conj() and after.is_neg() == before.is_neg()
        assert after.requires_grad == before.requires_grad
    return seen


@case
def geometry_of_what_is_saved(trial: Trial) -> None:
    base = torch.randn(64, 96)
    c = torch.randn(8, 8, dtype=torch.complex64)
    tensors = [base[:, 32:64].t(), base[::2], torch.randn(64, 1).expand(64, 64), base[3:3],
               torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last), torch.randn(()),
               base.unfold(0, 4, 2), c.conj(), c.mH, c.conj().imag, torch._neg_view(base),
               torch.zeros(3, dtype=torch.bool), torch.arange(9)[::2], base.as_strided((4, 5), (1, 2))]
    for before, after in zip(tensors, _saved(trial, *tensors), strict=True):
        assert before.shape == after.shape and before.stride() == after.stride()
        assert before.storage_offset() == after.storage_offset()
        trial.record(after)


@case
def sparse_layouts(trial: Trial) -> None:
    dense = torch.randn(8, 8).relu()
    tensors = [dense.to_sparse(), dense.to_sparse().coalesce(), dense.to_sparse_csr(),
               dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    trial.record(*_saved(trial, *tensors))


@case
def sparse_products(trial: Trial) -> None:
    s = torch.randn(8, 8).relu().to_sparse().requires_grad_()
    x = torch.randn(8, 4, requires_grad=True)
    run(trial, lambda s, x: torch.sparse.mm(s, x.sin()), s, x)


@case
def sparse_written_in_place(trial: Trial) -> None:
    s = torch.randn(8, 8).relu().to_sparse()
    x = torch.randn(8, 4, requires_grad=True)
    with trial.forward():
        y = torch.sparse.mm(s, x)
    s.mul_(2)
    trial.attempt(lambda: y.sum().backward())
    trial.record(x.grad)


@case
def mkldnn(trial: Trial) -> None:
    (after,) = _saved(trial, torch.randn(8, 8).to_mkldnn())
    trial.record(after.to_dense())


@case
def quantized(trial: Trial) -> None:
    q = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 3, torch.qint8)
    (after,) = _saved(trial, q)
    assert after.q_scale() == 0.1 and after.q_zero_point() == 3
    trial.record(after.dequantize())


@case
def meta(trial: Trial) -> None:
    (after,) = _saved(trial, torch.randn(8, 8, device="meta"))
    assert after.is_meta and after.shape == (8, 8)


@case
def named(trial: Trial) -> None:
    before = torch.randn(8, 8, names=("N", "C"))
    (after,) = _saved(trial, before)
    assert after.names == ("N", "C")
    trial.record(after.rename(None))
    seen: list[Any] = []
    with trial.forward():
        y = Saves.apply(torch.randn(8, 8, requires_grad=True), seen, before)
    before.mul_(2)
    trial.attempt(lambda: y.sum().backward())


@case
def zero_tensor(trial: Trial) -> None:
    (after,) = _saved(trial, torch._efficientzerotensor(8, 8))
    assert after._is_zerotensor()
    trial.record(after + 0)


@case
def nested(trial: Trial) -> None:
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    with trial.forward():
        y = (F.gelu(x @ w) * x.sin()).values()
    trial.tick()
    y.sum().backward()
    assert x.grad is not None
    trial.record(x.grad.values(), w.grad)


@case
def nested_strided(trial: Trial) -> None:
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.strided)
    w = torch.randn(4, 4, requires_grad=True)
    with trial.forward():
        y = torch.nested.to_padded_tensor(F.linear(x, w), 0.0).sin()
    trial.tick()
    y.sum().backward()
    trial.record(w.grad)


class Doubled(torch.Tensor):
    """A subclass with a dispatch of its own: two tensors of the same sizes."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, a.shape, dtype=a.dtype, requires_grad=a.requires_grad)
        made.a, made.b = a, b
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def each(pick: Callable[[Doubled], torch.Tensor]) -> Any:
            take = lambda t: pick(t) if isinstance(t, Doubled) else t  # noqa: E731
            return func(*tree_map(take, args), **tree_map(take, kwargs or {}))

        left, right = each(lambda t: t.a), each(lambda t: t.b)
        if isinstance(left, torch.Tensor):
            return Doubled(left, right)
        return left


class Labelled(torch.Tensor):
    """A subclass with plain bytes."""


@case
def subclasses(trial: Trial) -> None:
    x = Doubled(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
    with trial.forward():
        y = (x.sin() * x.exp()).tanh()
    trial.tick()
    y.sum().backward()
    assert isinstance(x.grad, Doubled)
    trial.record(x.grad.a, x.grad.b)


@case
def subclasses_of_plain_bytes(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    run(trial, lambda x: ((x * 1).as_subclass(Labelled).sin()  # type: ignore[arg-type]
                           * x.exp()).as_subclass(torch.Tensor), x)


class Counts(TorchDispatchMode):
    """Sees operators, as profilers and fake modes do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@case
def dispatch_modes(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward(), Counts():
        y = (x.sin() * x.exp()).unsafe_chunk(2)
        z = y[0].tanh_() * y[1].sigmoid_()
        del y
    trial.tick()
    with Counts():
        z.sum().backward()
    trial.record(x.grad)


@case
def vectorized(trial: Trial) -> None:
    run(trial, torch.vmap(lambda v: v.sin() * v.exp().sum()), torch.randn(8, 8, requires_grad=True))


@case
def forward_mode(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x * 1, torch.ones(8, 8))
        tangent = torch.autograd.forward_ad.unpack_dual(dual.sin() * dual).tangent
        trial.record(tangent)
        assert tangent is not None
        loss = tangent.sum()
    loss.backward()
    trial.record(x.grad)
