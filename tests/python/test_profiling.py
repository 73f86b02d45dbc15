# SPDX-License-Identifier: Apache-2.0
"""torch.profiler beside an engine: it neither ends the process nor prints an error for every operator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
import torch, pagoda
from torch import nn, profiler

options = {name: True for name in sys.argv[2:]}
warnings.simplefilter("always")

def profile():
    return profiler.profile(activities=[profiler.ProfilerActivity.CPU], **options)

if sys.argv[1] == "before":
    with profile():
        try:
            pagoda.Engine(device="cpu", device_budget="80KiB")
        except pagoda.UserError as error:
            print(error)
    sys.exit()
engine = pagoda.Engine(device="cpu", device_budget=sys.argv[1], gradient_staging="20KiB")
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
engine.attach(model, lr=1e-3)
for _ in range(2):
    with profile() as profiled:
        engine.backward(model(torch.ones(4, 64)).sum())
        engine.step()
print("operators", sum(one.name == "aten::addmm" for one in profiled.events()))
engine.close()
with profile():  # nobody lives who minds
    model(torch.ones(4, 64))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=False, text=True,
                          capture_output=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")})


@pytest.mark.parametrize("budget", ["80KiB", "64MiB"])
def test_what_reads_pointers_is_off(budget: str) -> None:
    result = run(budget, "record_shapes", "with_stack", "with_flops", "profile_memory")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "operators 4" in result.stdout
    assert result.stderr.count("record_shapes, with_flops, with_stack are off") >= 1
    assert "Exception in RecordFunction" not in result.stderr


def test_what_reads_no_pointers_is_recorded_without_a_warning() -> None:
    result = run("80KiB", "profile_memory", "with_modules")
    assert result.returncode == 0 and "operators 4" in result.stdout
    assert "off while" not in result.stderr


def test_a_profiler_that_runs_already_is_named() -> None:
    result = run("before", "with_stack")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "torch.profiler runs with with_stack=True" in result.stdout
