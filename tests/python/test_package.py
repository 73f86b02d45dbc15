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


def imported(**environment: str) -> subprocess.CompletedProcess[str]:
    """A process that imports the package and makes an engine."""
    return subprocess.run(
        [sys.executable, "-c", "import pagoda; pagoda.Engine(device='cpu', device_budget='1MiB')"],
        check=False, text=True, capture_output=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(PYTHON), "OMP_NUM_THREADS": "1", **environment})


def test_a_folder_without_a_build_is_not_ignored(tmp_path: Path) -> None:
    result = imported(PAGODA_BUILD=str(tmp_path))
    assert result.returncode != 0
    assert f"{tmp_path}/lib/libpagoda.so): PAGODA_BUILD names a directory without a build" in result.stderr


def test_an_unknown_log_level_is_told_once() -> None:
    result = imported(PAGODA_LOG="loud")
    assert result.returncode == 0
    assert result.stderr.count("PAGODA_LOG is ignored: 'loud' is not a log level") == 1
    assert "trace, debug, info, warn, error, off" in result.stderr
    assert "ignored" not in imported(PAGODA_LOG="debug").stderr


def test_types() -> None:
    run("mypy", "--strict", f"--cache-dir={os.devnull}", "pagoda")


def test_examples() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "pagoda")
