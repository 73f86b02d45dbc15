# SPDX-License-Identifier: Apache-2.0
"""Random training programs give the bits of a plain loop: tests/python/fuzz/run.py replays a seed.
PAGODA_TEST_SEEDS=FIRST:END runs other ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "fuzz" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], check=False, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("ranks", "seeds"), [(1, "0:200"), (2, "0:200")])
def test_random_programs(ranks: int, seeds: str) -> None:
    seeds = os.environ.get("PAGODA_TEST_SEEDS", seeds)
    result = run("--seeds", seeds, "--ranks", str(ranks))
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-4000:]


def test_kept_programs() -> None:
    """What failed once."""
    result = run("--kept")
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-4000:]


def test_a_wrong_bit_is_seen() -> None:
    """The comparison can fail: an engine with another learning rate is told, and replayed."""
    result = run("--seeds", "0:3", "--wrong", "rate")
    assert result.returncode == 1
    assert "elements differ" in result.stdout and "--seed" in result.stdout


@pytest.mark.parametrize("how", ["crash", "hang"])
def test_a_program_that_ends_its_process_is_named(how: str) -> None:
    result = run("--seeds", "0:4", "--wrong", how, "--limit", "25" if how == "hang" else "100")
    assert result.returncode == 1
    assert "FAILED: seed 2" in result.stdout
    assert "4 programs, 1 failed (2)" in result.stdout, result.stdout
    assert "in run_paged" in result.stdout  # the stack
