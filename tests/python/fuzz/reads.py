# SPDX-License-Identifier: Apache-2.0
"""Habits that look at parameters: norms, averages, copies, raw pointers, pins."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from program import Event
from session import Session, habit
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# Reading one parameter.

def _strided(p: torch.Tensor) -> torch.Tensor:
    flat = p.detach().reshape(-1)
    return flat[::3].clone()


READS: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "norm": lambda p: p.norm(),
    "sum": lambda p: float(p.sum().item()),
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "largest": lambda p: p.detach().abs().max(),
    "finite": lambda p: float(torch.isfinite(p).all()),
    "strided": _strided,
    "row": lambda p: p.detach().reshape(-1)[0].item(),
    "double": lambda p: p.detach().double(),
    "cpu": lambda p: p.detach().cpu().add(0),
    "mean": lambda p: p.float().mean().detach(),
    "equal": lambda p: float(torch.equal(p, p.detach().clone())),
    "repr": lambda p: float(len(repr(p))),
    "filled": lambda p: torch.zeros_like(p).copy_(p.detach()),
    "stacked": lambda p: torch.stack([p.detach().reshape(-1)[:4], p.detach().reshape(-1)[-4:]])
    if p.numel() >= 4 else p.detach().clone(),
    "contiguous": lambda p: p.detach().t().contiguous() if p.dim() == 2 else p.detach().clone(),
}


@habit
def read(session: Session, event: Event, how: str, parameter: int) -> None:
    name, p = session.parameter(parameter)
    with torch.no_grad():
        session.see(name, READS[how](p))


@habit
def read_all(session: Session, event: Event, how: str) -> None:
    with torch.no_grad():
        for name, p in session.model.named_parameters():
            if p.numel() > 0 and p.is_floating_point():
                session.see(name, READS[how](p))


@habit
def state_dict(session: Session, event: Event) -> None:
    values = session.model.state_dict()
    for name, value in values.items():
        session.see(name, value.detach().clone())
    for name, value in copy.deepcopy(values).items():
        session.see(f"copy of {name}", value)


@habit
def read_in_thread(session: Session, event: Event, parameter: int, during: bool,
                   seed: int) -> None:
    """A logger of its own; `during`: beside a forward."""
    found: list[tuple[str, torch.Tensor]] = []
    errors: list[BaseException] = []

    def look() -> None:
        try:
            with torch.no_grad():
                for number in range(3):
                    name, p = session.parameter(parameter + number)
                    found.append((name, p.detach().clone()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        if during:
            with torch.no_grad():
                session.model.eval()
                session.see("beside", session.model(session.ids(seed)))
                session.model.train()
    finally:
        thread.join()
    if errors:
        raise errors[0]
    for name, value in found:
        session.see(name, value)


RAW: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "asarray": lambda p: torch.from_numpy(np.array(p.detach())),
    "list": lambda p: torch.tensor(p.detach().tolist(), dtype=torch.float64),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "storage": lambda p: torch.tensor(p.detach().untyped_storage().tolist(), dtype=torch.uint8),
    "save": lambda p: _saved(p),
}


def _saved(p: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(p.detach(), file)
    file.seek(0)
    out: torch.Tensor = torch.load(file)
    return out


@habit
def read_raw(session: Session, event: Event, how: str, parameter: int | None) -> None:
    """Without an operator: right, or the error that says so."""
    names = [session.parameter(parameter)] if parameter is not None else [
        (name, p) for name, p in session.model.named_parameters() if p.is_floating_point()]
    for name, p in names:
        if p.dtype == torch.bfloat16 and how in ("numpy", "asarray"):
            p = p.detach().view(torch.int16)  # a view: numpy has no such type
        value: list[torch.Tensor] = []
        try:
            value.append(RAW[how](p))
        except RuntimeError as error:
            # A list is announced; so is what a pin holds (read_pinned, read_held).
            refusal = session.trainer.paged and "raw pointer" in str(error)
            if not refusal or how == "list":
                raise
        session.see(name, value[0] if value else None)


@habit
def read_pinned(session: Session, event: Event, how: str, parameter: int) -> None:
    name, p = session.parameter(parameter)
    with session.trainer.pin(p):
        shown = p.detach().view(torch.int16) if p.dtype == torch.bfloat16 else p
        session.see(name, RAW[how](shown))


@habit
def write_pinned(session: Session, event: Event, parameter: int, late: bool) -> None:
    """By numpy, under a pin: it counts, or is an error."""
    _, p = session.parameter(parameter)

    def write_it() -> None:
        with session.trainer.pin(p):
            shown = p.detach().view(torch.int16) if p.dtype == torch.bfloat16 else p.detach()
            array = shown.numpy()
            array[...] = np.roll(array, 1)

    session.attempt(event, write_it, may_refuse=True)


@habit
def hold(session: Session, event: Event, parameter: int, let_go: bool) -> None:
    """A pin that is held over some events."""
    held = session.kept.pop("pin", None)
    if held is not None:
        held[0].close()
    if not let_go:
        name, p = session.parameter(parameter)
        stack = contextlib.ExitStack()
        stack.enter_context(session.trainer.pin(p))
        session.kept["pin"] = (stack, name, p)


@habit
def read_held(session: Session, event: Event) -> None:
    held = session.kept.get("pin")
    if held is None:
        return
    _, name, p = held
    shown = p.detach().view(torch.int16) if p.dtype == torch.bfloat16 else p
    session.see(name, RAW["numpy"](shown))


# Averages and copies.

@habit
def average(session: Session, event: Event, how: str) -> None:
    """An average of the weights, kept beside the model."""
    named = {name: p for name, p in session.model.named_parameters()
             if p.is_floating_point() and p.numel() > 0}
    kept = session.kept.setdefault(f"average {how}", {})
    with torch.no_grad():
        if not kept:
            kept.update({name: p.detach().clone() for name, p in named.items()})
            return
        if how == "foreach":
            dtype = session.model.tokens.weight.dtype
            alike = [name for name in named if named[name].dtype == dtype]
            torch._foreach_lerp_([kept[name] for name in alike],
                                 [named[name] for name in alike], 0.25)
        elif how == "lerp":
            for name, p in named.items():
                kept[name].lerp_(p, 0.25)
        else:
            for name, p in named.items():
                kept[name].mul_(0.75).add_(p.data, alpha=0.25)
    for name, value in kept.items():
        session.see(name, value)


@habit
def averaged_model(session: Session, event: Event, multi: bool) -> None:
    kept = session.kept.get("averaged model")
    if kept is None:
        multi_avg_fn = get_ema_multi_avg_fn(0.9) if multi else None
        kept = AveragedModel(session.model, multi_avg_fn=multi_avg_fn)
        session.kept["averaged model"] = kept
    kept.update_parameters(session.model)
    for name, value in kept.module.named_parameters():
        session.see(name, value)


@habit
def target(session: Session, event: Event) -> None:
    """A second model that follows the first, as in reinforcement learning."""
    kept = session.kept.get("target")
    if kept is None:
        kept = {name: torch.zeros_like(p) for name, p in session.model.state_dict().items()}
        session.kept["target"] = kept
    with torch.no_grad():
        for name, value in session.model.state_dict().items():
            kept[name].copy_(value)
            session.see(name, kept[name])


def _of_one_type(session: Session) -> list[torch.Tensor]:
    dtype = session.model.tokens.weight.dtype
    return [p for p in session.model.parameters() if p.dtype == dtype]


@habit
def to_vector(session: Session, event: Event) -> None:
    parameters = [p for p in _of_one_type(session) if p.is_contiguous()]
    session.see("vector", parameters_to_vector(parameters))


@habit
def foreach(session: Session, event: Event, how: str) -> None:
    parameters = _of_one_type(session)
    with torch.no_grad():
        if how == "norm":
            for number, value in enumerate(torch._foreach_norm(parameters)):
                session.see(str(number), value)
        elif how == "total":
            session.see("total", torch.nn.utils.get_total_norm(parameters))
        else:
            torch._foreach_mul_(parameters, 0.99)


@habit
def deep_copy(session: Session, event: Event, parameter: int | None) -> None:
    if parameter is not None:
        name, p = session.parameter(parameter)
        session.see(name, copy.deepcopy(p))
        return
    made = copy.deepcopy(session.model)
    for name, p in made.named_parameters():
        session.see(name, p)
