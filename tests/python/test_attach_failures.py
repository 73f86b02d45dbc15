# SPDX-License-Identifier: Apache-2.0
"""An attach() that fails leaves the model and the engine as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_scenarios, shown
from small_net import WIDTH, engine, net, raises, trains

import pagoda


def values(model: torch.nn.Module) -> list[bytes]:
    """By raw pointers: of plain tensors."""
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def used(paged: pagoda.Engine) -> dict[str, int]:
    return {name: tier["used"] for name, tier in paged.stats()["tiers"].items()}


class Overlapping(torch.nn.Module):
    """Two parameters that share some of their elements, after one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        flat = torch.arange(float(WIDTH))
        self.low = torch.nn.Parameter(flat[:10])
        self.high = torch.nn.Parameter(flat[6:])


def test_parameters_that_overlap() -> None:
    paged, model = engine(), Overlapping()
    before, memory = values(model), used(paged)
    raises(lambda: paged.attach(model), "'high' cannot be trained: parameters share elements")
    assert used(paged) == memory
    assert values(model) == before
    model.low.detach()[7] = 5.0
    assert model.high[1].item() == 5.0  # they still share their storage
    paged.close()
    assert model.high[1].item() == 5.0


def test_a_host_budget_that_is_too_small() -> None:
    paged = engine(host_budget="1MiB", update_chunk="16KiB", staging="16KiB")
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(40)))
    before, memory = values(model), used(paged)
    raises(lambda: paged.attach(model), "host_budget")
    assert used(paged) == memory
    assert values(model) == before
    small = net()
    paged.attach(small)
    trains(paged, small)


def test_states_that_do_not_fit() -> None:
    """The parameters do: they have become pages when that is found out."""
    paged = engine(host_budget="1MiB", update_chunk="16KiB", staging="16KiB", device_budget="512KiB")
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))
    before, memory = values(model), used(paged)
    raises(lambda: paged.attach(model), "host_budget")
    assert used(paged) == memory
    assert values(model) == before


def test_a_device_budget_that_is_too_small() -> None:
    paged = engine()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(200, 200))
    before, memory = values(model), used(paged)
    raises(lambda: paged.attach(model), "device_budget")
    assert used(paged) == memory
    assert values(model) == before


def test_what_was_a_page_before_stays_one() -> None:
    paged = engine()
    with paged.build():
        born = torch.nn.Linear(WIDTH, WIDTH)
    model = Overlapping()
    model.first = born
    raises(lambda: paged.attach(model), "share elements")
    del model.low, model.high
    paged.attach(model)
    paged.backward(born(torch.ones(1, WIDTH)).sum())
    paged.step()


OUT_OF_MEMORY = """
import resource, sys
import torch, pagoda
from pathlib import Path

def data():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmData"))
    return int(line.split()[1]) << 10

engine = pagoda.Engine(device="cpu", device_budget="64MiB", host_budget="1GiB", staging="64KiB",
                       parameters="host", update_chunk="64KiB", update_threads=1)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
before = [p.detach().clone() for p in model.parameters()]
small = torch.nn.Linear(8, 8)
engine.attach(small)
engine.backward(small(torch.ones(1, 8)).sum())
engine.step()
engine.release(small)
resource.setrlimit(resource.RLIMIT_DATA, (data() + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
try:
    engine.attach(model)
except (pagoda.Error, RuntimeError, MemoryError) as error:
    print("refused:", type(error).__name__, str(error).splitlines()[0][:200])
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with torch.no_grad():
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
engine.attach(model)
engine.backward(model(torch.ones(1, 1024)).sum())
engine.step()
print("trained")
"""


@pytest.mark.parametrize("room", [6, 24, 40])
def test_memory_that_runs_out(room: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python"),
                   "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY, str(room)], capture_output=True,
                          text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: " in done.stdout and "trained" in done.stdout, done.stdout


@pytest.mark.parametrize("zero", [0, 3])
def test_what_one_rank_meets_none_has_done(zero: int, tmp_path: Path) -> None:
    name = f"attach_fails_on_one_{zero}"
    ended = run_scenarios([name], tmp_path)[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
