# SPDX-License-Identifier: Apache-2.0
"""A parameter that was frozen when its model was attached trains from the step after it is thawed:
the same bits as a plain loop, in which an optimizer has had it all along."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from zoo import ZOO

import pagoda

WIDTH = 64
LAYERS = 6
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes of one, in fp32


def engine(**more: Any) -> pagoda.Engine:
    """Holds two of the layers of `stack()`."""
    return pagoda.Engine(**{"device": "cpu", "device_budget": "72KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1,
                            **more})


def stack(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(x) - x).float().square().mean()


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


def gradually(model: torch.nn.Module, step: int) -> None:
    """ULMFiT: the last layer first, then one more at every other step."""
    if step == 0:
        freeze(model, *range(LAYERS - 1))
    elif step % 2 == 0:
        thaw(model, LAYERS - 1 - step // 2)


# The bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plainly", [False, True])
def test_gradual_thawing_is_a_plain_loops(dtype: torch.dtype, plainly: bool) -> None:
    expected = trained_plainly(stack(dtype), gradually, 11)
    paged = engine()
    model = stack(dtype)
    gradually(model, 0)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    got = trained(paged, model, lambda m, step: gradually(m, step) if step > 0 else None, 11,
                  plainly=plainly)
    assert_same(expected, got)
    assert all(p.grad is None for p in model.parameters())
