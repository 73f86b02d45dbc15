# SPDX-License-Identifier: Apache-2.0
"""Draws programs: the same seed, the same program, whatever is left out of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import configuration
import oddities  # noqa: F401  registers its layers
from layers import KINDS
from program import Event, Program
from reads import RAW, READS
from writes import WRITES

# Layers whose backward torch can differentiate once more.
TWICE = {"linear", "views", "twice", "einsum", "shapes", "frozen", "borrower"}
# Layers that keep a tensor which deepcopy refuses.
UNCOPIED = {"old_weight_norm", "pruned"}
# When in a step something is done.
MOMENTS = ("start", "between", "after_backward", "late", "after")
READING = MOMENTS
WRITING = ("start", "after_backward", "late", "after")


def draw_model(random: Random, ranks: int) -> dict[str, Any]:
    dtype = random.choice(["float32"] * 6 + ["bfloat16"] * 3 + ["float16"])
    layers = []
    for _ in range(random.choice([1, 2, 3, 3, 4, 5, 6])):
        kind = random.choice(sorted(KINDS))
        options = KINDS[kind].draw(random)
        if ranks > 1 and options.get("how") == "max_norm":
            options["how"] = "plain"  # each rank would write something else
        own = random.choice(KINDS[kind].DTYPES) if random.random() < 0.2 else dtype
        if own not in KINDS[kind].DTYPES:
            own = "float32"
        checkpoint = random.choice([None] * 7 + ["plain", "plain", "reentrant"])
        layers.append({"kind": kind, "options": options, "dtype": own, "checkpoint": checkpoint})
    frozen = [f"layers.{number}" for number in range(len(layers)) if random.random() < 0.1]
    if random.random() < 0.1:
        frozen.append("tokens")
    tied = random.random() < 0.4
    if tied and "tokens" in frozen:
        frozen.remove("tokens")
    hooks = [{"how": random.choice(["gradient", "accumulated", "forward", "backward"]),
              "on": random.randrange(100)} for _ in range(random.choice([0, 0, 0, 0, 1, 2]))]
    return {"width": random.choice([8, 16, 16, 24, 48, 72]),
            "vocabulary": random.choice([11, 40, 130]), "dtype": dtype, "tied": tied,
            "frozen": frozen, "layers": layers, "hooks": hooks}


class Drawer:
    """Draws one program's loop."""

    def __init__(self, random: Random, model: dict[str, Any], config: dict[str, Any],
                 optimizer: dict[str, Any], ranks: int) -> None:
        self.random = random
        self.model = model
        self.config = config
        self.optimizer = optimizer
        self.ranks = ranks
        hows = {spec["options"].get("how") for spec in model["layers"]}
        self.copies = not hows & UNCOPIED
        # torch's AveragedModel subtracts parameters, which booleans cannot be.
        self.averages = not any(spec["options"].get("type") == "bool" for spec in model["layers"])
        self.writes_in_forward = "max_norm" in hows
        checkpoints = {spec["checkpoint"] for spec in model["layers"]}
        self.reentrant = "reentrant" in checkpoints
        self.twice = checkpoints <= {None} and {spec["kind"] for spec in model["layers"]} <= TWICE
        self.twice = self.twice and model["dtype"] == "float32"
        self.style = random.choice(["engine"] * 4 + ["plain", "explicit", "explicit", "mixed"])
        dtypes = {model["dtype"], *(spec["dtype"] for spec in model["layers"])}
        self.autocast = random.random() < 0.1 and dtypes <= {"float32", "bfloat16"}
        self.activations = random.choice([None] * 3 + ["host", "host", "nvme"])

    # Habits.

    def number(self) -> int:
        return self.random.randrange(1000)

    def seed(self) -> int:
        return self.random.randrange(1 << 30)

    def draw_habit(self) -> tuple[str, Callable[[], Event]]:
        """A moment, and the event."""
        r = self.random
        made: list[tuple[float, tuple[str, ...], str, dict[str, Any], list[str]]] = [
            (30, READING, "read", {"how": r.choice(sorted(READS)),
                                   "parameter": self.number()}, []),
            (6, READING, "read_all", {"how": r.choice(["norm", "sum", "clone"])}, []),
            (4, READING, "state_dict", {}, []),
            (3, ("start", "late", "after"), "read_in_thread",
             {"parameter": self.number(), "during": r.random() < 0.5, "seed": self.seed()},
             ["threads"]),
            (8, READING, "read_raw",
             {"how": r.choice(sorted(RAW)),
              "parameter": r.choice([None, self.number()])}, ["raw_reads"]),
            (4, READING, "read_pinned",
             {"how": r.choice(["numpy", "list", "dlpack"]), "parameter": self.number()}, []),
            (2, ("start", "after_backward", "late", "after"), "write_pinned",
             {"parameter": self.number(), "late": False}, ["pin_writes"]),
            (3, READING, "hold", {"parameter": self.number(), "let_go": False}, ["held_pins"]),
            (2, ("start", "late", "after"), "hold", {"parameter": 0, "let_go": True},
             ["held_pins"]),
            (3, READING, "read_held", {}, ["held_pins"]),
            (7, READING, "average", {"how": r.choice(["in_place", "lerp"])}, []),
            (3, READING, "average", {"how": "foreach"}, ["large_operators"]),
            (3, READING, "averaged_model", {"multi": r.random() < 0.5},
             ["large_operators", "copies"]),
            (3, READING, "target", {}, []),
            (3, READING, "to_vector", {}, ["large_operators"]),
            (3, ("start", "late", "after"), "foreach",
             {"how": r.choice(["norm", "total"])}, ["large_operators"]),
            (1, ("start", "after"), "foreach", {"how": "mul"}, ["large_operators"]),
            (4, READING, "deep_copy", {"parameter": r.choice([None, self.number()])}, ["copies"]),
            (14, WRITING, "write", {"how": r.choice(sorted(WRITES)),
                                    "parameter": self.number(), "late": False}, []),
            (3, ("start", "after"), "reset", {"layer": self.number()}, []),
            (3, ("start", "after"), "exchange", {"parameter": self.number(), "frozen": False},
             ["exchange"]),
            (1, ("start", "after"), "exchange", {"parameter": self.number(), "frozen": True},
             ["exchange", "frozen_exchange"]),
            (3, ("start", "after"), "rollback", {"again": r.random() < 0.5}, []),
            (3, ("start", "after"), "swap", {"seed": self.seed()}, ["swap"]),
            (6, ("start", "after", "after_backward", "late"), "evaluate",
             {"how": r.choice(["no_grad", "inference", "grad"]), "seed": self.seed()}, []),
            (3, ("start", "after", "late"), "generate", {"seed": self.seed()}, []),
            (3, ("start", "after"), "gradients_by_hand", {"seed": self.seed()}, []),
            (8, ("after_backward", "late"), "gradient",
             {"parameter": r.choice([None, self.number()]), "late": False}, []),
            (3, ("start", "after_backward", "late", "after"), "zero_grad",
             {"late": False, "by": r.choice(["engine", "optimizer", "model"])}, []),
            (6, ("start", "late", "after"), "change",
             {"key": r.choice(["lr", "lr", "weight_decay"]), "factor": r.choice([0.5, 1.5]),
              "group": self.number(), "late": False}, []),
            (8, ("after",), "schedule",
             {"kind": r.choice(["step", "cosine", "lambda", "exponential", "linear"])}, []),
            (3, ("start",), "freeze", {"parameter": self.number(), "thaw": False}, ["freeze"]),
            (3, ("start",), "unfreeze", {}, ["freeze"]),
            (3, ("start",), "freeze", {"parameter": 0, "thaw": True}, ["thaw"]),
            (2, ("start", "after"), "reattach", {}, ["reattach"]),
            (2, READING, "clip_by_torch", {"value": r.random() < 0.3}, []),
            (1, READING, "copy_groups", {}, []),
            (2, MOMENTS, "finish", {}, []),
            (2, MOMENTS, "stats", {}, []),
            (2, ("start", "after"), "save", {}, ["saves"]),
        ]
        weights = [one[0] for one in made]
        _, moments, what, options, features = r.choices(made, weights)[0]
        moment = r.choice(moments)
        if moment == "late":
            options = {**options, "late": True} if "late" in options else options
            if what in ("gradient",):
                features = [*features, "late_grads"]
            elif what in ("write", "write_pinned"):
                features = [*features, "late_writes"]
            elif what in ("zero_grad", "change"):
                features = [*features, "late_changes"]
            elif what not in ("stats", "finish", "hold", "clip_by_torch", "copy_groups"):
                features = [*features, "late_reads"]
        if self.ranks > 1 and options.get("by") == "model":
            options = {**options, "by": "engine"}
        if not self.allowed(what, moment, options):
            return self.draw_habit()
        collective = what in ("gradient", "zero_grad", "reattach", "save", "write", "write_pinned",
                              "reset", "exchange", "rollback", "freeze", "unfreeze", "change",
                              "schedule", "foreach")
        ranks = None
        if self.ranks > 1 and not collective and r.random() < 0.6:
            ranks = [r.randrange(self.ranks)]
        return moment, lambda: Event(what, dict(options), list(features), ranks)

    def allowed(self, what: str, moment: str, options: dict[str, Any]) -> bool:
        if what in ("deep_copy", "averaged_model") and not self.copies:
            return False
        if what == "averaged_model" and not self.averages:
            return False
        if what == "gradients_by_hand" and self.reentrant:
            return False
        if self.writes_in_forward and moment == "late" and what in (
                "evaluate", "generate", "read_in_thread"):
            return False
        if self.writes_in_forward and what == "read_in_thread" and options["during"]:
            return False  # the program itself would read and write at the same time
        return what != "freeze" or not options["thaw"] or bool(self.optimizer["explicit"])

    # Passes.

    def forward(self, ranks: list[int] | None) -> list[Event]:
        r, count = self.random, len(self.model["layers"])
        kinds = ["tokens"] * 5 + ["hidden"]
        if "loss_scale" not in self.config and not self.reentrant:
            kinds += ["two"]
        if self.twice:
            kinds += ["penalty"] * 3
        control: dict[str, Any] = {
            "skip": [n for n in range(count) if r.random() < 0.12],
            "repeat": [n for n in range(count) if r.random() < 0.06],
            "leave_at": r.randrange(count) if r.random() < 0.1 else None,
            "fail_at": r.randrange(count) if r.random() < 0.04 else None,
            "fail_backward_at": r.randrange(count) if r.random() < 0.04 else None}
        return [Event("forward", {
            "loss": r.choice(kinds), "seed": self.seed(), "activations": self.activations,
            "least": r.choice([1, 1000]), "autocast_on": self.autocast, **control}, [], ranks)]

    def backward(self, ranks: list[int] | None, last: bool, late: bool) -> Event:
        style = self.style
        if style == "mixed":
            style = self.random.choice(["engine", "plain", "explicit"])
        how = "plain" if style == "plain" else "engine"
        return Event("backward", {"how": how, "last": last if style == "explicit" else None,
                                  "late": late}, ["late_reads", "late_changes"] if late else [],
                     ranks)

    def draw_step(self, habit_events: dict[str, list[Event]]) -> list[Event]:
        r = self.random
        accumulation = self.config.get("accumulation", 1)
        out = list(habit_events["start"])
        if r.random() < 0.04 and "loss_scale" not in self.config:
            numbers = [self.number() for _ in range(3)]
            out.append(Event("put_gradients", {"parameters": numbers}, ["own_gradients"],
                             None if self.ranks == 1 else r.choice([None, [0], [1]])))
            out.append(Event("step", {"by": "engine"}, ["own_gradients"]))
        count = accumulation
        if r.random() < 0.12:
            count = r.choice([0, 1, accumulation + 1])
        if self.writes_in_forward:  # a forward too many would be refused for what it writes
            count = min(count, accumulation)
        alike = self.ranks == 1 or r.random() < 0.5
        for micro in range(count):
            late = micro >= accumulation
            for ranks in [None] if alike else [[rank] for rank in range(self.ranks)]:
                if ranks is not None and r.random() < 0.15:
                    continue  # this rank has nothing to do
                made = self.forward(ranks)
                if late:
                    made[0].features += ["late_reads", "late_changes"]
                out += made
                if micro == 0:
                    out += [e for e in habit_events["between"] if ranks in (None, [0])]
                out.append(self.backward(ranks, micro == count - 1, late))
            if micro < min(count, accumulation) - 1:
                out += habit_events["after_backward"]
        # Where ranks differ, what is refused on one is not on another: the user has parted them.
        out += [event for event in habit_events["late"] if alike or not (
            {"late_changes", "late_writes", "late_grads"} & set(event.features))]
        if r.random() < 0.05 and alike:
            out.append(Event("abandon", {}, ["late_changes"], instead="step"))
        else:
            by = r.choice(["engine", "engine", "engine", "optimizer", "closure"])
            out.append(Event("step", {"by": by}))
        return out + habit_events["after"]

    def draw_steps(self) -> list[list[Event]]:
        r = self.random
        repeated = [(self.draw_habit(), r.choice([1, 1, 2, 3]), r.randrange(3))
                    for _ in range(r.choice([0, 1, 2, 3, 4]))]
        steps = []
        for number in range(r.choice([2, 3, 4, 5, 6])):
            events: dict[str, list[Event]] = {moment: [] for moment in MOMENTS}
            for (moment, make), period, phase in repeated:
                if number % period == phase % period:
                    events[moment].append(make())
            for _ in range(r.choice([0, 0, 1, 2])):
                moment, make = self.draw_habit()
                events[moment].append(make())
            steps.append(self.draw_step(events))
        return steps


def keep_one_late_change(program: Program) -> None:
    """Of what may be refused there is one in a step: the next would be judged by its outcome."""
    for step in program.steps:
        found = False
        for event in list(step):
            if event.what == "step":
                found = False
            if "late_changes" not in event.features and "late_writes" not in event.features:
                continue
            if found:
                event.leave_out(step)
            found = True


def add_join(random: Random, program: Program) -> None:
    """One rank has no more data; what all would have to do together is left out from there on."""
    at = random.randrange(1, len(program.steps) + 1)
    rank = random.randrange(program.ranks)
    apart = {"gradient", "zero_grad", "reattach", "save", "write", "write_pinned", "reset",
             "exchange", "rollback", "swap", "freeze", "unfreeze", "change", "schedule", "foreach",
             "averaged_model"}
    others = [one for one in range(program.ranks) if one != rank]
    for step in program.steps[at:]:
        step[:] = [event for event in step if event.what not in apart]
        for event in list(step):
            if event.ranks == [rank]:
                step.remove(event)
            else:
                event.ranks = others
    if at < len(program.steps):
        program.steps[at].insert(0, Event("join", {}, ["join"], [rank]))


def draw(seed: int, ranks: int = 1, without: set[str] | None = None) -> Program:
    """The program of a seed."""
    random = Random(seed * 8 + ranks)
    model = draw_model(random, ranks)
    optimizer = configuration.draw_optimizer(random)
    config = configuration.draw_config(random, model, optimizer, ranks)
    room = configuration.draw_room(random)
    room["look_first"] = random.random() < 0.7
    room["release"] = random.random() < 0.8
    drawer = Drawer(random, model, config, optimizer, ranks)
    program = Program(seed, ranks, model, optimizer, config, room, random.random() < 0.6,
                      drawer.draw_steps())
    thaws = random.random() < 0.5 and optimizer["explicit"] and model["frozen"]
    at = random.randrange(len(program.steps))
    if thaws:
        program.steps[at].insert(0, Event("freeze", {"parameter": 0, "thaw": True}, ["thaw"]))
    keep_one_late_change(program)
    joins = random.random() < 0.25 and ranks > 1
    if joins and not (without and "join" in without):
        add_join(random, program)
    if ranks > 1 and without and "release_ranks" in without:
        program.room["release"] = False
        without = without | {"reattach"}
    number = 0
    for step in program.steps:
        for event in step:
            number += 1
            event.number = number
    if drawer.activations == "nvme":
        program.room["nvme"] = True
    return program.without(without or set())
