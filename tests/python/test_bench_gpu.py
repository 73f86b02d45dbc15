# SPDX-License-Identifier: Apache-2.0
"""The GPU's table, made on the CPU with a 4096th of everything: the rows run, what is there is not
run again, the lines below the table say what they should, and a traced step can be drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

GPU = Path(__file__).parents[2] / "bench" / "gpu"
sys.path.insert(0, str(GPU))

import picture
import run as bench

if torch.cuda.is_available():
    pytest.skip("the rows would take the GPU", allow_module_level=True)

ROWS = ("c4-clip-ahead", "d-nvme", "p4", "p4-resident", "8B")
MACHINE = {"to_device": 50e9, "to_host": 50e9, "update": 5e9, "update_bf16": 8e9, "disk": 4e9}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five rows, in this process."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("results")
    bench.ROWS["8B"][3].update({"steps": 8, "lr": 1e-3})  # so small a model bears more
    for name in ROWS:
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


def test_steps_and_the_disk_take_turns(results: Path) -> None:
    row = read(results, "d-nvme")
    assert len(row["disk_rates"]) == 3
    assert min(row["disk_rates"]) < row["disk"] < max(row["disk_rates"])
    steady = row["all_seconds"][3:]
    assert len(steady) == 8
    assert row["seconds"] == pytest.approx(sum(steady) / 8)
    # All updates of these eight steps, and no others: master and moments, both ways.
    moved = row["moved"]
    assert moved["nvme_to_host"] == moved["host_to_nvme"]
    assert 12 <= moved["nvme_to_host"] / row["parameters"] < 13


def test_updates_do_not_wait_for_the_norm(results: Path) -> None:
    row = read(results, "c4-clip-ahead")
    assert 1 < max(row["norms"]) < 100
    updates = row["updates"]
    assert updates["early"] > updates["pages"] / 2
    assert updates["rolled_back"] == 0
    # Master and moments once more.
    host = row["holders"]["host"]
    assert host["early updates"] == pytest.approx(host["optimizer"] + host["parameters"], rel=0.01)


def test_text_is_learnt(results: Path) -> None:
    losses = read(results, "8B")["losses"]
    assert losses[-1] < losses[0] - 0.2


def test_the_command_goes_on_where_it_was(results: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    (results / "c4-trace.part").write_text("{")  # of a run that was cut off
    done = subprocess.run(
        [sys.executable, str(GPU / "run.py"), "--tiny", "--results", str(results),
         *ROWS, "c4-trace"], check=True, text=True, capture_output=True,
        timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = done.stderr.splitlines()
    assert [line for line in said if line.startswith("running")] == ["running c4-trace"]
    assert said[1].startswith("c4-trace: step 1 of 5: ")
    assert before.items() <= {path.name: path.stat().st_mtime_ns
                              for path in results.iterdir()}.items()
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["row", *ROWS]
    assert len({len(line) for line in lines[:6]}) == 1
    assert lines[2].split()[4] == lines[5].split()[4] == "disk"
    assert lines[6].startswith("link 50.0 GB/s")
    assert lines[7].startswith("d-nvme: 0.0 GB to and from the disk; the step takes ")
    assert lines[8].startswith("c4-clip-ahead: norms ")
    assert "0 of 8 steps clipped" in lines[8]
    assert "5 losses equal bit for bit" in lines[9]
    assert lines[10].startswith("8B: loss ")

    events = picture.read(results / "c4-trace.perfetto.json.gz")
    # The profiler's clock and the engine's agree: an operator is there in both, at its time.
    ours, theirs = ([e for e in events if e.get("cat") == category and e["name"] == "aten::embedding"]
                    for category in ("operator", "cpu_op"))
    assert min(abs(a["ts"] - b["ts"]) for a in ours for b in theirs) < 5000
    drawn = picture.draw(events)
    assert "launching threads" in drawn
    assert "updates on the host" in drawn
    ElementTree.fromstring(drawn)


def test_a_bar_is_as_high_as_its_share() -> None:
    def slice_of(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": 1}

    events = [slice_of("engine", "step", 990, 1000), slice_of("kernel", "nvjet_gemm", 0, 500),
              slice_of("kernel", "flash_bwd", 500, 750), slice_of("kernel", "nvjet_gemm", -9, 3),
              slice_of("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 900, 2000)]
    assert picture.last_step(events) == (0.0, 1000)
    drawn = picture.draw(events)
    assert "75 % of the time" in drawn
    assert "10 % of the time" in drawn
    half = picture.COLUMNS // 2
    assert f"M{picture.LEFT} {picture.TOP + picture.LANE}h{half}v-{picture.LANE}h-{half}z" in drawn
    thin = [(float(i), i + 0.25) for i in range(1000)]
    assert all(abs(share - 0.25) < 0.1 for share in picture.shares(thin, (0, 1000)))


def test_losses_that_differ_are_named() -> None:
    lines = bench.parity({"p4-resident": {"losses": [2.0, 1.5]}, "p4": {"losses": [2.0, 1.25]}})
    assert lines == ["parity of p4-resident and p4: the loss of step 2 differs: 1.5 and 1.25"]
    assert bench.parity({"p4": {"losses": [2.0]}}) == []
