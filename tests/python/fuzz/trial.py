# SPDX-License-Identifier: Apache-2.0
"""Runs a program over an engine and over plain tensors, and says what differs."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import configuration
import habits  # noqa: F401  this and the next two register themselves
import reads  # noqa: F401
import torch
import writes  # noqa: F401
from model import Model
from paged import Paged
from plain import Reference
from program import Program
from session import Call, Entry, Session

import pagoda

torch.set_num_threads(1)
Gather = Callable[[Any], list[Any]]


class Invalid(Exception):
    """The program is none: the plain loop fails, too."""


def do_wrong(wrong: str) -> None:
    """For the fuzzer's own test."""
    if wrong == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(3600)


def run_paged(program: Program, config: dict[str, Any], rank: int, folder: Path,
              wrong: str | None = None) -> tuple[list[Entry], dict[int, bool]]:
    trainer = Paged(config, program.build)
    if wrong == "rate":
        program = program.copy()
        for group in program.optimizer["groups"]:
            group["lr"] *= 1.001
    elif wrong is not None:
        do_wrong(wrong)
    try:
        session = Session(program, rank, trainer, folder)
        calls = session.run()
        call = next(calls, None)
        while call is not None:
            try:
                reply = trainer.answer(call)
            except Exception as error:
                error.add_note(f"in {session.where}")
                call = calls.throw(error)
                continue
            try:
                call = calls.send(reply)
            except StopIteration:
                call = None
        return session.log, trainer.refused
    except Exception as error:
        error.add_note(f"in {session.where}")
        raise
    finally:
        trainer.close()


def answer_all(reference: Reference, calls: list[Call]) -> list[Any]:
    """What the ranks do together, on plain tensors."""
    kinds = {call.what for call in calls if call.what != "join"}
    if len(kinds) > 1:
        raise Invalid(f"ranks are in different calls: {sorted(kinds)}")
    what = kinds.pop() if kinds else "join"
    reply: Any = None
    match what:
        case "attach":
            for member, call in zip(reference.members, calls, strict=True):
                member.attach(call.model, call.groups)
            reference.attach()
        case "step":
            reply = reference.step()
        case "zero_grad":
            reference.zero_grad()
        case "grad":
            reply = reference.grad(next(call.name for call in calls if call.what == what))
        case "grad_norm":
            reference.sum_rounds()
            reply = reference.norm()
        case _:
            pass
    return [reply] * len(calls)


def run_plain(program: Program, refused: list[dict[int, bool]], folder: Path) -> list[list[Entry]]:
    """Every rank's log."""
    reference = Reference(program.config, program.ranks, refused)
    sessions = [Session(program, rank, member, folder)
                for rank, member in enumerate(reference.members)]
    runs = [session.run() for session in sessions]
    calls: list[Call | None] = [next(run, None) for run in runs]
    while any(call is not None for call in calls):
        here = [call for call in calls if call is not None]
        if len(here) != len(calls):
            raise Invalid("a rank has ended before the others")
        replies = answer_all(reference, here)
        joined = all(call.what == "join" for call in here)
        for rank, (run, call, reply) in enumerate(zip(runs, here, replies, strict=True)):
            if call.what == "join" and not joined:
                continue
            try:
                calls[rank] = run.send(reply)
            except StopIteration:
                calls[rank] = None
    return [session.log for session in sessions]


def difference(expected: list[Entry], got: list[Entry]) -> str:
    """What differs first; empty if nothing does."""
    lines = []
    for a, b in zip(expected, got, strict=False):
        if a.where != b.where:
            lines.append(f"the plain loop sees {a.where!r} where the engine's sees {b.where!r}")
            break
        if a.value is None or b.value is None:
            continue
        if a.value.shape != b.value.shape or a.value.dtype != b.value.dtype:
            lines.append(f"{a.where}: {b.value.dtype} {tuple(b.value.shape)} instead of "
                         f"{a.value.dtype} {tuple(a.value.shape)}")
            continue
        same = (a.value == b.value) | (a.value.isnan() & b.value.isnan())
        if not bool(same.all()):
            wrong = (~same).reshape(-1).nonzero().squeeze(-1)
            first = int(wrong[0])
            lines.append(
                f"{a.where}: {wrong.numel()} of {a.value.numel()} elements differ, at {first} "
                f"{b.value.reshape(-1)[first].item()!r} instead of "
                f"{a.value.reshape(-1)[first].item()!r}")
        if len(lines) >= 6:
            break
    if not lines and len(expected) != len(got):
        lines.append(f"{len(got)} things were seen instead of {len(expected)}")
    return "\n".join(lines)


def resolved(program: Program, folder: Path) -> dict[str, Any]:
    torch.manual_seed(program.seed)
    held = sum(1 for step in program.steps for event in step
               if event.what == "hold" and not event.options["let_go"])
    return configuration.resolve(program.config, program.room, Model(program.model), folder,
                                 min(held, 1), program.ranks == 1)


def widened(config: dict[str, Any], error: Exception, slack: bool) -> bool:
    """Was it host memory that did not suffice? Then there is a little more of it the next time."""
    text = str(error)
    if "host_budget" not in config or config["host_budget"] > 1 << 30 or not any(
            word in text for word in ("do not fit", "budget", "host_budget")):
        return False
    asked = re.search(r"asked for ([\d.]+) MiB, but only ([\d.]+) MiB", text)
    missing = float(asked[1]) - float(asked[2]) if asked else 0.0
    config["host_budget"] += int(max(missing, 0) * (1 << 20)) + ((256 if slack else 32) << 10)
    return True


def run(program: Program, rank: int = 0, gather: Gather | None = None,
        wrong: str | None = None) -> str:
    """What is wrong; empty if nothing is. Raises Invalid. `gather` gives every rank's value."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="pagoda fuzz ") as directory:
        folder = Path(directory)
        config = resolved(program, folder)
        saves = folder if gather is None else gather(folder)[0]  # all ranks name the same
        failure = ""
        log: list[Entry] = []
        refused: dict[int, bool] = {}
        while True:
            try:
                log, refused = run_paged(program, config, rank, saves, wrong)
            except Exception as error:
                # The engine's constructor has no notes, and meets nobody before it fails.
                where = "".join(getattr(error, "__notes__", ["constructor"]))
                thaws = "were thawed and cannot be trained" in str(error)
                if (where == "constructor" or (program.ranks == 1 and ("in attach" in where or thaws))
                        ) and widened(config, error, bool(program.room.get("slack"))):
                    continue
                failure = "".join(traceback.format_exception(error))
            break
        outcomes = [refused] if gather is None else gather(refused)
        failures = [failure] if gather is None else gather(failure)
        try:
            expected = run_plain(program, outcomes, saves)
        except Invalid:
            raise
        except Exception as error:
            raise Invalid("the plain loop fails: "
                          + "".join(traceback.format_exception(error))) from error
        if not failure and not any(failures):
            failure = difference(expected[rank], log)
        if failure:
            failure = f"{failure}\nconfiguration: {config}"
        return failure
