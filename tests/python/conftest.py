# SPDX-License-Identifier: Apache-2.0
"""Tests that drive the library and the program from outside, run by CTest with the build's folder
in PAGODA_BUILD."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: run by ./test.sh --all")


@pytest.fixture(scope="session")
def build() -> Path:
    return Path(os.environ.get("PAGODA_BUILD", Path(__file__).parents[2] / "build"))


@pytest.fixture(scope="session")
def pagoda(build: Path):
    """Runs the program: pagoda("bench", "io") → CompletedProcess with text."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(build / "bin" / "pagoda"), *arguments], check=False, text=True,
                              capture_output=True, env={**os.environ, **environment}, timeout=300)

    return run
