# SPDX-License-Identifier: Apache-2.0
"""A small model with its engine, and a check that nothing is left of what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import failing
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

import pagoda

WIDTH = 64


class Net(torch.nn.Module):
    """Six layers, of which the fourth is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.reentrant = False
        self.failing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 2, 3, 4, 3, 5):
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
            if self.failing and number == 3:
                x = failing(x, Mine)
                self.failing = False  # after its first use: backward meets it second
        return x


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def make_engine(**more: Any) -> pagoda.Engine:
    """Two layers fit, and not three."""
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1,
                            **more})


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    return (model(x) - x).square().mean()


def micro_batch(engine: pagoda.Engine, model: torch.nn.Module, step: int) -> None:
    engine.backward(loss_of(model, step))


def plain_micro_batch(engine: pagoda.Engine, model: torch.nn.Module, step: int) -> None:
    loss_of(model, step).backward()


class Mine(Exception):
    """What the user's own code throws."""


def failing_loss(model: Net, step: int = 0) -> torch.Tensor:
    """Its backward fails when some parameters have their gradients, and one a part of it."""
    model.failing = True
    return loss_of(model, step)


Mistake = Callable[[pagoda.Engine, Net], Any]


def check_goes_on(config: dict[str, Any], folder: Path, mistake: Mistake,
                  error: tuple[type[BaseException], str | None], batch: Any = micro_batch,
                  reentrant: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Two steps, the mistake, two steps, a saved model and a released one: as without it."""
    runs = []
    for wrong in (True, False):
        engine, model = make_engine(**config), net(dtype)
        model.reentrant = reentrant
        engine.attach(model, lr=1e-2)
        for step in range(4):
            if wrong and step == 2:
                for _ in range(2):  # the second time finds what the first one left
                    with pytest.raises(error[0], match=error[1]):
                        mistake(engine, model)
            batch(engine, model, step)
            engine.step()
        engine.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        engine.release(model)
        engine.close()
        left = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert all(torch.equal(left[name], value) for name, value in saved.items())
        runs.append(left)
    assert [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])] == []
