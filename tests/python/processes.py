# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of their own, without torchrun: nobody ends the others when one ends, so
that a test sees how each of them does by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torch import distributed


class Ended(NamedTuple):
    """How a rank ended."""

    code: int
    output: str
    seconds: float
    """After the first rank said that it was ready, or after its start."""


def run_ranks(scenario: str, ranks: int = 2, *, limit: float = 100, **settings: str) -> list[Ended]:
    """Runs a scenario of rank_scenarios.py on every rank. A rank that takes longer than `limit`
    seconds is killed: its code is -9, and its output says so."""
    # The store is here, as under torchrun: no rank takes it along when it ends.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
                   "TORCHELASTIC_USE_AGENT_STORE": "True",
                   **{f"SCENARIO_{name.upper()}": value for name, value in settings.items()}}
    script = str(Path(__file__).with_name("rank_scenarios.py"))
    began = time.monotonic()
    outputs = [tempfile.TemporaryFile(mode="w+") for _ in range(ranks)]
    processes = [subprocess.Popen([sys.executable, script, scenario], stdout=output,
                                  stderr=subprocess.STDOUT,
                                  env={**environment, "RANK": str(rank)})
                 for rank, output in enumerate(outputs)]
    seconds = [0.0] * ranks
    killed = [False] * ranks
    running = set(range(ranks))
    while running:
        for rank in list(running):
            if processes[rank].poll() is not None:
                seconds[rank] = time.monotonic() - began
                running.discard(rank)
        if time.monotonic() - began > limit:
            for rank in running:
                processes[rank].kill()
                killed[rank] = True
            limit = float("inf")
        time.sleep(0.02)
    ended = []
    for rank, output in enumerate(outputs):
        output.seek(0)
        text = output.read() + ("\nkilled: it did not end in time\n" if killed[rank] else "")
        ended.append(Ended(processes[rank].returncode, text, seconds[rank]))
        output.close()
    return ended


def all_output(ended: list[Ended]) -> str:
    """For a failed assertion."""
    return "\n".join(f"--- rank {rank}, code {one.code}, {one.seconds:.1f} s\n{one.output}"
                     for rank, one in enumerate(ended))
