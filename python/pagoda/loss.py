# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a large vocabulary, of which only a part of the logits exists at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pagoda.errors import UserError

_ELEMENTS = 1 << 26  # of a chunk of logits, unless `chunk` says otherwise: 256 MiB in fp32


class _CrossEntropy(torch.autograd.Function):
    """Goes through the vocabulary, not through the rows: each row of the weight's gradient is then
    one product over all tokens, rounded once, and what must be added up over the chunks is as small
    as `hidden`. Backward makes the logits again, which costs one product more and keeps nothing
    between the passes; their exponents are known from the forward's logarithms.

    No operator sees more of `weight` than a chunk, but all of a page is on the device while one
    runs, and only then.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
                chunk: int, ignore_index: int) -> torch.Tensor:
        # `weight` may be of another type than `hidden`, whose type is what is computed in.
        rows = hidden.shape[0]
        logarithm = hidden.new_full((rows,), -torch.inf, dtype=torch.float32)
        chosen = hidden.new_zeros((rows,), dtype=torch.float32)
        for begin, end in _chunks(weight, chunk):
            logits = (hidden @ weight[begin:end].to(hidden.dtype).t()).float()
            inside, index = _within(labels, begin, end)
            chosen += torch.where(inside, logits.gather(1, index)[:, 0], 0.0)
            logarithm = torch.logaddexp(logarithm, logits.logsumexp(1))
        counted = labels != ignore_index
        count = counted.sum()
        ctx.save_for_backward(hidden, weight, labels, logarithm, counted, count)
        ctx.chunk = chunk
        return torch.where(counted, logarithm - chosen, 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, labels, logarithm, counted, count = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        scale = torch.where(counted, gradient / count, 0.0)[:, None]  # of each row
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for begin, end in _chunks(weight, ctx.chunk):
                part = weight[begin:end].to(hidden.dtype)
                of_logits = (hidden @ part.t()).float()
                of_logits.sub_(logarithm[:, None]).exp_()
                inside, index = _within(labels, begin, end)
                of_logits.scatter_add_(1, index, -inside[:, None].float())
                rounded = of_logits.mul_(scale).to(hidden.dtype)
                del of_logits
                if of_hidden is not None:
                    of_hidden += rounded @ part
                if of_weight is not None:
                    of_weight[begin:end] = rounded.t() @ hidden
        return (None if of_hidden is None else of_hidden.to(hidden.dtype)), of_weight, None, None, None


def _chunks(weight: torch.Tensor, chunk: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, weight.shape[0], chunk):
        yield begin, min(begin + chunk, weight.shape[0])


def _within(labels: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are in [begin, end), and their columns there (any column for the others)."""
    inside = (labels >= begin) & (labels < end)
    return inside, torch.where(inside, labels - begin, 0)[:, None]


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *,
                          chunk: int | None = None, ignore_index: int = -100) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(hidden @ weight.T, labels)` without all of the logits.

    `hidden` is (…, features), `weight` (vocabulary, features) as a language model's head has it,
    `labels` (…): the mean in fp32 over the labels that are not `ignore_index`, nan if there are
    none. Nothing is shifted: a label belongs to the hidden state at its place. At most `chunk`
    columns of the logits exist at a time, in forward and in backward; by default as many as make
    256 MiB in fp32. `weight` may be a page, and it may be the embedding's, too.

    The next token of each place, as a causal language model is trained:

    >>> import torch, pagoda
    >>> engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    >>> with engine.build():
    ...     model = torch.nn.Embedding(100, 8)
    >>> _ = engine.attach(model)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    >>> loss = pagoda.chunked_cross_entropy(model(tokens), model.weight, labels, chunk=32)
    >>> logits = model(tokens) @ model.weight.t()
    >>> bool(loss.isclose(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])))
    True
    >>> engine.backward(loss)
    """
    if (weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]
            or labels.shape != hidden.shape[:-1]):
        raise UserError("expected hidden (…, features), weight (vocabulary, features) and labels (…), got "
                        f"shapes {list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)}")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # as it would be for the product itself
        hidden = hidden.to(torch.get_autocast_dtype(device))
    elif hidden.dtype != weight.dtype:
        raise UserError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: convert one of them")
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk = {chunk} is not allowed: expected an integer ≥ 1")
    flat = labels.reshape(-1)
    if chunk is None:
        chunk = max(1, _ELEMENTS // max(1, flat.numel()))
    known = (flat == ignore_index) | ((flat >= 0) & (flat < weight.shape[0]))
    torch._assert_async(known.all(), f"a label is neither below {weight.shape[0]} nor {ignore_index}")
    with torch.autocast(device, enabled=False):
        out: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]), weight, flat, chunk, ignore_index)
    return out
