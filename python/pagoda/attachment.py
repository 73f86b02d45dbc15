# SPDX-License-Identifier: Apache-2.0
"""Gradients of attached parameters are in their engine, and p.grad is None. What torch does to p.grad
would find nothing and do nothing, without a word: clip_grad_*, Module.zero_grad, the step of another
optimizer. On attached parameters each does what it says, or is an error that names the way."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pagoda.accelerator_state import guard_accelerator_state
from pagoda.errors import UserError
from pagoda.grad_scaler import guard_grad_scalers
from pagoda.vectors import copy_to_attached
from pagoda.saved_mutations import guard_saved_mutations
from pagoda.wrappers import guard_wrappers

if TYPE_CHECKING:
    from pagoda.engine import Engine

_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()
_guarded = False


class Attachment:
    """The parameters of one engine, while it has their gradients.

    `serves`: a framework clips by itself, where the engine clips already: its call gets the norm, and
    nothing else happens.
    """

    def __init__(self, engine: Engine, parameters: Iterable[torch.Tensor], clip: float) -> None:
        self.kept = list(parameters)  # an id means something while its object lives
        self.ids = {id(parameter) for parameter in self.kept}
        self.clip = clip
        self.serves = False
        self._engine = weakref.ref(engine)
        _attached.add(self)
        _guard()

    def norm(self, wanted: object, kind: object) -> torch.Tensor:
        """What clip_grad_norm_ returns to a framework that wants this clip."""
        engine = self._engine()
        if engine is None:
            raise UserError("the engine of these parameters is gone")
        try:
            largest, power = float(wanted), float(kind)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise UserError(f"clip_grad_norm_({wanted!r}, {kind!r}) expects two numbers") from None
        if power != 2 or (largest != self.clip and largest != float("inf")):
            raise UserError(f"clip_grad_norm_ asks for the {power:g}-norm {largest:g} and the engine "
                            f"clips the 2-norm at {self.clip:g}: attach(model, clip=…) decides")
        return torch.tensor(engine.grad_norm())

    def module_zeroed(self, module: torch.nn.Module) -> None:
        """Module.zero_grad drops the gradients of all its parameters."""
        engine = self._engine()
        if engine is None:
            return
        theirs = {id(parameter) for parameter in module.parameters()}
        if self.ids.isdisjoint(theirs) or not engine.has_gradients():
            return
        if not self.ids <= theirs:
            raise UserError("zero_grad() of a part of an attached model is not supported: "
                            "engine.zero_grad() drops the gradients of all of it")
        if engine.world_size > 1:  # not every rank may have gradients, and all must take part
            raise UserError("model.zero_grad() of a model that is trained on several ranks is not "
                            "supported: call engine.zero_grad() on all of them")
        engine.zero_grad()


def _attachment_of(tensors: Iterable[object]) -> Attachment | None:
    attachments = list(_attached)
    if not attachments:
        return None
    ids = {id(tensor) for tensor in tensors}
    return next((each for each in attachments if not ids.isdisjoint(each.ids)), None)


def _trainers_way() -> str:
    """Where a Trainer may be what clips and steps."""
    return ("; a Trainer takes **pagoda.trainer.arguments(engine, model, args) instead of attach()"
            if "transformers.trainer" in sys.modules else "")


def _guard_clipping(name: str) -> None:
    """Whatever name a script has imported it by: the wrapped function is exchanged inside."""
    wrapper = getattr(clip_grad, name)
    cell = next(cell for cell in wrapper.__closure__ or () if callable(cell.cell_contents))
    plain: Callable[..., Any] = cell.cell_contents

    @functools.wraps(plain)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        single = isinstance(parameters, torch.Tensor)
        tensors = [parameters] if single else list(parameters)
        attachment = _attachment_of(tensors)
        if attachment is None:
            return plain(tensors, *args, **kwargs)
        if attachment.serves and name == "clip_grad_norm_":
            largest = args[0] if args else kwargs.get("max_norm")
            kind = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
            return attachment.norm(largest, kind)
        way = ("clip each gradient in a hook, p.register_hook(lambda g: g.clamp(-v, v))"
               if name == "clip_grad_value_" else
               "pass clip= to engine.attach(model, clip=…), and read their norm from step().norm")
        raise UserError(f"{name.strip('_')}_: these parameters are attached to an engine, which owns "
                        f"their gradients; {way}{_trainers_way()}")

    cell.cell_contents = checked


def _guard_zeroing() -> None:
    plain = torch.nn.Module.zero_grad

    @functools.wraps(plain)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        for attachment in list(_attached):
            attachment.module_zeroed(self)
        plain(self, set_to_none)

    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


def _guard_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before the step of any optimizer."""
    from pagoda.optimizer import Optimizer

    if isinstance(optimizer, Optimizer) or not _attached:
        return
    if _attachment_of(p for group in optimizer.param_groups for p in group["params"]) is not None:
        raise UserError(f"{type(optimizer).__name__}.step(): these parameters are attached to an engine, "
                        "which owns their gradients; call engine.step() or engine.optimizer.step()"
                        + _trainers_way())


def _guard() -> None:
    global _guarded
    if _guarded:
        return
    _guarded = True
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        _guard_clipping(name)
    _guard_zeroing()
    guard_wrappers(lambda tensors: _attachment_of(tensors) is not None)
    guard_grad_scalers(lambda tensors: _attachment_of(tensors) is not None, lambda: len(_attached) > 0)
    guard_accelerator_state()
    guard_saved_mutations(lambda: len(_attached) > 0)
    register_optimizer_step_pre_hook(_guard_steps)
    copy_to_attached(lambda tensors: _attachment_of(tensors) is not None)
