# SPDX-License-Identifier: Apache-2.0
"""Habits that change parameters, and passes over the model that are not for training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from program import Event
from session import Session, habit

# Writing.

def _rows(p: torch.Tensor) -> torch.Tensor:
    return p if p.dim() == 0 else p[0]


def _index(p: torch.Tensor) -> None:
    if p.dim() > 0:
        p[p.shape[0] // 2] = 0.125


def _masked(p: torch.Tensor) -> None:
    p[p.abs() < 0.02] = 0


def _out(p: torch.Tensor) -> None:
    torch.mul(p, 0.96875, out=p)


def _view(p: torch.Tensor) -> None:
    p.transpose(0, -1).mul_(1.03125) if p.dim() > 1 else p.mul_(1.03125)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "clamp": lambda p: p.clamp_(-0.3, 0.3),
    "decay": lambda p: p.mul_(0.984375),
    "noise": lambda p: p.add_(torch.full_like(p, 0.001)),
    "zero": lambda p: p.zero_(),
    "fill": lambda p: p.fill_(0.0625),
    "data": lambda p: p.data.mul_(0.96875),
    "row": lambda p: _rows(p).add_(0.25),
    "index": _index,
    "masked": _masked,
    "out": _out,
    "view": _view,
    "init": lambda p: torch.nn.init.normal_(p, std=0.1),
    "normalize": lambda p: p.div_(p.norm() + 1),
    "flip": lambda p: p.copy_(p.flip(0)) if p.dim() > 0 else p,
    "self": lambda p: p.copy_(p.detach().clone()),
}


@habit
def write(session: Session, event: Event, how: str, parameter: int, late: bool) -> None:
    _, p = session.parameter(parameter)
    torch.manual_seed(event.number)

    def write_it() -> None:
        with torch.no_grad():
            WRITES[how](p)

    session.attempt(event, write_it, may_refuse=late and session.early)


@habit
def reset(session: Session, event: Event, layer: int) -> None:
    torch.manual_seed(event.number)
    layers = session.model.layers
    if len(layers) > 0:
        with torch.no_grad():
            layers[layer % len(layers)].reset()  # type: ignore[operator]


@habit
def exchange(session: Session, event: Event, parameter: int, frozen: bool) -> None:
    """p.data = another tensor; the next operator sees it. Every other time the one of before comes
    back, and what has kept it sees the same values throughout."""
    whole = [p for p in session.model.parameters() if p.is_floating_point() and p.is_contiguous()
             and 0 < p.numel() * p.element_size() == p.untyped_storage().nbytes()
             and p.requires_grad != frozen]
    if not whole:
        return
    if "former" in session.kept:
        session.see("former", session.kept["former"].sum())
    p = whole[parameter % len(whole)]
    if "pin" in session.kept and session.kept["pin"][2] is p:
        return  # refused: raw pointers to it may be in use
    if session.program.ranks > 1 and any(
            other.what == "hold" and session.parameter(other.options["parameter"])[1] is p
            for step in session.program.steps for other in step):
        return  # one rank may hold it where another does not
    former = session.kept["former"] = p.data
    p.data = former * 0.9375
    session.see("exchanged", p.sum())
    if event.number % 2 == 0:
        p.data = former
        session.see("back", p.sum())


@habit
def rollback(session: Session, event: Event, again: bool) -> None:
    """Keeps all weights, or loads what was kept."""
    if not again:
        session.kept["checkpoint"] = {name: value.detach().clone() for name, value
                                      in session.model.state_dict().items()}
    elif "checkpoint" in session.kept:
        session.model.load_state_dict(session.kept["checkpoint"])


@habit
def swap(session: Session, event: Event, seed: int) -> None:
    """Evaluates with other weights, and puts the own ones back."""
    with torch.no_grad():
        own = {name: p.detach().clone() for name, p in session.model.named_parameters()}
        for p in session.model.parameters():
            if p.is_floating_point():
                p.copy_(p * 0.5)
        evaluate(session, event, "no_grad", seed)
        for name, p in session.model.named_parameters():
            p.copy_(own[name])


# Passes without a step.

@habit
def evaluate(session: Session, event: Event, how: str, seed: int) -> None:
    torch.manual_seed(seed)
    session.model.eval()
    around = {"no_grad": torch.no_grad, "inference": torch.inference_mode,
              "grad": contextlib.nullcontext}[how]
    with around():
        session.see("logits", session.model(session.ids(seed)).float().mean().clone())
    session.model.train()


@habit
def generate(session: Session, event: Event, seed: int) -> None:
    session.model.eval()
    with torch.no_grad():
        ids = session.ids(seed)[:, :2]
        for _ in range(3):
            logits = session.model(ids)[:, -1].float()
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    session.model.train()
    session.see("written", ids.double())


@habit
def gradients_by_hand(session: Session, event: Event, seed: int) -> None:
    """autograd.grad: no hook fires, nothing is accumulated."""
    torch.manual_seed(seed)
    loss, = session.model.losses(session.ids(seed), "tokens")
    if not loss.requires_grad:
        return
    trained = [p for p in session.model.parameters() if p.requires_grad]
    for number, grad in enumerate(torch.autograd.grad(loss, trained, allow_unused=True)):
        if grad is not None:
            session.see(f"gradient {number}", grad)
