# SPDX-License-Identifier: Apache-2.0
"""The wheel holds all that the package needs, for any Python version."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parents[2]

TRAINS = """
import pagoda, torch
assert pagoda.__file__.startswith({site!r}), pagoda.__file__
engine = pagoda.Engine(device="cpu", device_budget="1MiB")
with engine.build():
    model = torch.nn.Linear(8, 8)
engine.attach(model)
engine.backward(model(torch.ones(1, 8)).sum())
print(engine.step().step)
"""


def run(*command: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PAGODA_BUILD"}
    result = subprocess.run([sys.executable, *command], check=False, text=True, capture_output=True,
                            timeout=250, env={**kept, **environment})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_wheel_is_built_installed_and_used(build: Path, tmp_path: Path) -> None:
    library = build / "lib" / "libpagoda.so"  # as built already: compiling is tested elsewhere
    run("-m", "pip", "wheel", str(SOURCE), "--no-deps", "--no-build-isolation", "--quiet",
        "--wheel-dir", str(tmp_path / "wheels"), "-C", f"build-dir={tmp_path / 'build'}",
        "-C", f"cmake.define.PAGODA_PREBUILT={library}")
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith("pagoda-0.1.0-py3-none-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pagoda/py.typed" in names
    assert "pagoda/lib/libpagoda.so" in names
    assert not [name for name in names if not name.startswith("pagoda")]
    site = tmp_path / "site"
    run("-m", "pip", "install", "--no-deps", "--quiet", "--no-index", "--target", str(site),
        str(wheel))
    assert run("-c", TRAINS.format(site=str(site)), PYTHONPATH=str(site)) == "1\n"
