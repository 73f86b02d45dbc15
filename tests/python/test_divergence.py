# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not do the same, that fail or that end early: the others say so, with both sides or
the cause, and long before a time-out. rank_scenarios.py has the scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import Results, check_same_values, lines, run_scenarios, shown
from rank_scenario import TIMEOUT
from rank_scenarios import SCENARIOS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All of them at once: torch is imported once for each rank."""
    names = [name for name, call in SCENARIOS.items() if call.__module__ not in (
        "rank_interrupts", "rank_differences", "rank_joins")]
    return run_scenarios(names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [
    "release_often", "clip_on_one_rank", "join_with_schedule", "save_fails", "slow",
    "ends_early_and_serves", "uncaught_in_other_thread", "uncaught_in_a_fork", "caught", "interactive",
    "unseeded", "numpy_writes_after_step", "write_on_one_rank", "save_after_a_write_on_one_rank",
    "other_values_on_one_rank", "forked_while_an_error_is_handled"])
def test_all_ranks_end_well_with_the_same_values(name: str, results: Results) -> None:
    check_same_values(results[name])


@pytest.mark.parametrize("name", ["backward_fails_on_one_rank", "checkpoint_on_one_rank"])
def test_every_pass_is_one_micro_batch(name: str, results: Results) -> None:
    for one in results[name]:
        assert one.code == 0, shown(results[name])
        assert lines(one, "values") == ["True"] * 16, shown(results[name])


@pytest.mark.parametrize(("name", "message"), [
    ("save_beside_step",
     r"UserError: .* rank 0 is in save_pretrained\(\) after step\(\) 4, rank 1 in step\(\) 5\. "),
    ("zero_grad_beside_step",
     r"UserError: .* rank 0 is in zero_grad\(\) before the first step\(\), rank 1 in step\(\) 1\."),
    ("other_learning_rate",
     r"UserError: .*group 0: it is adamw\(lr=0.01.* on rank 0 and adamw\(lr=0.02.* on rank 1"),
    ("idle", r"Error: rank 0 is in (step\(\)|backward\(\) of step) 3 and has waited \d+ s for rank "
             r"1, which is alive and outside of the engine, after step\(\) 2.*timeout"),
])
def test_both_sides_are_named_on_both(name: str, message: str, results: Results) -> None:
    for one in results[name]:
        assert one.code == 1, shown(results[name])
        assert re.search(message, one.output), shown(results[name])


@pytest.mark.parametrize(("name", "own", "others"), [
    ("clip_on_one_rank", "the ranks differ in clip: it is 1 on rank 0 and 0 on rank 1",
     "the ranks differ in clip: it is 1 on rank 0 and 0 on rank 1"),
    ("save_fails", "cannot be created: File exists", "rank 0: save_pretrained(): UserError: the directory"),
    ("attach_fits_on_one_rank", "UserError: the model's states do not fit",
     "UserError: rank 0: the model's states do not fit"),
    ("unseeded_and_checked", "UserError: ranks start with other values than rank 0: in 6 of 6 "
     "parameters and 2 of 2 buffers on rank 1, 'layers.0.weight' first",
     "UserError: ranks start with other values than rank 0: in 6 of 6 parameters")])
def test_an_error_of_one_call_is_thrown_by_all_and_the_engines_live(
        name: str, own: str, others: str, results: Results) -> None:
    ended = results[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert own in lines(ended[0], "error")[0], shown(ended)
    assert others in lines(ended[1], "error")[0], shown(ended)


def test_a_write_on_one_rank_is_told_to_all(results: Results) -> None:
    ended = results["write_on_one_rank"]
    for one in ended:
        said = lines(one, "error")
        assert len(said) == 4, shown(ended)  # one for each stage
        assert all("UserError: parameter '0.weight' was written in place on rank 0 since the last "
                   "step(), and not on rank 1" in line for line in said), shown(ended)


def test_what_one_rank_wrote_is_neither_saved_nor_released(results: Results) -> None:
    ended = results["save_after_a_write_on_one_rank"]
    for one in ended:
        said = lines(one, "error")
        assert all("UserError: parameter '0.weight' was written in place on rank 1 since the last "
                   "step(), and not on rank 0" in line for line in said), shown(ended)
        assert [line.split()[-2] for line in said] == ["save_pretrained()", "release()"], shown(ended)
        assert lines(one, "saved") == ["False"], shown(ended)


def test_other_values_on_one_rank_are_told_to_all(results: Results) -> None:
    ended = results["other_values_on_one_rank"]
    for one in ended:
        said = lines(one, "error")
        assert len(said) == 6, shown(ended)
        assert all("UserError: parameter '1.weight' was written in place on all ranks since the last "
                   "step(), with other values on rank 1 than on rank 0" in line
                   for line in said), shown(ended)


@pytest.mark.parametrize(("name", "code", "cause"), [
    ("uncaught", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_in_with", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_with_another_hook", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_in_backward", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_in_a_child", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_in_a_child_of_torch", 1, "rank 0 failed: ValueError: the data is gone"),
    ("uncaught_in_training_thread", 0, "rank 0 failed: ValueError: the data is gone"),
    ("interrupted", -2, "rank 0 failed: KeyboardInterrupt"),
    ("interrupted_in_step", -2, "rank 0 failed: KeyboardInterrupt"),
    ("exits_with_status", 3, r"rank 0 is in close() after step() 2, rank 1 in step() 3"),
    ("exits_with_status_in_with", 3, "rank 0 failed: SystemExit: 3"),
    ("exits_at_once", 3, "rank 0 was killed or ended, or its connection was lost")])
def test_the_others_hear_why_a_rank_ended(name: str, code: int, cause: str,
                                          results: Results) -> None:
    ended = results[name]
    assert ended[0].code == code, shown(ended)
    assert ended[1].code == (0 if "thread" in name else 1), shown(ended)
    assert cause in ended[1].output, shown(ended)


def test_an_engine_that_cannot_be_made_is_told_to_those_that_wait(results: Results) -> None:
    ended = results["engine_fails_on_one_rank"]
    assert "UserError: zero = 7 is not allowed" in ended[1].output, shown(ended)
    assert "EngineError: rank 1 failed: zero = 7 is not allowed" in ended[0].output, shown(ended)


def test_a_rank_that_never_starts_is_waited_for_as_long_as_is_said(results: Results) -> None:
    ended = results["never_starts"]
    assert ("EngineError: rank 0 has not come to connect with the others for 2.5 s: start all ranks, or "
            "raise join_timeout" in lines(ended[1], "error")[0]), shown(ended)
    said = [line for line in ended[1].output.splitlines() if "has not started yet" in line]
    assert len(said) == 1 and "rank=0" in said[0] and "join_timeout=2.5" in said[0], shown(ended)
    assert 2 <= int(lines(ended[1], "waited")[0]) < TIMEOUT, shown(ended)


def test_one_line_says_what_differed(results: Results) -> None:
    said = [line for one in results["unseeded"] for line in one.output.splitlines()
            if "info  engine: broadcast rank 0's values" in line]
    assert len(said) == 4, shown(results["unseeded"])  # one for each engine
    assert "in 6 of 6 parameters and 2 of 2 buffers on rank 1, 'layers.0.weight' first" in said[0]


