# SPDX-License-Identifier: Apache-2.0
"""For rank_scenarios.py: passes of which some fail or recompute, and what two ranks add up of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from failing import failing
from torch.utils.checkpoint import checkpoint

import pagoda

MICRO_BATCHES = 3


def micro_batch(model: torch.nn.Module, rank: int, number: int, fails_at: int | None,
                checkpointed: bool, backward: Callable[[torch.Tensor], None]) -> None:
    """A pass, on whichever rank. Rank 0's second one fails: it reaches the layers from `fails_at` on.
    `checkpointed`: the last layer is."""
    if (rank, number) != (0, 1):
        fails_at = None
    layers = list(model.children())
    random = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(4, layers[0].weight.shape[1], generator=random)  # type: ignore[index]
    for at, layer in enumerate(layers):
        x = failing(x, ValueError) if at == fails_at else x
        last = at == len(layers) - 1
        x = checkpoint(layer, x, use_reentrant=True) if checkpointed and last else layer(x)
    try:
        backward((failing(x, ValueError) if fails_at == len(layers) else x).square().mean())
    except ValueError:
        assert fails_at is not None


def run_micro_batches(engine: pagoda.Engine, model: torch.nn.Module, rank: int, how: str,
                      checkpointed: bool, fails_at: int | None) -> None:
    for number in range(MICRO_BATCHES):
        micro_batch(model, rank, number, fails_at, checkpointed,
                    engine.backward if how == "engine" else lambda loss: loss.backward())


def expected(model: torch.nn.Module, fails_at: int | None) -> list[torch.Tensor]:
    """Gradients as docs/notes/numerics.md adds them up: micro-batch after micro-batch, in each rank
    after rank."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for number in range(MICRO_BATCHES):
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            micro_batch(model, rank, number, fails_at, False, lambda loss: loss.backward())
            for total, p in zip(totals, model.parameters(), strict=True):
                if p.grad is not None:
                    total += p.grad
                p.grad = None
        for added, total in zip(sums, totals, strict=True):
            added += total * 0.5
    return sums


def write_by_numpy(engine: pagoda.Engine, rank: int) -> None:
    """After each step, to a parameter that is rank 0's and that rank 1 comes to last."""
    with engine.build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    engine.attach(model, lr=0.01)
    last = model[-1].bias
    for step in range(6):
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(step + rank))
        engine.backward(model(x).square().mean())
        engine.step()
        with engine.pin(last):
            there = last.detach().numpy()
            there[...] = np.roll(there, 1)
        print("values", last.tolist())
