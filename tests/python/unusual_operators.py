# SPDX-License-Identifier: Apache-2.0
"""Operators with kernels, arguments or gradients that are not as most, over one weight of a model
that does not fit on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import pagoda

WIDTH, LAYERS = 64, 6

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _coo(weight: torch.Tensor) -> torch.Tensor:
    places = torch.stack([torch.arange(WIDTH), torch.arange(WIDTH).flip(0)])
    return torch.sparse_coo_tensor(places, weight, (WIDTH, WIDTH), check_invariants=True)


def _csr(weight: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.arange(WIDTH + 1), torch.arange(WIDTH).flip(0), weight,
                                   (WIDTH, WIDTH), check_invariants=True)


# Composite operators that have a kernel all the same.
WITH_KERNELS: dict[str, Use] = {
    "silu": lambda weight, x: x * functional.silu(weight),
    "mish": lambda weight, x: x * functional.mish(weight),
    "channel_shuffle": lambda weight, x: x * functional.channel_shuffle(
        weight.reshape(1, 16, 2, 2), 4).reshape(WIDTH),
    "rms_norm": lambda weight, x: functional.rms_norm(x, (WIDTH,), weight),
}

# A sparse tensor has no storage: the weight's is that of its values.
SPARSE: dict[str, Use] = {
    "coo_product": lambda weight, x: torch.sparse.mm(_coo(weight), x.t()),
    "coo_coalesced": lambda weight, x: torch.sparse.mm(_coo(weight).coalesce(), x.t()),
    "coo_to_dense": lambda weight, x: _coo(weight).to_dense() @ x.t(),
    "coo_sum": lambda weight, x: torch.sparse.sum(_coo(weight)) * x,
    "csr_product": lambda weight, x: _csr(weight) @ x.t(),
    "csr_to_dense": lambda weight, x: _csr(weight).to_dense() @ x.t(),
}


class Model(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.use(self.weight, x).sum()


def assert_as_plain(make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor],
                    device: str = "cpu", steps: int = 3) -> None:
    """Rates are powers of two: torch's SGD rounds as the engine's does."""
    plain, model = make(), make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.25)
    with pagoda.Engine(device=device, device_budget="60KB", gradient_staging=20000) as engine:
        engine.attach(model, optimizer="sgd", lr=0.25)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(plain).backward()
            optimizer.step()
            engine.backward(loss(model))
            engine.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)


def assert_used_as_plain(use: Use, device: str = "cpu") -> None:
    assert_as_plain(lambda: Model(use), lambda model: model(torch.ones(2, WIDTH)), device)
