# SPDX-License-Identifier: Apache-2.0
"""Random programs over everything that makes saved tensors hard: views and aliases with version
counters of their own, writes in place that autograd sees and ones that it does not, lazy bits,
overlapping and empty tensors, and functions that save what they like."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from saved_trial import Program, Trial
from torch.utils.checkpoint import checkpoint


class Saves(torch.autograd.Function):
    """Saves its input, its output, something in between and an alias of a part of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        between = x.detach() * 0.5
        out = between.sin() + x.detach()
        part = between[..., :1] if between.dim() else between
        ctx.save_for_backward(x, out, between, part)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, out, between, part = ctx.saved_tensors
        return gradient * (1 + 0.5 * between.cos().conj()) + 0 * x + 0 * out + 0 * part.sum()


class WritesToItsSaved(torch.autograd.Function):
    """Its backward writes to what it saved, behind autograd's back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x.data.mul_(0.5)
        return gradient * x.conj() * 2


class Dirty(torch.autograd.Function):
    """Writes to its input and saves it after that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (0.5 + 0.01 * x.conj())


Pool = list[torch.Tensor]
Step = Callable[[random.Random, Pool], Any]


def _pick(rng: random.Random, pool: Pool) -> torch.Tensor:
    return rng.choice(pool)


def _dim(rng: random.Random, x: torch.Tensor) -> int:
    return rng.randrange(max(1, x.dim()))


def _partner(rng: random.Random, pool: Pool, x: torch.Tensor) -> torch.Tensor:
    same = [y for y in pool if y.shape == x.shape]
    return rng.choice(same) if same else x


def _unary(rng: random.Random, pool: Pool) -> torch.Tensor:
    x = _pick(rng, pool)
    return rng.choice([torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.square, torch.abs,
                       lambda t: t * t.conj(), lambda t: (t * t + 2).sqrt(),
                       lambda t: torch.cumsum(t, 0) if t.dim() else t * 3])(x * 0.5)


def _real_unary(rng: random.Random, pool: Pool) -> torch.Tensor:
    x = _pick(rng, pool)
    x = x.real if x.is_complex() else x
    return rng.choice([torch.relu, torch.nn.functional.gelu, torch.nn.functional.silu,
                       lambda t: torch.softmax(t, -1) if t.dim() else t.sin(),
                       lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]) if t.dim() else t,
                       lambda t: torch.nn.functional.dropout(t, 0.3),
                       lambda t: t.max(-1).values if t.dim() and t.numel() else t])(x)


def _binary(rng: random.Random, pool: Pool) -> torch.Tensor:
    x = _pick(rng, pool)
    y = _partner(rng, pool, x)
    return rng.choice([torch.mul, torch.add, lambda a, b: a / (b * b.conj() + 2).abs(),
                       lambda a, b: torch.where(a.abs() > b.abs(), a, b.to(a.dtype))])(x, y)


def _matmul(rng: random.Random, pool: Pool) -> torch.Tensor:
    x = _pick(rng, pool)
    if x.dim() < 2:
        return x * x
    y = rng.choice([x.mH, x.mT])
    return x @ y * 0.1


def _lazy(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    if not x.is_complex():
        return torch._neg_view(x)
    return rng.choice([torch.conj, lambda t: t.conj().imag, lambda t: t.conj().real, torch._neg_view,
                       lambda t: torch.view_as_real(t.resolve_conj()), torch.resolve_conj,
                       lambda t: t.mH if t.dim() >= 2 else t.conj()])(x)


def _view(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    if x.dim() == 0:
        return x.expand(rng.randrange(4), 3)
    at = _dim(rng, x)
    size = x.shape[at]
    kinds: list[Callable[[], Any]] = [
        lambda: x.transpose(0, -1), lambda: x.select(at, 0) if size else x,
        lambda: x.narrow(at, size // 2, size - size // 2), lambda: x[::2], lambda: x[:0],
        lambda: x.unsqueeze(at).expand(*x.shape[:at], 2, *x.shape[at:]),
        lambda: x.diagonal(0, 0, -1) if x.dim() >= 2 else x.view(-1),
        lambda: x.unfold(at, max(1, size // 2), 1), lambda: x.chunk(2, at), lambda: x.unbind(at),
        lambda: x.reshape(-1), lambda: x.flip(0),
        lambda: x.as_strided((max(1, x.numel() // 4), 2), (1, 1), x.storage_offset())
        if x.is_contiguous() and x.numel() > 2 else x.detach()]
    return rng.choice(kinds)()


def _alias(rng: random.Random, pool: Pool) -> Any:
    """Tensors of the same bytes, some with a version counter of their own."""
    x = _pick(rng, pool)
    at = _dim(rng, x)
    split = max(1, x.shape[at] // 2) if x.dim() else 1
    if x.dim() == 0:
        return rng.choice([lambda: x.detach(), lambda: x.data])()
    return rng.choice([lambda: x.unsafe_chunk(2, at), lambda: x.unsafe_split(split, at),
                       lambda: x.unsafe_split_with_sizes([split, x.shape[at] - split], at),
                       lambda: (x * 1).unsafe_chunk(2, at), lambda: (x * 1).unsafe_chunk(8, at),
                       lambda: x.data, lambda: x.detach(),
                       lambda: torch.from_numpy(x.detach().resolve_conj().resolve_neg().numpy())])()


def _in_place(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    y = _partner(rng, pool, x)
    if rng.random() < 0.6:  # something that has not been saved yet, whole or in parts
        x = x * 1
        if x.dim() and rng.random() < 0.5:
            x, *others = x.unsafe_chunk(2, _dim(rng, x))
            pool.extend(others)
    kinds: list[Callable[[], Any]] = [
        lambda: x.mul_(0.7), lambda: x.add_(0.1), lambda: x.sigmoid_(), lambda: x.tanh_(),
        lambda: x.copy_(y * 0.5), lambda: x.zero_(), lambda: x.mul_(y.detach().to(x.dtype)),
        lambda: x.neg_(), lambda: torch.conj_physical_(x),
        lambda: x[:1].mul_(0.3) if x.dim() else x.mul_(0.3),
        lambda: x.masked_fill_(x.abs() > 1, 0.5)]
    return rng.choice(kinds)()


def _write(rng: random.Random, pool: Pool) -> None:
    """A write without a gradient, which autograd sees or does not see."""
    x = _pick(rng, pool)
    with torch.no_grad():
        match rng.randrange(9):
            case 0 | 1 | 2:
                x.data.mul_(0.9)
            case 3:
                x.detach().mul_(0.9)
            case 4 | 5:
                array = x.data.resolve_conj().resolve_neg().numpy()
                array *= 0.9
            case _:
                torch._foreach_mul_([x.data[:1]] if x.dim() else [x.data], 0.9)


def _function(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    return rng.choice([Saves.apply, WritesToItsSaved.apply, lambda t: Dirty.apply(t * 1)])(x)


def _block(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    reentrant = rng.random() < 0.5 and x.requires_grad
    return checkpoint(lambda t: (t * t).tanh() * t, x, use_reentrant=reentrant)


def _fft(rng: random.Random, pool: Pool) -> Any:
    x = _pick(rng, pool)
    if x.dim() == 0 or x.numel() == 0 or x.dtype == torch.bfloat16:
        return x.sin()
    if x.is_complex():
        return torch.fft.ifft(x * x.conj())
    f = torch.fft.rfft(x)
    return torch.fft.irfft(f * f.conj(), n=x.shape[-1]) * 0.1


class _Writes:
    """A hook that writes to tensors while backward runs."""

    def __init__(self, tensors: Pool) -> None:
        self.tensors = tensors

    def __call__(self, _: torch.Tensor) -> None:
        for tensor in self.tensors:
            tensor.mul_(0.5)


def _write_in_backward(held: Pool) -> None:
    for tensor in [t for t in held if t.requires_grad][:2]:
        tensor.register_hook(_Writes([t.data for t in held if t.grad_fn is not None]))


def _drop(rng: random.Random, pool: Pool) -> None:
    if len(pool) > 2:
        pool.pop(rng.randrange(len(pool)))


STEPS: list[tuple[int, Step]] = [
    (6, _unary), (4, _real_unary), (5, _binary), (2, _matmul), (3, _lazy), (6, _view), (6, _alias),
    (8, _in_place), (3, _write), (3, _function), (1, _block), (1, _fft), (8, _drop)]
WEIGHTS, KINDS = [weight for weight, _ in STEPS], [step for _, step in STEPS]


def _leaves(rng: random.Random) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(rng.randrange(1 << 30))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((8, 8), torch.float32), ((4, 6), torch.complex64), ((2, 3, 4), torch.float64),
        ((16,), torch.float32), ((), torch.float32), ((0, 3), torch.float32),
        ((4, 4), torch.complex128), ((8, 4), torch.bfloat16)]
    chosen = rng.sample(shapes, 3)
    return [torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
            .to(torch.get_default_device()).requires_grad_() for shape, dtype in chosen]


def _loss(pool: Pool) -> torch.Tensor | None:
    parts = [(t.real if t.is_complex() else t).double().sum() * (1 + 0.1 * number)
             for number, t in enumerate(pool) if t.requires_grad]
    return torch.stack(parts).sum() if parts else None


def _differentiate(rng: random.Random, trial: Trial, loss: torch.Tensor,
                   leaves: list[torch.Tensor]) -> None:
    def gradients(**more: Any) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(loss, leaves, allow_unused=True, **more)

    def twice() -> None:
        trial.record(*gradients(retain_graph=True))
        trial.tick()
        trial.record(*gradients())

    def double() -> None:
        first = [g for g in gradients(create_graph=True) if g is not None and g.requires_grad]
        trial.record(*first)
        if first:
            total = _loss(first)
            assert total is not None
            trial.record(*torch.autograd.grad(total, leaves, allow_unused=True))

    def double_inside() -> None:
        with trial.forward():
            double()

    def accumulate() -> None:
        loss.backward()
        trial.record(*(leaf.grad for leaf in leaves))

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: trial.attempt(accumulate))
        thread.start()
        thread.join()

    trial.attempt(rng.choice([lambda: trial.record(*gradients()), accumulate, accumulate, twice,
                              double, double_inside, elsewhere]))


def program(seed: int) -> Program:
    """The random program of this seed."""

    def steps(trial: Trial) -> None:
        rng = random.Random(seed)
        leaves = _leaves(rng)
        with trial.forward():
            pool: Pool = [leaf * 1 for leaf in leaves] + list(leaves)
            for _ in range(rng.randrange(5, 40)):
                step = rng.choices(KINDS, WEIGHTS)[0]
                made = trial.attempt(lambda step=step: step(rng, pool))  # type: ignore[misc]
                if isinstance(made, torch.Tensor):
                    pool.append(made)
                elif isinstance(made, (tuple, list)):
                    pool.extend(made[:3])
                del made
                trial.tick()
            loss = trial.attempt(lambda: _loss(pool))
        held = rng.sample(pool, len(pool) // 2)  # the user's
        pool.clear()
        trial.tick()
        if loss is None or not loss.requires_grad:
            trial.records.append("no gradient")
            return
        if held and rng.random() < 0.3:
            trial.attempt(lambda: _write(rng, held))
        if rng.random() < 0.3:
            trial.attempt(lambda: _write_in_backward(held))
        if rng.random() < 0.5:
            held.clear()
        trial.tick()
        _differentiate(rng, trial, loss, leaves)

    return steps
