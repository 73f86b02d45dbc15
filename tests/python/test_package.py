# SPDX-License-Identifier: Apache-2.0
"""The package is typed, and the examples in its docstrings run."""

import os
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).parents[2] / "python"


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], check=False, text=True,
                            capture_output=True, cwd=PYTHON, timeout=280,
                            env={**os.environ, "PYTHONPATH": str(PYTHON), "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_types() -> None:
    run("mypy", "--strict", f"--cache-dir={os.devnull}", "pagoda")


def test_examples() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "pagoda")
