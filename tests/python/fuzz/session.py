# SPDX-License-Identifier: Apache-2.0
"""One rank's run of a program, over an engine or over plain tensors.

It is a generator: what ranks do together is yielded, so that a plain loop can run all of them in
turn.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configuration
import torch
from model import Model, UsersOwn, autocast
from program import Event, Program



@dataclass
class Call:
    """What all ranks do together; the reply is sent back."""

    what: str
    name: str = ""
    model: Any = None
    groups: Any = None


@dataclass
class Entry:
    """Something that was seen: `value` None where reading it was refused."""

    where: str
    value: torch.Tensor | None


Calls = Generator[Call, Any, None]
Habit = Callable[..., Calls | None]
HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    """Makes it an event of programs."""
    HABITS[function.__name__] = function
    return function


class Session:
    """What user code has: a model, a trainer, and what it remembers."""

    def __init__(self, program: Program, rank: int, trainer: Any, folder: Path) -> None:
        self.program = program
        self.rank = rank
        self.trainer = trainer
        self.folder = folder
        self.log: list[Entry] = []
        self.where = "attach"
        self.losses: list[torch.Tensor] = []
        self.kept: dict[str, Any] = {}  # averages, copies, schedulers, pins
        self.early = configuration.early(program.config)
        self.model: Model

    # Looking.

    def see(self, label: str, value: torch.Tensor | float | None) -> None:
        if isinstance(value, (float, int)):
            value = torch.tensor(float(value), dtype=torch.float64)
        if value is not None:
            value = value.detach().clone()
        self.log.append(Entry(f"{self.where}: {label}", value))

    def see_all(self, label: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.see(f"{label} {name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.see(f"{label} buffer {name}", buffer)

    def parameter(self, number: int, trained: bool = False) -> tuple[str, torch.nn.Parameter]:
        """One of those with elements, whatever the number."""
        named = [(name, p) for name, p in self.model.named_parameters()
                 if p.numel() > 0 and p.is_floating_point() and (p.requires_grad or not trained)]
        return named[number % len(named)]

    def attempt(self, event: Event, action: Callable[[], Any], may_refuse: bool) -> bool:
        """Does it, unless the engine refuses: then it must not have happened."""
        done: bool = self.trainer.attempt(event.number, action, may_refuse)
        return done

    # The run.

    def groups(self) -> list[dict[str, Any]]:
        spec = self.program.optimizer
        groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else {**group}
                  for group in spec["groups"]]
        for group in groups:
            group["params"] = []
        left_out = spec["left_out"]
        # attach(model) gives the optimizer what is frozen at that time, too.
        thawable = spec["explicit"] or len(spec["groups"]) == 1
        for name, parameter in self.model.named_parameters():
            number = int(name.split(".")[1]) + 1 if name.startswith("layers.") else 0
            if not parameter.is_floating_point() or (left_out is not None and number == left_out):
                continue
            if not parameter.requires_grad and not (
                    thawable and parameter.dtype != torch.float64):
                continue
            groups[number % len(groups)]["params"].append(parameter)
        return [group for group in groups if group["params"]]

    def attach(self) -> Calls:
        spec = self.program.optimizer
        explicit = "explicit" if spec["explicit"] or len(spec["groups"]) > 1 else ""
        yield Call("attach", explicit, self.model, self.groups())

    def run(self) -> Calls:
        torch.manual_seed(self.program.seed)
        made = self.trainer.make(lambda: Model(self.program.model))
        assert isinstance(made, Model)
        self.model = made
        yield from self.attach()
        for number, step in enumerate(self.program.steps):
            for event in step:
                if event.ranks is not None and self.rank not in event.ranks:
                    continue
                self.where = f"step {number}, {event.text()}"
                done = HABITS[event.what](self, event, **event.options)
                if done is not None:
                    yield from done
        self.where = "end"
        end = HABITS["end"](self)
        assert end is not None
        yield from end

    # A micro-batch.

    def ids(self, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        vocabulary = self.program.model["vocabulary"]
        return torch.randint(0, vocabulary, (2, 5), generator=random)

    def forward(self, event: Event, loss: str, seed: int, activations: str | None, least: int,
                autocast_on: bool, **control: Any) -> None:
        torch.manual_seed(seed)
        self.losses = []
        around = (contextlib.nullcontext() if activations is None
                  else self.trainer.activations(activations, least))
        try:
            with around, autocast(autocast_on):
                self.losses = self.model.losses(self.ids(seed), loss, **control)
        except UsersOwn:
            self.see("the user's own error", 0.0)
            self.see_hooks()
            return
        for value in self.losses:
            self.see("loss", value)
        self.see_hooks()

    def see_hooks(self) -> None:
        seen, self.model.seen = self.model.seen, []
        for value in seen:
            self.see("hook", value)

    def backward(self, event: Event, how: str, last: bool | None, late: bool) -> None:
        losses, self.losses = self.losses, []
        for number, loss in enumerate(losses):
            if not loss.requires_grad:
                continue
            final = number == len(losses) - 1
            # Of two losses only the second may be the last of the step.
            said = last if final or last is None else False
            scaled = how == "plain" and "loss_scale" in self.program.config
            refusable = scaled or (self.early and late)
            seen = len(self.model.seen)
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            try:
                done = self.trainer.attempt(
                    event.number + 10000 * number,
                    lambda: self.trainer.backward(loss, how, said, not final), refusable)
                if not done:  # what the layers before the one where it was refused have done
                    del self.model.seen[seen:]
                    for name, buffer in self.model.named_buffers():
                        buffer.copy_(buffers[name])
            except UsersOwn:
                self.see("the user's own error", 1.0)
        self.see_hooks()

    def step(self, event: Event, by: str = "engine") -> Calls:
        report = yield Call("step", by)
        step, skipped, norm, scale = report
        self.see("step", float(step))
        self.see("skipped", float(skipped))
        if norm is not None and math.isnan(norm) and not self.program.room.get("nan_norms", True):
            norm = None
        self.see("norm", -1.0 if norm is None else norm)
        self.see("loss scale", scale)


HABITS.update(forward=Session.forward, backward=Session.backward, step=Session.step)
