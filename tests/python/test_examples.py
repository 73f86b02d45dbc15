# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    result = subprocess.run([sys.executable, str(ROOT / "examples" / "python" / name), *arguments],
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


def test_trainer_and_lora(tmp_path: Path) -> None:
    run("trainer_lora.py", "--steps", "3", "--out", str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_raw_pointers() -> None:
    out = run("raw_pointers.py")
    assert "by_numpy: page" in out
    assert "engine.pin" in out
    assert "by_numpy: pinned, it works" in out


@pytest.mark.slow
def test_a_compiled_region() -> None:
    out = run("raw_pointers.py", "--compile")
    assert "compiled: page" in out or "compiled: pinned, it works" in out
    print(out)
