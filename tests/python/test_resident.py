# SPDX-License-Identifier: Apache-2.0
"""The memory that a process has is what the engine says that it takes, and little more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
# Beside the account: 32 MiB of freed blocks that are kept for the next tensors (LargeBlocks::kKept in
# src/pagoda/torch/large_blocks.h), of which a gradient that is being made and the few activations of
# these models are part. docs/config.md, "What counts", says so.
BESIDE = 32 * MIB


def run(*arguments: object, launcher: tuple[str, ...] = ()) -> str:
    """What resident.py has printed."""
    result = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).with_name("resident.py")),
         *(str(argument) for argument in arguments)], check=False, text=True, capture_output=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    print(result.stdout)
    return result.stdout


def measured(*arguments: object) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(run(*arguments).splitlines()[-1])
    return out


def test_a_default_engine_takes_what_it_uses(tmp_path: Path) -> None:
    out = measured("start", tmp_path)
    assert out["budget"] > 256 * MIB, "there is too little memory to see anything"
    assert out["peak"] < 64 * MIB


def test_training_from_disk_takes_what_the_engine_says(tmp_path: Path) -> None:
    out = measured("train", tmp_path)
    assert out["parameters"] == 192 * MIB
    assert out["account"] < 144 * MIB
    assert out["built"] <= out["account"] + BESIDE
    assert out["trained"] <= out["account"] + BESIDE
    assert out["trained"] <= out["early"] + 8 * MIB, "it grows"
    assert out["saved"] <= out["account"] + BESIDE
    beside = out["unbudgeted"]
    assert 0 < beside["free_blocks"] <= BESIDE
    assert 0 < beside["free_heap"]
    assert beside["group_buffers"] == 0, "there is no gradient_group"


def test_so_does_every_rank(tmp_path: Path) -> None:
    run("ranks", tmp_path, launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    for rank in range(2):
        for zero, out in json.loads((tmp_path / f"rank{rank}.json").read_text()).items():
            print(rank, zero, out)
            assert out["account"] <= 144 * MIB
            assert out["built"] <= out["account"] + BESIDE
            assert out["trained"] <= out["account"] + BESIDE
            assert out["saved"] <= out["account"] + BESIDE


def test_what_large_batches_took_comes_back(tmp_path: Path) -> None:
    out = measured("shapes", tmp_path)
    assert out["large"] > out["account"] + 2 * BESIDE, "there is nothing to come back"
    assert out["small"] <= out["account"] + BESIDE
    assert out["free_heap"] < 16 * MIB, "activations have left holes in the heap"
