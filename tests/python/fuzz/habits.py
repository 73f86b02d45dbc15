# SPDX-License-Identifier: Apache-2.0
"""What people do in their loops besides training: each habit is an event of a program."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from program import Event
from session import Call, Calls, Session
from torch.nn.utils import parameters_to_vector
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pagoda

Habit = Callable[..., Calls | None]
HABITS: dict[str, Habit] = {"forward": Session.forward, "backward": Session.backward,
                            "step": Session.step}


def habit(function: Habit) -> Habit:
    HABITS[function.__name__] = function
    return function


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
    for name, value in session.model.state_dict().items():
        session.see(name, value.detach().clone())


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
    """Without an operator: right, or an error."""
    names = [session.parameter(parameter)] if parameter is not None else [
        (name, p) for name, p in session.model.named_parameters() if p.is_floating_point()]
    for name, p in names:
        if p.dtype == torch.bfloat16 and how in ("numpy", "asarray"):
            p = p.detach().view(torch.int16)  # a view: numpy has no such type
        value: list[torch.Tensor] = []
        try:
            value.append(RAW[how](p))
        except RuntimeError as error:
            if not session.trainer.paged or isinstance(error, pagoda.EngineError):
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
    """p.data = another tensor; the next operator sees it."""
    whole = [p for p in session.model.parameters() if p.is_floating_point() and p.is_contiguous()
             and 0 < p.numel() * p.element_size() == p.untyped_storage().nbytes()
             and p.requires_grad != frozen]
    if not whole:
        return
    p = whole[parameter % len(whole)]
    p.data = p.data * 0.9375
    session.see("exchanged", p.sum())


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
    session.see(call.what, value)


@habit
def zero_grad(session: Session, event: Event, late: bool) -> Calls:
    if session.trainer.was_refused(event.number) and not session.trainer.paged:
        return
    try:
        yield Call("zero_grad")
    except pagoda.UserError:
        if not (late and session.early):
            raise
        session.trainer.refused[event.number] = True


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
    if not session.trainer.paged and session.trainer.was_refused(event.number):
        return
    before = dict(there)
    del before["params"]
    there[key] = there[key] * factor
    if late:
        session.changed = (event.number, there, before)


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
