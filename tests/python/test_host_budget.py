# SPDX-License-Identifier: Apache-2.0
"""Without a host_budget the engine takes what is available, less a margin: a model that needs more
spills to disk, or is refused, and the process is not killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pagoda

# 32 MiB of parameters, and 128 MiB with gradients and states, in a process that may have 112 MiB more.
PROGRAM = """
import resource, sys
import torch
import pagoda

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
used = int(status["VmData"].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (112 << 20), resource.RLIM_INFINITY))
disks = {"nvme": sys.argv[1:], "nvme_budget": "256MiB"} if sys.argv[1:] else {}
engine = pagoda.Engine(device="cpu", device_budget="8MiB", fetch_threads=1, update_threads=1, **disks)
budget = engine.stats()["tiers"]["host"]["budget"]
assert 16 << 20 < budget < 100 << 20, budget
with engine.build():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(32)))
try:
    engine.attach(model)
except pagoda.UserError as error:
    print("refused:", error)
    sys.exit()
for _ in range(3):
    engine.backward(model(torch.ones(2, 512)).sum())
    engine.step()
engine.finish()
tiers = engine.stats()["tiers"]
assert tiers["host"]["peak"] <= budget
assert tiers["nvme"]["peak"] > 0
print("trained")
engine.close()
"""


def run(*directories: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, directories)], check=False, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": str(Path(pagoda.__file__).parents[1]),
                                  "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_does_not_fit_goes_to_disk(tmp_path: Path) -> None:
    assert run(tmp_path) == "trained\n"


def test_without_a_disk_it_is_refused() -> None:
    said = run()
    assert said.startswith("refused: the model's states do not fit")
    assert "(what was available to a rank, less a margin)" in said
    assert "set nvme to a directory" in said
