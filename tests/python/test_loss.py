# SPDX-License-Identifier: Apache-2.0
"""Cross entropy in chunks is cross entropy, its logits never exist at once, and pages may be its
weight."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils._python_dispatch import TorchDispatchMode

import pagoda

ROWS, FEATURES, VOCABULARY = 24, 16, 50

# Of the largest value, against the same in fp64.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, generator=random).to(dtype)
    weight = torch.randn(VOCABULARY, FEATURES, generator=random).to(dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,), generator=random)


def gradients(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float,
              chunk: int | None, **more: Any) -> list[torch.Tensor]:
    """Loss, hidden's gradient and the weight's; `chunk` 0: torch's own, in fp64."""
    if chunk == 0:
        hidden, weight = hidden.double(), weight.double()
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = cross_entropy(hidden @ weight.t(), labels, **more) if chunk == 0 else \
        pagoda.chunked_cross_entropy(hidden, weight, labels, chunk=chunk, **more)
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def assert_close(ours: list[torch.Tensor], exact: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert [one.dtype for one in ours] == [torch.float32, dtype, dtype]
    for mine, true in zip(ours, exact, strict=True):
        assert (mine - true).abs().max() <= CLOSE[dtype] * true.abs().max()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("chunk", [1, 7, 25, VOCABULARY, 1000, None])
def test_equal_to_torch(dtype: torch.dtype, chunk: int | None) -> None:
    hidden, weight, labels = make(dtype)
    exact = gradients(hidden, weight, labels, 3.0, 0)
    assert_close(gradients(hidden, weight, labels, 3.0, chunk), exact, dtype)


@pytest.mark.parametrize("ignored", [-100, 7])
def test_ignored_labels_count_for_nothing(ignored: int) -> None:
    hidden, weight, labels = make()
    labels[::3] = ignored
    ours = gradients(hidden, weight, labels, 1.0, 7, ignore_index=ignored)
    assert_close(ours, gradients(hidden, weight, labels, 1.0, 0, ignore_index=ignored),
                 torch.float32)
    assert not ours[1][::3].any()


def test_nothing_but_ignored_labels_is_as_torch_has_it() -> None:
    hidden, weight, labels = make()
    labels[:] = -100
    ours, exact = (gradients(hidden, weight, labels, 1.0, chunk) for chunk in (7, 0))
    assert ours[0].isnan()
    assert exact[0].isnan()
    for mine, true in zip(ours[1:], exact[1:], strict=True):
        assert torch.equal(mine.double(), true)


@pytest.mark.parametrize("dtype", CLOSE)
def test_under_autocast_as_torch_has_it(dtype: torch.dtype) -> None:
    """Products in bf16, gradients in the types of what they belong to; backward is of the logits of
    the forward."""
    hidden, weight, labels = make()
    hidden = (hidden * 5).to(dtype)
    exact = gradients(hidden, weight, labels, 1.0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(hidden, weight, labels, 1.0, 7)
        theirs_hidden = hidden.detach().requires_grad_()
        theirs_weight = weight.detach().requires_grad_()
        cross_entropy(theirs_hidden @ theirs_weight.t(), labels).backward()
    assert [one.dtype for one in ours] == [torch.float32, dtype, torch.float32]
    for mine, theirs, true in zip(ours[1:], (theirs_hidden.grad, theirs_weight.grad), exact[1:],
                                  strict=True):
        assert theirs is not None
        assert (mine - true).abs().max() <= 1.5 * (theirs - true).abs().max()


def test_leading_dimensions_strides_and_large_logits() -> None:
    hidden, weight, labels = make()
    hidden *= 20  # their exponentials overflow
    exact = gradients(hidden, weight, labels, 1.0, 0)
    turned = hidden.t().contiguous().t()  # not contiguous
    ours = gradients(turned.view(4, 6, FEATURES), weight, labels.view(4, 6), 1.0, 7)
    assert ours[1].shape == (4, 6, FEATURES)
    assert_close([ours[0], ours[1].view(ROWS, FEATURES), ours[2]], exact, torch.float32)


def test_backward_may_run_twice_and_for_one_input() -> None:
    hidden, weight, labels = make()
    hidden.requires_grad_()
    loss = pagoda.chunked_cross_entropy(hidden, weight, labels, chunk=7)
    first, = torch.autograd.grad(loss, hidden, retain_graph=True)
    second, = torch.autograd.grad(loss, hidden)
    assert torch.equal(first, second)


def test_mistakes_are_named() -> None:
    hidden, weight, labels = make()
    with pytest.raises(pagoda.UserError, match="expected hidden .*got shapes"):
        pagoda.chunked_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(pagoda.UserError, match="bfloat16"):
        pagoda.chunked_cross_entropy(hidden.bfloat16(), weight, labels)
    with pytest.raises(pagoda.UserError, match="chunk = 0"):
        pagoda.chunked_cross_entropy(hidden, weight, labels, chunk=0)
    labels[3] = VOCABULARY
    with pytest.raises(RuntimeError, match="below 50"):
        pagoda.chunked_cross_entropy(hidden, weight, labels)


class Largest(TorchDispatchMode):
    """The most elements that any operator's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return out


def test_only_a_chunk_of_the_logits_exists() -> None:
    largest = []
    for chunk in (0, 10):
        with Largest() as seen:
            gradients(*make(), scale=1.0, chunk=chunk)
        largest.append(seen.elements)
    assert largest == [ROWS * VOCABULARY, VOCABULARY * FEATURES]  # what it must give anyway


class Language(torch.nn.Module):
    """A small language model; `tied`: its head is its embedding."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 32, dtype=dtype)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, dtype=dtype) for _ in range(12))
        self.head = torch.nn.Linear(32, 200, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return pagoda.chunked_cross_entropy(hidden, self.head.weight,
                                            pad(tokens[:, 1:], (0, 1), value=-100), chunk=64)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 200, (4, 9), generator=torch.Generator().manual_seed(step))
    out: torch.Tensor = model(tokens)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_paged_to_the_bit(tied: bool, dtype: torch.dtype) -> None:
    # Room for the head and little else, and for its gradient.
    room = Language(tied, dtype).head.weight.nbytes + 4096
    parity.assert_parity(lambda: Language(tied, dtype), loss_of, device_budget=2 * room + 4096)


def test_paged_with_activations_off_the_device() -> None:
    plain = parity.train_plainly(Language, loss_of)
    engine = pagoda.Engine(**parity.config_below_a_third(Language, device_budget=64000))
    torch.manual_seed(0)
    with engine.build():
        model = Language()
    run = parity.train_attached(engine, model, loss_of,
                                lambda: engine.activations("host", least=64))
    parity.assert_equal(plain, run)
