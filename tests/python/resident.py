# SPDX-License-Identifier: Apache-2.0
"""A process of test_resident.py: says how much memory it had, beside what it has with torch alone.

    resident.py HOW DIRECTORY

HOW is `start` (an engine with default budgets and a small model).
"""

import json
import sys
from pathlib import Path

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


def start(_: Path) -> dict[str, int]:
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


def main() -> None:
    torch.set_num_threads(1)
    torch.ones(600, 600, requires_grad=True).mm(torch.ones(600, 600)).sum().backward()  # threads
    how, directory = sys.argv[1], Path(sys.argv[2])
    print(json.dumps({"start": start}[how](directory)))


main()
