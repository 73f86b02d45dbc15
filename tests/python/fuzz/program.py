# SPDX-License-Identifier: Apache-2.0
"""A training program as data: a model, an optimizer, a configuration, and what the loop does."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

# What can be left out with --without, and what of.
FEATURES = {
    "activations": "engine.activations around forwards",
    "late_reads": "reads of parameters between the last backward and step()",
    "late_grads": "grad() and grad_norm() there",
    "late_writes": "in-place writes there, which may be refused",
    "late_changes": "learning rates, zero_grad() and more backwards there, which may be refused",
    "raw_reads": "numpy() and its like, which may be refused",
    "held_pins": "pins that are held over steps",
    "pin_writes": "writes by numpy under a pin",
    "thaw": "frozen parameters that are thawed after attach()",
    "freeze": "trained parameters that are frozen for a while",
    "large_operators": "operators over all parameters: foreach, cat, AveragedModel",
    "exchange": "p.data = …",
    "frozen_exchange": "the same of parameters that were frozen",
    "swap": "weights exchanged for others and back between two steps",
    "unstepped_release": "release() after a backward without step()",
    "reattach": "release() and attach() in the middle",
    "failures": "the user's own exceptions in forward and backward",
    "backward_after_failure": "another backward in a step after one that failed",
    "threads": "reads from other threads",
    "own_gradients": "p.grad = …",
    "scaled_plain_backward": "loss.backward() under a loss scale",
    "join": "ranks that end early",
    "copies": "deepcopy of parameters and models",
    "release_ranks": "release() on several ranks",
    "reentrant": "reentrant checkpoints",
    "reentrant_shared": "parameters of reentrant checkpoints that are used elsewhere, too",
    "nan_norms": "norms that are no number",
    "max_norm": "embeddings that write to their weight in forward",
    "saves": "save_pretrained",
    "hooks": "hooks of the user's own on parameters and modules",
    "late_hooks": "hooks that read a weight during backward",
    "tight_host": "a host_budget without room for the copies that writes to 16-bit pages take",
    "rank_failures": "the user's own exceptions on one of several ranks",
}


@dataclass
class Event:
    """Something that the loop does, on all ranks or some."""

    what: str
    options: dict[str, Any] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    ranks: list[int] | None = None
    number: int = 0
    instead: str = ""  # what is done where its features are left out

    def leave_out(self, step: list[Event]) -> None:
        if self.instead:
            self.what, self.options, self.features = self.instead, {}, []
        else:
            del step[next(at for at, event in enumerate(step) if event is self)]

    def text(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self.options.items()
                         if value is not None and value is not False and value != [])
        where = "" if self.ranks is None else f"  [rank {', '.join(map(str, self.ranks))}]"
        return f"{self.what}({said}){where}"


@dataclass
class Program:
    """All of it; the same seed makes the same one."""

    seed: int
    ranks: int
    model: dict[str, Any]
    optimizer: dict[str, Any]  # {"groups": [...], "explicit": bool}
    config: dict[str, Any]
    room: dict[str, Any]  # how much the budgets leave
    build: bool  # made inside engine.build()
    steps: list[list[Event]]

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)

    @staticmethod
    def from_json(text: str) -> Program:
        values = json.loads(text)
        values["model"].setdefault("hooks", [])
        values["steps"] = [[Event(**event) for event in step] for step in values["steps"]]
        return Program(**values)

    def copy(self) -> Program:
        return Program.from_json(self.to_json())

    def without(self, features: set[str]) -> Program:
        """Whatever has none of these features stays as it is."""
        out = self.copy()
        if "reentrant" in features:
            for spec in out.model["layers"]:
                if spec["checkpoint"] == "reentrant":
                    spec["checkpoint"] = "plain"
        if "reentrant_shared" in features:
            out.unshare_reentrant()
        if "backward_after_failure" in features:
            out.fail_last()
        if "late_reads" in features:  # by a recomputation, after the gradient has gone
            for spec in out.model["layers"]:
                if spec["kind"] == "borrower" and spec["options"]["how"] == "detached":
                    spec["options"]["how"] = "add"
        if "nan_norms" in features:
            out.room["nan_norms"] = False
        if "tight_host" in features:
            out.room["slack"] = True
        out.model["hooks"] = [hook for hook in out.model["hooks"]
                              if not ({"hooks"} | ({"late_hooks"} if hook["how"] == "backward"
                                                   else set())) & features]
        if "max_norm" in features:
            for spec in out.model["layers"]:
                if spec["options"].get("how") == "max_norm":
                    spec["options"]["how"] = "plain"
        for step in out.steps:
            for event in step:
                if event.what == "forward" and "activations" in features:
                    event.options["activations"] = None
                if event.what == "forward" and ("failures" in features or (
                        self.ranks > 1 and "rank_failures" in features)):
                    event.options["fail_at"] = event.options["fail_backward_at"] = None
                if event.what == "backward" and "scaled_plain_backward" in features and (
                        "loss_scale" in out.config):
                    event.options["how"] = "engine"
        for step in out.steps:
            for event in list(step):
                if features & set(event.features):
                    event.leave_out(step)
        return out

    def fail_last(self) -> None:
        for step in self.steps:
            passes = [event for event in step if event.what == "forward"]
            for event in passes[:-1]:
                event.options["fail_backward_at"] = None
            for event in passes[-1:]:
                if event.options["fail_backward_at"] is not None and (
                        event.options["loss"] == "two"):
                    event.options["loss"] = "tokens"

    def unshare_reentrant(self) -> None:
        layers = self.model["layers"]
        if any(spec["kind"] == "borrower" for spec in layers):
            for spec in layers:
                if spec["checkpoint"] == "reentrant":
                    spec["checkpoint"] = "plain"
        once = {number for number, spec in enumerate(layers) if spec["checkpoint"] == "reentrant"}
        for step in self.steps:
            for event in step:
                if event.what == "forward":
                    event.options["repeat"] = [n for n in event.options["repeat"] if n not in once]

    def text(self) -> str:
        model = self.model
        lines = [f"seed {self.seed}, {self.ranks} rank(s)",
                 f"model: width {model['width']}, vocabulary {model['vocabulary']}, "
                 f"{model['dtype']}, {'tied' if model['tied'] else 'own'} head, "
                 f"{'built by' if self.build else 'handed to'} the engine"]
        if model["frozen"]:
            lines.append(f"  frozen: {', '.join(model['frozen'])}")
        for number, spec in enumerate(model["layers"]):
            options = ", ".join(f"{key}={value!r}" for key, value in spec["options"].items())
            lines.append(f"  layer {number}: {spec['kind']}({options}) {spec['dtype']}"
                         + (f", checkpoint {spec['checkpoint']}" if spec["checkpoint"] else ""))
        for hook in model["hooks"]:
            lines.append(f"  hook: {hook['how']} on {hook['on']}")
        for group in self.optimizer["groups"]:
            lines.append("group: " + ", ".join(f"{key}={value}" for key, value in group.items()))
        lines.append(f"room: {self.room}")
        lines.append(f"config: {self.config}")
        for number, step in enumerate(self.steps):
            lines.append(f"step {number}:")
            lines += [f"  {event.text()}" for event in step]
        return "\n".join(lines)
