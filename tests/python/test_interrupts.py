# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a rank that waits for another one, and tells the other why; rank_interrupts.py has the
scripts."""

from __future__ import annotations

import pytest
from processes import Ended, run_scenarios, shown
from rank_scenarios import SCENARIOS

Results = dict[str, list[Ended]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = [name for name, call in SCENARIOS.items() if call.__module__ == "rank_interrupts"]
    return run_scenarios(names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [
    "interrupted_for_good_in_step", "interrupted_in_attach", "interrupted_in_save",
    "interrupted_in_close", "interrupted_in_forward"])
def test_a_wait_for_another_rank_ends(name: str, results: Results) -> None:
    ended = results[name]
    assert ended[0].code == -2, shown(ended)
    assert ended[0].output.rstrip().endswith("KeyboardInterrupt"), shown(ended)
    assert "rank 0 failed: KeyboardInterrupt" in ended[1].output, shown(ended)


def test_a_wait_for_ranks_to_connect_ends(results: Results) -> None:
    ended = results["interrupted_while_connecting"]
    assert ended[0].code == -2, shown(ended)
    assert "rank 0 failed: interrupted while it waited for rank 1 to connect" in ended[1].output, \
        shown(ended)


def test_the_other_rank_hears_of_one_that_comes_as_the_engine_is_made(results: Results) -> None:
    ended = results["interrupted_as_it_returns"]
    assert ended[0].code == -2, shown(ended)
    assert "rank 0 failed: it was interrupted while its engine was made" in ended[1].output, shown(ended)


@pytest.mark.parametrize(("name", "line"), [
    ("interrupt_caught_in_step", "interrupted"), ("interrupted_with_another_handler", "asked [2]")])
def test_a_call_that_ends_by_itself_leaves_the_engine_as_it_was(name: str, line: str,
                                                                results: Results) -> None:
    ended = results[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert line in ended[0].output.splitlines(), shown(ended)
    values = [[line for line in one.output.splitlines() if line.startswith("values")]
              for one in ended]
    assert values[0] == values[1] and len(values[0]) == 1, shown(ended)
