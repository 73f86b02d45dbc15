# SPDX-License-Identifier: Apache-2.0
"""A model of six layers, and an engine that holds two of them."""

from __future__ import annotations

from typing import Any

import torch

import pagoda

WIDTH = 64
LAYERS = 6
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes of one, in fp32


def engine(**more: Any) -> pagoda.Engine:
    """Holds two of the layers of `stack()`."""
    return pagoda.Engine(**{"device": "cpu", "device_budget": "72KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1,
                            "staging": "1MiB",
                            **more})


def stack(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(x) - x).float().square().mean()


def steps(paged: pagoda.Engine, model: torch.nn.Module, count: int) -> None:
    for step in range(count):
        paged.backward(loss_of(model, step))
        paged.step()
