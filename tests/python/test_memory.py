# SPDX-License-Identifier: Apache-2.0
"""Models larger than the memory that their process may use: built, loaded, trained and saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(how: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(Path(__file__).with_name("limited.py")), how,
                           str(directory)], check=False, text=True, capture_output=True,
                          timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})


def report(how: str, directory: Path) -> dict[str, Any]:
    result = run(how, directory)
    assert result.returncode == 0, result.stdout + result.stderr
    out: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(out)
    assert out["parameters"] > 2 * out["room"]
    assert out["most"] < out["room"]
    return out


def test_a_model_beyond_the_limit_of_its_process(tmp_path: Path) -> None:
    first = report("config", tmp_path)
    shards = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert shards > first["parameters"]
    again = report("checkpoint", tmp_path)
    report("converted", tmp_path)
    assert again["loss"] != first["loss"]  # a step was made in between
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_without_an_engine_the_limit_is_met(tmp_path: Path) -> None:
    result = run("plain", tmp_path)
    assert result.returncode != 0
    assert "allocate memory" in result.stderr or "MemoryError" in result.stderr, result.stderr
