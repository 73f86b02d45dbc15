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


def run(*arguments: object, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).with_name("resident.py")),
         *(str(argument) for argument in arguments)], check=False, text=True, capture_output=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    out: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(out)
    return out


def test_a_default_engine_takes_what_it_uses(tmp_path: Path) -> None:
    out = run("start", tmp_path)
    assert out["budget"] > 256 * MIB, "there is too little memory to see anything"
    assert out["peak"] < 64 * MIB
