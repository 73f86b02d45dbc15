# SPDX-License-Identifier: Apache-2.0
"""A model whose layers are frozen and thawed, trained by an engine and plainly: for test_thaw.py,
test_thaw_refusals.py, test_cuda.py and ranks.py."""

from __future__ import annotations

from collections.abc import Callable

import parity
import torch
from small_stack import LAYERS, WIDTH, loss_of

import pagoda


def freeze(model: torch.nn.Module, *layers: int) -> None:
    for layer in layers:
        model.get_submodule(str(layer)).requires_grad_(False)


def thaw(model: torch.nn.Module, *layers: int) -> None:
    for layer in layers:
        model.get_submodule(str(layer)).requires_grad_(True)


Schedule = Callable[[torch.nn.Module, int], None]


def trained_plainly(model: torch.nn.Module, before: Schedule, steps: int,
                    loss: parity.Loss = loss_of) -> dict[str, torch.Tensor]:
    """An optimizer that has all parameters, whatever they require when it is made."""
    optimizer = parity.PlainAdamW([])
    optimizer.parameters = list(model.parameters())
    for step in range(steps):
        before(model, step)
        loss(model, step).backward()
        optimizer.step()
    return parity.values(model)


def trained(paged: pagoda.Engine, model: torch.nn.Module, before: Schedule, steps: int,
            loss: parity.Loss = loss_of, plainly: bool = False) -> dict[str, torch.Tensor]:
    for step in range(steps):
        before(model, step)
        if plainly:
            loss(model, step).backward()
        else:
            paged.backward(loss(model, step))
        paged.step()
    return parity.values(model)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def state_bytes(paged: pagoda.Engine, tier: str = "host") -> int:
    """Of gradients and optimizer state."""
    holders = paged.stats()["tiers"][tier]["holders"]
    return sum(holders.get(tag, {"used": 0})["used"] for tag in ("gradients", "optimizer"))


FROZEN_ON_RANKS = (0, 1, 2)
STEPS_ON_RANKS = 5


def on_ranks(model: torch.nn.Module, step: int) -> None:
    """What the ranks of ranks.py do before a step."""
    if step == 2:
        thaw(model, 1)
    if step == 3:
        thaw(model, 0)


def gradually(model: torch.nn.Module, step: int) -> None:
    """ULMFiT: the last layer first, then one more at every other step."""
    if step == 0:
        freeze(model, *range(LAYERS - 1))
    elif step % 2 == 0:
        thaw(model, LAYERS - 1 - step // 2)


class Views(torch.nn.Module):
    """Parameters that are views of one storage, and one with a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        storage = torch.randn(3 * WIDTH * WIDTH + 100) / 8
        self.weights = torch.nn.ParameterList(
            storage[i * WIDTH * WIDTH + 7 * i:][:WIDTH * WIDTH].view(WIDTH, WIDTH).t()
            for i in range(3))
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        out: torch.Tensor = self.last(x)
        return out
