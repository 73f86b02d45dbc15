# SPDX-License-Identifier: Apache-2.0
"""The GPU's table, made on the CPU with a 4096th of everything: the rows run, what is there is not
run again, and the lines below the table say what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "bench" / "gpu"
sys.path.insert(0, str(GPU))

import run as bench

if torch.cuda.is_available():
    pytest.skip("the rows would take the GPU", allow_module_level=True)

MACHINE = {"to_device": 50e9, "to_host": 50e9, "update": 5e9, "update_bf16": 8e9, "disk": 4e9}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows, in this process."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("results")
    bench.ROWS["8B"][3]["steps"] = 8
    for name in ("p4", "p4-resident", "8B"):
        bench.child(name, directory / f"{name}.json", tiny=True)
    torch.use_deterministic_algorithms(False)
    (directory / "machine.json").write_text(json.dumps(MACHINE))
    return directory


def read(directory: Path, name: str) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return out


def test_states_are_where_the_rows_say(results: Path) -> None:
    resident, paged, small = (read(results, name) for name in ("p4-resident", "p4", "8B"))
    bytes_of = {"host": paged["holders"]["host"], "device": resident["holders"]["device"]}
    for tier, holders in bytes_of.items():
        states = sum(holders.values()) * 2**30
        assert states > 16 * paged["parameters"], tier
    assert paged["holders"]["device"]["pages"] * 2**30 == 2**30 / 4096
    assert paged["moved"]["host_to_device"] > paged["parameters"] * 2
    assert resident["moved"]["host_to_device"] == 0
    # What the host has no room for is on disk, and comes and goes.
    assert small["holders"]["nvme"]["optimizer"] > 0
    assert small["moved"]["nvme_to_host"] > 0
    assert small["holders"]["host"]["activations"] > 0


def test_text_is_learnt(results: Path) -> None:
    losses = read(results, "8B")["losses"]
    assert losses[-1] < losses[0] - 0.2


def test_the_command_goes_on_where_it_was(results: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    (results / "c4.part").write_text("{")  # of a run that was cut off
    done = subprocess.run(
        [sys.executable, str(GPU / "run.py"), "--tiny", "--results", str(results),
         "p4", "p4-resident", "8B", "c4"], check=True, text=True, capture_output=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stderr.splitlines() == ["running c4"]
    assert before.items() <= {path.name: path.stat().st_mtime_ns
                              for path in results.iterdir()}.items()
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["row", "c4", "p4", "p4-resident", "8B"]
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[4].split()[4] == "disk"
    assert lines[5].startswith("link 50.0 GB/s")
    assert "5 losses equal bit for bit" in lines[6]
    assert lines[7].startswith("8B: loss ")


def test_losses_that_differ_are_named() -> None:
    lines = bench.parity({"p4-resident": {"losses": [2.0, 1.5]}, "p4": {"losses": [2.0, 1.25]}})
    assert lines == ["parity of p4-resident and p4: the loss of step 2 differs: 1.5 and 1.25"]
    assert bench.parity({"p4": {"losses": [2.0]}}) == []
