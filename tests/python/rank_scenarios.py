# SPDX-License-Identifier: Apache-2.0
"""One rank of test_divergence.py: what scripts do that diverge, fail or end early on some ranks.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python rank_scenarios.py SCENARIO
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch

import pagoda

RANK = int(os.environ["RANK"])


def setting(name: str, default: str = "") -> str:
    return os.environ.get(f"SCENARIO_{name.upper()}", default)


def make_model(seed: int | None = 0, layers: int = 4, width: int = 32) -> torch.nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def make_engine(**config: Any) -> pagoda.Engine:
    settings: dict[str, Any] = {"device": "cpu", "device_budget": "48KiB", "host_budget": "64MiB",
                                "gradient_staging": "16KiB", "zero": int(setting("zero", "3")),
                                "staging": "16KiB",
                                "timeout": float(setting("timeout", "8")), "heartbeat": 0.5}
    return pagoda.Engine(**{**settings, **config})


def loss_of(model: torch.nn.Module, batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * batch + RANK)
    loss: torch.Tensor = model(torch.randn(4, 32, generator=generator)).square().mean()
    return loss


def train(engine: pagoda.Engine, model: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        engine.backward(loss_of(model, step))
        engine.step()


def started(**config: Any) -> tuple[pagoda.Engine, torch.nn.Module]:
    engine = make_engine(**config)
    with engine.build():
        model = make_model()
    engine.attach(model)
    return engine, model


def release_often() -> None:
    """Every rank releases, over and over."""
    for turn in range(int(setting("turns", "30"))):
        engine, model = started()
        train(engine, model, 1)
        engine.release(model)
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        print("released", turn, values.double().sum().item())
        engine.close()


def clip_on_one() -> None:
    engine = make_engine()
    with engine.build():
        model = make_model()
    engine.attach(model, clip=1.0 if RANK == 0 else None)
    train(engine, model, 3)


def save_or_step() -> None:
    """Rank 1 has a batch more."""
    engine, model = started()
    train(engine, model, 4 if RANK == 0 else 5)
    engine.save_pretrained(setting("directory"))


SCENARIOS = {name: call for name, call in list(globals().items())
             if callable(call) and getattr(call, "__module__", "") == "__main__"}


def main() -> None:
    began = time.monotonic()
    try:
        SCENARIOS[sys.argv[1]]()
    finally:
        print(f"rank {RANK} leaves after {time.monotonic() - began:.1f} s")


main()
