# SPDX-License-Identifier: Apache-2.0
"""A process of test_resident.py: says how much memory it had, beside what it has with torch alone.

    resident.py HOW DIRECTORY

HOW is `start` (an engine with default budgets and a small model), `train` (40 steps with all states on
disk, and what is saved then), `ranks` (the same on one of several ranks started by torchrun, and some
steps with whole pages) or `shapes` (batches of many sizes, then small ones).
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch

import pagoda


def status(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(kind))
    return int(line.split()[1]) << 10


class Peak:
    """The most memory that the process had since this was made, over what it had then."""

    def __init__(self) -> None:
        self.restart()
        self.base = status("VmRSS")

    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int:
        return status("VmHWM") - self.base


def start(_: Path) -> dict[str, Any]:
    peak = Peak()
    engine = pagoda.Engine(device="cpu")
    model = torch.nn.Linear(10, 10)
    engine.attach(model)
    engine.backward(model(torch.ones(1, 10)).sum())
    engine.step()
    engine.finish()
    budget = engine.stats()["tiers"]["device"]["budget"]
    assert "torch._dynamo" not in sys.modules, "attach() imports a compiler"
    return {"peak": peak.bytes(), "budget": budget}


class Residual(torch.nn.Module):
    """Layers without biases: all that is large is a square matrix."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def account(engine: pagoda.Engine) -> int:
    """What the engine itself says that it has taken of this process's memory."""
    tiers = engine.stats()["tiers"]
    return int(tiers["device"]["peak"] + tiers["host"]["peak"])


def engine_on_disk(directory: Path, **more: Any) -> pagoda.Engine:
    return pagoda.Engine(device="cpu", device_budget="80MiB", host_budget="64MiB", nvme=[directory],
                         nvme_budget="1GiB", parameters="nvme", gradients="nvme", optimizer_state="nvme",
                         update_chunk="1MiB", **more)


def train(directory: Path, steps: int = 40, peak: Peak | None = None, **more: Any) -> dict[str, Any]:
    x = torch.randn(8, 1024)
    peak = peak or Peak()
    peak.restart()
    engine = engine_on_disk(directory, **more)
    torch.manual_seed(0)
    with engine.build():
        model = Residual(48, 1024)
    out: dict[str, Any] = {"parameters": sum(p.nbytes for p in model.parameters()),
                           "built": peak.bytes()}
    engine.attach(model, clip=1.0)
    for step in range(steps):
        engine.backward(model(x).square().mean())
        engine.step()
        if step == steps // 4:
            out["early"] = peak.bytes()
    engine.grad_norm()
    out["trained"] = peak.bytes()
    engine.save_pretrained(directory / "out")
    out["saved"] = peak.bytes()
    out["account"] = account(engine)
    out["unbudgeted"] = engine.stats()["unbudgeted"]
    engine.close()
    return out


def ranks(directory: Path) -> None:
    """Into a file for each rank: they share their standard output, where lines may mix."""
    peak = Peak()
    out = {str(zero): train(directory, steps, peak, zero=zero, bucket="4MiB")
           for zero, steps in ((3, 40), (1, 4), (0, 4))}
    rank = os.environ["RANK"]
    (directory / f"rank{rank}.json").write_text(json.dumps(out))


def shapes(directory: Path) -> dict[str, Any]:
    peak = Peak()
    engine = engine_on_disk(directory)
    with engine.build():
        model = Residual(12, 1024)
    engine.attach(model)

    def step(batch: int) -> None:
        engine.backward(model(torch.randn(batch, 1024)).square().mean())
        engine.step()

    for batch in (100, 2000, 700, 1500, 300, 1900, 1100):
        step(batch)
    large = peak.bytes()
    for _ in range(3):
        step(8)
    engine.finish()
    peak.restart()
    step(8)
    return {"large": large, "small": peak.bytes(), "account": account(engine),
            "free_heap": engine.stats()["unbudgeted"]["free_heap"]}


def main() -> None:
    torch.set_num_threads(1)
    torch.ones(600, 600, requires_grad=True).mm(torch.ones(600, 600)).sum().backward()  # threads
    ways: dict[str, Callable[[Path], dict[str, Any] | None]] = {
        "start": start, "train": train, "ranks": ranks, "shapes": shapes}
    measured = ways[sys.argv[1]](Path(sys.argv[2]))
    if measured is not None:
        print(json.dumps(measured))


main()
