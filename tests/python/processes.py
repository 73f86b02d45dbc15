# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of their own, without torchrun: nobody ends the others when one ends, so
that a test sees how each of them does by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torch import distributed


class Ended(NamedTuple):
    """How a rank ended."""

    code: int
    """Negative: the signal. -9 where it did not end in time."""
    output: str
    seconds: float


Results = dict[str, list[Ended]]


def run_scenarios(names: list[str], directory: Path, ranks: int = 2, *,
                  limit: float = 40) -> Results:
    """Runs scenarios of rank_scenarios.py, one after the other, on every rank: each in a process of
    its own, forked from one that has imported torch. A rank that takes longer than `limit` seconds
    is killed."""
    # The stores are here, as under torchrun: no rank takes one along when it ends.
    stores = [distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
              for _ in names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PAGODA_LOG": "info", "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "127.0.0.1",
                   "WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = str(Path(__file__).with_name("rank_scenarios.py"))
    plan = json.dumps({"names": names, "ports": [store.port for store in stores], "limit": limit,
                       "directory": str(directory)})
    ended: Results = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as results:
        drivers = [subprocess.Popen([sys.executable, script, plan, results],
                                    env={**environment, "RANK": str(rank)})
                   for rank in range(ranks)]
        codes = [driver.wait(timeout=limit * len(names) + 100) for driver in drivers]
        assert codes == [0] * ranks
        for name in names:
            for rank in range(ranks):
                found = json.loads(Path(results, f"{name}.{rank}.json").read_text())
                output = Path(results, f"{name}.{rank}.txt").read_text()
                ended[name].append(Ended(found["code"], output, found["seconds"]))
    return ended


def shown(ended: list[Ended]) -> str:
    """For a failed assertion."""
    return "\n".join(f"--- rank {rank}, code {one.code}, {one.seconds:.1f} s\n{one.output}"
                     for rank, one in enumerate(ended))


def lines(one: Ended, word: str) -> list[str]:
    """What it has printed after that word."""
    return [line.removeprefix(word + " ") for line in one.output.splitlines()
            if line.startswith(word + " ")]


def check_same_values(ended: list[Ended]) -> None:
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert lines(ended[0], "values") != [], shown(ended)
    assert lines(ended[0], "values") == lines(ended[1], "values"), shown(ended)
