# SPDX-License-Identifier: Apache-2.0
"""Makes a failing program smaller: takes steps, events, layers, settings away while it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator

from chunks import Failure, Runner
from program import Program

SIMPLE_CONFIG = {"device": "cpu", "parameters": "host", "gradients": "host", "optimizer_state": "host",
                 "fetch_threads": 1, "update_threads": 1, "update_chunk": 64 << 10,
                 "update_buffers": 2, "staging": 64 << 10, "bucket": 1 << 20, "lookup_in_place": 0}
SIMPLE_GROUP = {"optimizer": "sgd", "lr": 0.01, "weight_decay": 0.0, "momentum": 0.0,
                "nesterov": False, "dampening": 0.0}
SIMPLE_ROOM = {"pages": 1.1, "staging": 1, "host": None, "nvme": None}


def kind_of(what: str) -> str:
    """What sort of failure it is, so that another one is not taken for it."""
    text = what.split("\nconfiguration:")[0]
    errors = re.findall(r"^(?:[\w.]*Error|AssertionError|[\w.]*Exception)\b.*", text, re.MULTILINE)
    if errors:
        return re.sub(r"'[^']*'|\d+", "_", errors[-1])[:60]
    if "ended with" in text:
        return "ended"
    return "differs"


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, large things first."""
    for number in range(len(program.steps) - 1, -1, -1):
        out = program.copy()
        del out.steps[number]
        yield out
    for number in range(len(program.model["layers"]) - 1, -1, -1):
        out = program.copy()
        del out.model["layers"][number]
        yield out
    for number in range(len(program.steps)):
        for at in range(len(program.steps[number]) - 1, -1, -1):
            out = program.copy()
            del out.steps[number][at]
            yield out
    for number in range(len(program.optimizer["groups"]) - 1, 0, -1):
        out = program.copy()
        del out.optimizer["groups"][number]
        yield out
    for number, step in enumerate(program.steps):
        for at, event in enumerate(step):
            for key, value in event.options.items():
                simpler = {"loss": "tokens", "least": 1}.get(
                    key, [] if isinstance(value, list) else None)
                if key in ("skip", "repeat", "leave_at", "fail_at", "fail_backward_at",
                           "activations", "loss", "last") and value not in (simpler, None):
                    out = program.copy()
                    out.steps[number][at].options[key] = simpler
                    yield out
    for number, spec in enumerate(program.model["layers"]):
        if spec["checkpoint"] is not None:
            out = program.copy()
            out.model["layers"][number]["checkpoint"] = None
            yield out
        if spec["dtype"] != "float32":
            out = program.copy()
            out.model["layers"][number]["dtype"] = "float32"
            yield out
    for key, value in (("hooks", []), ("dtype", "float32"), ("tied", False), ("frozen", []),
                       ("width", 8), ("vocabulary", 11)):
        if program.model[key] != value:
            out = program.copy()
            out.model[key] = value
            yield out
    for key, value in list(program.config.items()):
        if key not in SIMPLE_CONFIG:
            out = program.copy()
            del out.config[key]
            yield out
        elif value != SIMPLE_CONFIG[key]:
            out = program.copy()
            out.config[key] = SIMPLE_CONFIG[key]
            yield out
    if program.optimizer["groups"][0] != SIMPLE_GROUP:
        out = program.copy()
        out.optimizer["groups"][0] = dict(SIMPLE_GROUP)
        yield out
    for key, value in SIMPLE_ROOM.items():
        if program.room.get(key) != value:
            out = program.copy()
            out.room[key] = value
            yield out
    if program.build:
        out = program.copy()
        out.build = False
        yield out


def minimise(runner: Runner, failure: Failure, times: int = 1, most: int = 600) -> Program:
    """The smallest found. `times`: runs of each candidate, for what fails now and then."""
    best = failure.program
    wanted = kind_of(failure.what)
    tried, at, since = 0, 0, 0
    runner.quiet = True
    candidates = list(smaller(best))
    while candidates and since < len(candidates) and tried < most:
        at %= len(candidates)
        tried, since = tried + 1, since + 1
        runner.fixed = candidates[at]
        found = runner.run([best.seed] * times, most_failures=1)
        if found.failures and kind_of(found.failures[0].what) == wanted:
            best, since = candidates[at], 0
            candidates = list(smaller(best))  # the next one has come to where this one was
            print(f"smaller after {tried}: {sum(map(len, best.steps))} events, "
                  f"{len(best.model['layers'])} layers", flush=True)
        else:
            at += 1
    runner.fixed, runner.quiet = best, False
    runner.run([best.seed] * times, most_failures=1)
    return best
