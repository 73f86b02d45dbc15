# SPDX-License-Identifier: Apache-2.0
"""Programs that failed once, as small as they became: run.py --kept runs them all."""

from __future__ import annotations

import copy
from typing import Any

from minimising import SIMPLE_CONFIG, SIMPLE_GROUP, SIMPLE_ROOM
from program import Event, Program

Layers = list[dict[str, Any]]


def layer(kind: str, dtype: str = "float32", checkpoint: str | None = None,
          **options: Any) -> dict[str, Any]:
    return {"kind": kind, "options": options, "dtype": dtype, "checkpoint": checkpoint}


def forward(seed: int = 1, loss: str = "tokens", **control: Any) -> Event:
    options = {"loss": loss, "seed": seed, "activations": None, "least": 1, "autocast_on": False,
               "skip": [], "repeat": [], "leave_at": None, "fail_at": None,
               "fail_backward_at": None, **control}
    return Event("forward", options)


def backward(how: str = "engine", last: bool | None = None, late: bool = False) -> Event:
    return Event("backward", {"how": how, "last": last, "late": late})


def event(what: str, ranks: list[int] | None = None, **options: Any) -> Event:
    return Event(what, options, [], ranks)


def on(rank: int, *events: Event) -> list[Event]:
    """On that rank only."""
    for one in events:
        one.ranks = [rank]
    return list(events)


def program(layers: Layers, steps: list[list[Event]], ranks: int = 1, build: bool = False,
            dtype: str = "float32", group: dict[str, Any] | None = None,
            model: dict[str, Any] | None = None, room: dict[str, Any] | None = None,
            explicit: bool = False, **config: Any) -> Program:
    steps = copy.deepcopy(steps)
    number = 0
    for step in steps:
        for one in step:
            number += 1
            one.number = number
    if ranks > 1:
        config = {"zero": 3, "timeout": 60, "heartbeat": 5, **config}
    return Program(
        seed=1, ranks=ranks, build=build, steps=steps,
        model={"width": 8, "vocabulary": 11, "dtype": dtype, "tied": False, "frozen": [],
               "layers": layers, "hooks": [], **(model or {})},
        optimizer={"groups": [group or dict(SIMPLE_GROUP)], "explicit": explicit,
                   "left_out": None},
        config={**SIMPLE_CONFIG, **config},
        room={**SIMPLE_ROOM, "device": [], "look_first": True, "release": True, **(room or {})})


TRAINED = [forward(), backward(), event("step")]
LOOK = event("gradient", parameter=None, late=False)
TIGHT = {"pages": 0}

# Name: the program, how often it is run, and the feature that it needs.
KEPT: dict[str, tuple[Program, int, str]] = {
    "a parameter that never needed a gradient is released": (program(
        [layer("frozen", type="same")], [[]]), 1, ""),
    "a write between attach() and the first step, to a built 16-bit page on the device": (program(
        [layer("linear", "bfloat16", bias=True, grow=1)],
        [[event("write", how="decay", parameter=1, late=False), *TRAINED]],
        dtype="bfloat16", build=True, parameters="auto"), 1, ""),
    "16-bit pages that were built are compared between ranks": (program(
        [layer("linear", "bfloat16", bias=True, grow=1)], [[event("step")]], ranks=2,
        dtype="bfloat16", build=True, room={"release": False}), 3, ""),
    "two ranks write to a page of which one has all": (program(
        [layer("shapes", how="strided")],
        [[event("write", how="view", parameter=number, late=False) for number in range(5)]],
        ranks=2, room={"release": False}), 10, ""),
    "grad_norm() after each micro-batch": (program(
        [layer("linear", bias=True, grow=1)],
        [[forward(1), backward(last=False), LOOK, forward(2), backward(last=False), LOOK,
          event("step")]], accumulation=3), 1, ""),
    "backwards that fail, and more of them in the step": (program(
        [layer("linear", bias=True, grow=1)] * 2,
        [[forward(1, fail_backward_at=1), backward("plain"), forward(2), backward("plain"),
          forward(3), backward("plain"), event("step")]], clip=0.5), 1, "backward_after_failure"),
    "two backwards by the engine that fail": (program(
        [layer("linear", bias=True, grow=1)] * 2,
        [[forward(1, fail_backward_at=1), backward(last=False),
          forward(2, fail_backward_at=1), backward(last=False), forward(3), backward(),
          event("step")]], clip=0.5), 1, "backward_after_failure"),
    "a layer within a reentrant checkpoint that runs twice in some micro-batches": (program(
        [layer("linear", checkpoint="reentrant", bias=True, grow=1)],
        [[forward(1), backward(), forward(2, repeat=[0]), backward(), event("step")]],
        accumulation=2, clip=0.5), 1, "reentrant_shared"),
    "the same when updates begin early": (program(
        [layer("linear", checkpoint="reentrant", bias=True, grow=1)],
        [[forward(1), backward(), event("step")], [forward(2), backward(), event("step")],
         [forward(3, repeat=[0]), backward(), event("step")]]), 3, "reentrant_shared"),
    "p.data = of a parameter that was frozen after attach()": (program(
        [layer("linear", bias=True, grow=1)],
        [[event("freeze", parameter=1, thaw=False),
          event("exchange", parameter=0, frozen=True), *TRAINED]]), 1, "frozen_exchange"),
    "a gradient that has not come, on NVMe": (program(
        [layer("linear", bias=True, grow=1)],
        [[forward(loss="hidden"), backward(last=False),
          *(event("gradient", parameter=number, late=False) for number in range(4)),
          event("step")]], gradients="nvme", accumulation=2), 1, "late_grads"),
    "a norm that is no number": (program(
        [layer("linear", "float16", bias=True, grow=1)], [TRAINED], dtype="float16",
        loss_scale="dynamic", loss_scale_initial=2.0 ** 120), 1, "nan_norms"),
    "a pass around a reentrant checkpoint, on one of two ranks": (program(
        [layer("linear", bias=True, grow=1),
         layer("linear", checkpoint="reentrant", bias=True, grow=1)],
        [[*on(0, forward(1, "hidden"), backward("plain"), forward(2, "hidden"), backward("plain")),
          *on(1, forward(3, "hidden", skip=[1]), backward("plain"), forward(4), backward("plain")),
          event("step")]], ranks=2, accumulation=2, clip=0.5), 1, ""),
    "a backward that fails before its first gradient, on one of two ranks": (program(
        [layer("linear", bias=True, grow=1)],
        [[*on(0, forward(1, "hidden", fail_backward_at=0, skip=[0]), backward(last=False),
              forward(2), backward(last=False), forward(3), backward()),
          *on(1, forward(4), backward(last=False), forward(5), backward(last=False), forward(6),
              backward()), event("step")]], ranks=2, accumulation=3, clip=0.5), 1,
        "backward_after_failure"),
    "a write under a pin, while another rank reads the update before": (program(
        [layer("linear", bias=True, grow=1)] * 3,
        [[*TRAINED, event("write_pinned", parameter=number, late=False)] for number in range(6)],
        ranks=2, zero=2, room={"device": ["parameters"]}), 5, "pin_writes"),
    "weights that one rank exchanges and puts back": (program(
        [layer("linear", "bfloat16", bias=True, grow=1)],
        [[*TRAINED, event("swap", [1], seed=1)]] * 4, ranks=2, dtype="bfloat16",
        room=TIGHT), 2, "swap"),
}
