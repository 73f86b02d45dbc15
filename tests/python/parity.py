# SPDX-License-Identifier: Apache-2.0
"""Trains a model twice, plainly and paged, with the same optimizer: bits must be the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

STEPS = 3
LR = 1e-3
DECAY = 0.01

Make = Callable[[], torch.nn.Module]
Loss = Callable[[torch.nn.Module, int], torch.Tensor]


class PlainAdamW:
    """AdamW over plain tensors, by the kernel that the engine uses."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.state: dict[torch.nn.Parameter, list[Any]] = {}

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is None:
                continue
            if p not in self.state:
                flat = p.detach().reshape(-1).float().cpu().clone()
                self.state[p] = [flat, torch.zeros_like(flat), torch.zeros_like(flat), 0]
            master, m, v, step = self.state[p]
            self.state[p][3] = step + 1
            torch.ops.pagoda.adam_step_(master, p.grad.reshape(-1).cpu(), m, v, step=step + 1, lr=LR,
                                        weight_decay=DECAY)
            with torch.no_grad():
                p.copy_(master.view(p.shape))
            p.grad = None


@dataclass
class Run:
    """What training gave."""

    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_plainly(make: Make, loss: Loss) -> Run:
    torch.manual_seed(0)
    model = make()
    optimizer = PlainAdamW(list(model.parameters()))
    run = Run()
    torch.manual_seed(1)  # dropout
    for step in range(STEPS):
        value = loss(model, step)
        value.backward()
        optimizer.step()
        run.losses.append(value.detach().clone())
    run.parameters = values(model)
    return run


def sizes(model: torch.nn.Module) -> list[int]:
    """Bytes of each page."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes()
                for p in model.parameters()}
    return list(storages.values())


def config_below_a_third(make: Make, **more: Any) -> dict[str, Any]:
    """A budget of less than a third of the parameters, and nothing else that a user would have to know."""
    torch.manual_seed(0)
    return {"device": "cpu", "device_budget": sum(sizes(make())) // 3 - 1, **more}


# What is otherwise on for large models only.
IN_SMALL_PIECES = {"update_chunk": "64KiB", "update_threads": 1, "fetch_threads": 2, "lookup_in_place": 1}


def train_attached(engine: pagoda.Engine, model: torch.nn.Module, loss: Loss,
                   around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Run:
    """Attaches the model and trains it, each forward within what `around` gives."""
    engine.attach(model, lr=LR, weight_decay=DECAY)
    run = Run()
    torch.manual_seed(1)
    for step in range(STEPS):
        with around():
            value = loss(model, step)
        engine.backward(value)
        engine.step()
        run.losses.append(value.detach().clone())
    run.parameters = values(model)
    return run


def check_clipping_ahead(make: Make, loss: Loss, short: bool, **more: Any) -> None:
    """Updates that begin before the norm is known change nothing: neither those of the second step,
    nor those of the third, which clips. `short`: with states of few bytes."""
    config = config_below_a_third(make, **more)
    if short:
        config |= {"moments": "bf16", "master": "split"}
    runs = []
    for ahead in (False, True):
        engine = pagoda.Engine(**config, clip=1.0, clip_ahead=ahead)
        torch.manual_seed(0)
        with engine.build():
            model = make()
        runs.append(train_attached(engine, model,
                                   lambda m, step: loss(m, step) * (1e-3, 1e-3, 1e3)[step]))
        updates = engine.stats()["updates"]
        assert (updates["early"] > updates["rolled_back"] > 0) == ahead
        engine.close()
    assert_equal(*runs)


def train_paged(make: Make, loss: Loss, config: dict[str, Any]) -> Run:
    engine = pagoda.Engine(**config)
    torch.manual_seed(0)
    with engine.build():
        model = make()
    run = train_attached(engine, model, loss)
    stats = engine.stats()
    assert stats["pages"]["device_bytes_peak"] <= config["device_budget"]
    assert stats["pages"]["evictions"] > 0
    engine.close()
    return run


def assert_equal(plain: Run, paged: Run) -> None:
    for step, (a, b) in enumerate(zip(plain.losses, paged.losses, strict=True)):
        assert torch.equal(a, b), f"loss of step {step}: {a} is not {b}"
    assert plain.parameters.keys() == paged.parameters.keys()
    different = [name for name, value in plain.parameters.items()
                 if not torch.equal(value, paged.parameters[name])]
    assert different == []


def assert_parity(make: Make, loss: Loss, **more: Any) -> None:
    assert_equal(train_plainly(make, loss),
                 train_paged(make, loss, config_below_a_third(make, **more)))
