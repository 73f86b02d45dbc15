# SPDX-License-Identifier: Apache-2.0
"""Ranks whose parameters, settings or arguments differ, or one of which is refused something: all of them say
so, none has done anything, and the engines live. rank_differences.py has the scripts."""

from __future__ import annotations

import re

import pytest
from processes import Results, check_same_values, lines, run_scenarios, shown
from rank_scenarios import SCENARIOS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = [name for name, call in SCENARIOS.items() if call.__module__ == "rank_differences"]
    return run_scenarios(names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [
    "other_tensors", "refused_release", "pins_leave_no_room", "folder_that_is_no_text",
    "engines_one_after_another", "other_staging", "refused_in_the_window",
    "wrong_arguments_of_one_rank", "slow_disk_of_a_framework"])
def test_all_ranks_end_well_with_the_same_values(name: str, results: Results) -> None:
    check_same_values(results[name])


def test_other_tensors_are_told_to_all(results: Results) -> None:
    ended = results["other_tensors"]
    for one in ended:
        assert lines(one, "error") == [
            "UserError: the ranks differ in the tensor of parameter " + said +
            " on rank 1. Give every rank the same" for said in (
                "'w': it is bfloat16 [4] on rank 0 and float16 [4]",
                "'weight': it is float32 [8, 4, 3, 3] on rank 0 and float32 [8, 4, 3, 3] with strides "
                "[36, 1, 12, 4]",
                "'w': it is float32 [4, 16] on rank 0 and float32 [16, 4]",
                "'a': it is float32 [16] at element 0 of the 32 in the storage of 'a' on rank 0 and "
                "float32 [16] at element 16 of the 32 in the storage of 'a'")], shown(ended)
        assert lines(one, "buffer") == ["[1.5, 1.5]"], shown(ended)


def test_parameters_with_long_names_are_told_apart(results: Results) -> None:
    ended = results["names_that_are_long"]
    for one in ended:
        assert re.search(r"rank 0 is in grad\('longmodule.*…\S*\.a'\) .*, rank 1 in grad\('longmodule"
                         r".*…\S*\.b'\) ", lines(one, "error")[0]), shown(ended)


def test_a_refused_release_drops_no_gradient(results: Results) -> None:
    ended = results["refused_release"]
    for one in ended:
        assert "parameter '0.bias' was written in place on rank 0" in lines(one, "error")[0], shown(ended)
        assert lines(one, "moved") == ["True"], shown(ended)


def test_writes_that_a_rank_cannot_compare_refuse_the_step(results: Results) -> None:
    ended = results["pins_leave_no_room"]
    for one in ended:
        assert re.search(r"UserError: step\(\) compares what was written .* and cannot: .*device_budget",
                         lines(one, "error")[0]), shown(ended)


def test_every_error_has_a_text_for_the_others(results: Results) -> None:
    ended = results["folder_that_is_no_text"]
    assert r"rank 0: save_pretrained(): " in lines(ended[1], "error")[0], shown(ended)
    assert r"\udcff" in lines(ended[1], "error")[0], shown(ended)
    assert lines(ended[1], "error")[1] == "rank 0: save_pretrained(): Mute", shown(ended)


def test_other_timeouts_are_an_error_of_the_engine(results: Results) -> None:
    ended = results["other_timeouts"]
    for one in ended:
        said = lines(one, "error")
        assert "the ranks differ in timeout: it is 3 on rank 0 and 4 on rank 1" in said[0], shown(ended)
        assert "the ranks differ in heartbeat: it is 0.5 on rank 0 and 1 on rank 1" in said[1], shown(
            ended)


def test_what_one_rank_is_refused_in_the_window_none_does(results: Results) -> None:
    ended = results["refused_in_the_window"]
    for rank, calls in enumerate((["grad_norm()", "zero_grad()", "grad()", "zero_grad()"],
                                  ["grad_norm()", "zero_grad()", "grad()"])):
        where = "UserError: " if rank == 0 else "UserError: rank 0: "
        said = lines(ended[rank], "error")
        assert len(said) == len(calls), shown(ended)
        assert all(line.startswith(f"{where}{call} ") and "between the last backward()" in line
                   for line, call in zip(said, calls, strict=True)), shown(ended)


def test_wrong_arguments_of_one_rank_are_raised_by_all(results: Results) -> None:
    ended = results["wrong_arguments_of_one_rank"]
    own, others = (lines(one, "error") for one in (ended[1], ended[0]))
    assert len(own) == len(others) == 9, shown(ended)
    for mine, theirs in zip(own, others, strict=True):
        text = mine.removeprefix("UserError: ")
        assert mine != text and theirs.startswith("UserError: rank 1: "), shown(ended)
        assert theirs.endswith(text), shown(ended)
