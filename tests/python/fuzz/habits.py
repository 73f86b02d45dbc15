# SPDX-License-Identifier: Apache-2.0
"""Habits that call the engine: gradients, constants, schedules, freezing, saving, the end."""

from __future__ import annotations

import torch
from program import Event
from reads import hold
from session import Call, Calls, Session, habit
from torch.optim import lr_scheduler

import pagoda

# The engine's calls.

@habit
def gradient(session: Session, event: Event, parameter: int | None, late: bool) -> Calls:
    if session.trainer.was_refused(event.number) and not session.trainer.paged:
        session.see("gradient", None)
        return
    if parameter is not None:
        given = {id(p) for group in session.trainer.optimizer.param_groups
                 for p in group["params"]}
        named = [(name, p) for name, p in session.model.named_parameters()
                 if id(p) in given and p.requires_grad and p.numel() > 0]
        name, p = named[parameter % len(named)]
        call = Call("grad", name, p)
    else:
        call = Call("grad_norm")
    try:
        value = yield call
    except pagoda.UserError:
        if not (late and session.early):
            raise
        session.trainer.refused[event.number] = True
        value = None
    session.see("gradient", value)


@habit
def zero_grad(session: Session, event: Event, late: bool, by: str = "engine") -> Calls:
    if session.trainer.was_refused(event.number) and not session.trainer.paged:
        return
    try:
        yield Call("zero_grad", by, session.model)
    except pagoda.UserError:
        if not (late and session.early):
            raise
        session.trainer.refused[event.number] = True


@habit
def put_gradients(session: Session, event: Event, parameters: list[int]) -> None:
    """p.grad = …: a step without a backward, by an evolution strategy, say."""
    given = {id(p) for group in session.trainer.optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in session.model.named_parameters()
             if id(p) in given and p.requires_grad]
    random = torch.Generator().manual_seed(event.number + session.rank)
    found = {}
    for number in parameters:
        name, p = named[number % len(named)]
        found[name] = torch.randn(p.shape, generator=random).to(p.dtype)
    session.trainer.put_gradients(found)


@habit
def abandon(session: Session, event: Event) -> Calls:
    """Gives a step up: zero_grad() instead of step(); where that is refused, the step is made."""
    yield from zero_grad(session, event, True)
    if session.trainer.was_refused(event.number):
        yield from session.step(event)


@habit
def change(session: Session, event: Event, key: str, factor: float, group: int,
           late: bool) -> None:
    """Of a learning rate, or a weight decay."""
    groups = session.trainer.optimizer.param_groups
    there = groups[group % len(groups)]
    session.attempt(event, lambda: there.update({key: there[key] * factor}), late and session.early)


@habit
def schedule(session: Session, event: Event, kind: str) -> None:
    """A scheduler of torch's, made at its first step."""
    made = session.kept.get("scheduler")
    if made is None:
        optimizer = session.trainer.optimizer
        made = {
            "step": lambda: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 5),
            "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
            "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
            "linear": lambda: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        }[kind]()
        session.kept["scheduler"] = made
        return
    made.step()
    session.see("rate", float(session.trainer.optimizer.param_groups[0]["lr"]))


@habit
def clip_by_torch(session: Session, event: Event, value: bool) -> None:
    """Always refused: the engine has the gradients."""
    if not session.trainer.paged:
        return
    given = [p for group in session.trainer.optimizer.param_groups for p in group["params"]]
    clip = torch.nn.utils.clip_grad_value_ if value else torch.nn.utils.clip_grad_norm_
    try:
        clip(given, 1.0)
    except pagoda.UserError:
        return
    raise AssertionError("torch's clipping was not refused")


@habit
def copy_groups(session: Session, event: Event) -> None:
    """The constants of the optimizer, out and in again."""
    if session.trainer.paged:
        optimizer = session.trainer.optimizer
        kept = [{key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups]
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.update(before)


@habit
def freeze(session: Session, event: Event, parameter: int, thaw: bool) -> None:
    """For some steps; `thaw`: one that was frozen before attach(), too."""
    if thaw:
        given = {id(p) for group in session.trainer.optimizer.param_groups
                 for p in group["params"]}
        for p in session.model.parameters():
            if id(p) in given:
                p.requires_grad_(True)
    else:
        trained = [p for p in session.model.parameters() if p.requires_grad]
        if len(trained) > 1:
            session.kept.setdefault("frozen", []).append(trained[parameter % len(trained)])
            trained[parameter % len(trained)].requires_grad_(False)


@habit
def unfreeze(session: Session, event: Event) -> None:
    for p in session.kept.pop("frozen", []):
        p.requires_grad_(True)


@habit
def reattach(session: Session, event: Event) -> Calls:
    hold(session, event, 0, True)
    yield Call("release", model=session.model)
    session.see_all("released")
    session.kept.pop("scheduler", None)
    yield from session.attach()


@habit
def finish(session: Session, event: Event) -> None:
    if session.trainer.paged:
        session.trainer.engine.finish()


@habit
def stats(session: Session, event: Event) -> None:
    if session.trainer.paged:
        str(session.trainer.engine.stats())


@habit
def save(session: Session, event: Event) -> Calls:
    """engine.save_pretrained: the file has what the parameters are."""
    yield Call("save", model=session.model, name=str(session.folder / f"save {event.number}"))
    if session.rank != 0:
        return
    if not session.trainer.paged:
        for name, value in session.model.state_dict().items():
            session.see(name, value)
        return
    from safetensors.torch import load_file

    file = session.folder / f"save {event.number}" / "model.safetensors"
    found = load_file(file)
    tied = {"head.weight": "tokens.weight"}
    for name in session.model.state_dict():
        session.see(name, found[name] if name in found else found[tied[name]])


@habit
def join(session: Session, event: Event) -> Calls:
    yield Call("join")
    session.kept["joined"] = True


@habit
def end(session: Session) -> Calls:
    """The last look."""
    hold(session, Event("hold"), 0, True)
    if session.kept.get("joined") is None and any(
            event.what == "join" for step in session.program.steps for event in step):
        yield Call("join")
    session.losses = []
    if session.program.room.get("look_first", True):
        session.see_all("final")
    yield Call("barrier")
    if session.program.room.get("release", True):
        yield Call("release", model=session.model)
        session.see_all("released")
        with torch.no_grad():
            for name, p in session.model.named_parameters():
                if p.dtype == torch.float32:
                    session.see(f"raw {name}", torch.from_numpy(p.detach().numpy().copy()))
    session.trainer.close()
