# SPDX-License-Identifier: Apache-2.0
"""Whoever dies while ranks join each other is named by the others, as soon as they can know it and
within join_timeout at the latest; rank_joins.py has the scripts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Ended, Results, lines, run_scenarios, shown
from rank_joins import LONG, SHORT, WORDS
from rank_scenarios import SCENARIOS

LIMIT = 45.0
"""Seconds after which a rank that still waits is killed."""
assert LONG > 3 * LIMIT > 15 * SHORT
# Gloo's, torch's and the store's words.
FOREIGN = ("gloo", ".cc:", ".cpp:", "connectFullMesh", "frame #", "Exception raised", "SocketImpl",
           "Connection reset", "Broken pipe")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = [name for name, call in SCENARIOS.items() if call.__module__ == "rank_joins"]
    return run_scenarios(names, tmp_path_factory.mktemp("ranks"), 3, limit=LIMIT)


def check(ended: list[Ended], victim: int, said: str, code: int = -9) -> None:
    for rank, one in enumerate(ended):
        if rank == victim:
            assert one.code == code, shown(ended)
            continue
        assert one.code == 0, shown(ended)
        assert said in lines(one, "error")[0], shown(ended)
        assert not [word for word in FOREIGN if word in one.output], shown(ended)


@pytest.mark.parametrize("where", WORDS)
def test_a_rank_that_is_killed_is_named_at_once(where: str, results: Results) -> None:
    check(results[f"killed_{where}"], 1, "rank 1 was killed or ended")


@pytest.mark.parametrize("where", WORDS)
def test_the_rank_that_has_the_store_is_named_at_once(where: str, results: Results) -> None:
    said = "rank 0, which has the store, was killed or ended"
    if where == "in_agreement":  # its connections break, too
        said = "was killed or ended"
    check(results[f"holder_killed_{where}"], 0, said)


def test_no_wait_for_a_stopped_rank_outlives_join_timeout(results: Results) -> None:
    check(results["stopped"], 1, "rank 1 has not answered for")
    check(results["holder_stopped"], 0, "rank 0, which has the store, has not answered for")


def test_a_store_that_never_comes_is_waited_for_as_long_as_is_said(results: Results) -> None:
    check(results["holder_never_starts"], 0, "raise join_timeout", code=0)


def test_a_second_engine_does_not_wait_for_a_rank_that_has_gone(results: Results) -> None:
    check(results["partner_has_gone"], 1, "rank 1 was killed or ended", code=0)


def test_a_second_engine_waits_for_a_rank_that_is_late(results: Results) -> None:
    assert [one.code for one in results["partner_comes_late"]] == [0, 0, 0], shown(
        results["partner_comes_late"])


def test_a_rank_that_is_killed_later_is_named_without_foreign_words(results: Results) -> None:
    check(results["killed_later"], 1, "rank 1 was killed or ended")


def test_a_rank_that_finds_no_store_says_what_it_waits_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = "import pagoda; pagoda.Engine(device='cpu', timeout=2, join_timeout=4)"
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, text=True, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python"), "RANK": "1",
             "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert f"waiting for the store at which the ranks meet at=\"127.0.0.1:{port}" in ended.stderr
    assert f"no store at 127.0.0.1:{port}" in ended.stderr and ended.returncode == 1
