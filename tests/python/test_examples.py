# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str, ranks: int = 1) -> str:
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone",
                                    "--nproc-per-node", str(ranks)]
    result = subprocess.run([sys.executable, *launch, str(ROOT / "examples" / "python" / name),
                             *arguments],
                            check=False, text=True, capture_output=True, timeout=250,
                            env={**os.environ, "PYTHONPATH": str(ROOT / "python"),
                                 "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_train(tmp_path: Path) -> None:
    out = run("train.py", "--steps", "3", "--out", str(tmp_path / "out"), "--nvme", str(tmp_path))
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert (tmp_path / "out" / "config.json").exists()


def test_train_under_torchrun(tmp_path: Path) -> None:
    """As it is: its ranks make models of their own, and rank 0's is trained."""
    out = run("train.py", "--steps", "3", "--out", str(tmp_path / "out"), "--nvme", str(tmp_path),
              ranks=2)
    losses = re.findall(r"  loss (\d+\.\d{4})", out)  # lines of two processes may come as one
    assert len(losses) == 6, out
    for step in range(3):  # the same text on both ranks, so the same loss
        assert sorted(losses)[2 * step] == sorted(losses)[2 * step + 1]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_trainer_and_lora(tmp_path: Path) -> None:
    run("trainer_lora.py", "--steps", "3", "--out", str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_raw_pointers() -> None:
    out = run("raw_pointers.py")
    assert re.search(r"by_numpy: page '\d+\.weight'", out)
    assert "engine.pin" in out
    assert "by_numpy: pinned, it works" in out


@pytest.mark.slow
def test_a_compiled_region() -> None:
    out = run("raw_pointers.py", "--compile")
    assert "compiled: page" in out or "compiled: pinned, it works" in out
    print(out)
