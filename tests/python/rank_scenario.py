# SPDX-License-Identifier: Apache-2.0
"""What the scenarios of rank_scenarios.py have in common: a name, an engine, a model."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch
from torch import distributed

import pagoda

RANK = int(os.environ.get("RANK", "0"))
WIDTH = 32
TIMEOUT = 20.0
"""Of engines where nothing shall wait for it: a test that has to wait so long has failed."""

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(call: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[call.__name__] = call
    return call


def move_store_to_rank_0() -> distributed.TCPStore:
    """Rank 0 has the store of the engines made from now on, as without torchrun, at a free port that
    it tells the others. Returns the store of before, which outlasts rank 0."""
    before = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            before.set("port", str(free.getsockname()[1]))
    os.environ.update(MASTER_PORT=before.get("port").decode(),
                      TORCHELASTIC_USE_AGENT_STORE="False")
    return before


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def make_engine(**config: Any) -> pagoda.Engine:
    settings: dict[str, Any] = {"device": "cpu", "device_budget": "48KiB", "host_budget": "64MiB",
                                "gradient_staging": "16KiB", "staging": "16KiB",
                                "timeout": TIMEOUT, "heartbeat": 0.25}
    return pagoda.Engine(**{**settings, **config})


def loss_of(model: torch.nn.Module, batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * batch + RANK)
    loss: torch.Tensor = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    return loss


def train(engine: pagoda.Engine, model: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        engine.backward(loss_of(model, step))
        engine.step()


def started(**config: Any) -> tuple[pagoda.Engine, torch.nn.Module]:
    engine = make_engine(**config)
    with engine.build():
        model = make_model()
    engine.attach(model, lr=0.01)
    return engine, model


def values(model: torch.nn.Module) -> str:
    """A text that is the same for the same bits."""
    with torch.no_grad():
        return str([p.double().sum().item() for p in model.parameters()])


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
