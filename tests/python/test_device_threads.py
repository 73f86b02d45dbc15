# SPDX-License-Identifier: Apache-2.0
"""Backward passes on the thread of an accelerator, as autograd runs them with a GPU, on machines that have
none: passes that begin on another thread than the one around them, and hooks that call the engine from
there (docs/notes/passes.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_thread_programs import PROGRAMS


@pytest.fixture(scope="module")
def ended(build: Path) -> dict[str, str]:
    """How each of the programs has ended: in a process of its own, for torch has one accelerator."""
    library = build / "lib" / "tests" / "libhost_accelerator.so"
    if not library.exists():
        pytest.skip(f"{library} is not built: ninja -C {build} host_accelerator")
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("device_thread_programs.py")), str(library)],
        check=False, text=True, capture_output=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(root / "python"), "CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(ended: dict[str, str], name: str) -> None:
    assert ended[name] == "", ended[name]
