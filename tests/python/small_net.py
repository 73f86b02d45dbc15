# SPDX-License-Identifier: Apache-2.0
"""A small model and an engine for it, for tests of what may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagoda

WIDTH = 16


def engine(**more: Any) -> pagoda.Engine:
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "host_budget": "64MiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1, **more})


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x) - x).square().mean()


def trains(paged: pagoda.Engine, model: torch.nn.Module, steps: int = 2) -> None:
    before = paged.stats()["steps"]
    for step in range(steps):
        paged.backward(loss_of(model, step))
        paged.step()
    assert paged.stats()["steps"] == before + steps


def raises(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(pagoda.UserError, match=match):
        call()
