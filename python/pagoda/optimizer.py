# SPDX-License-Identifier: Apache-2.0
"""The engine's updates, as torch.optim and its schedulers know them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from pagoda.errors import UserError, translated
from pagoda.library import Handle, optimizer_constants

if TYPE_CHECKING:
    from pagoda.engine import StepReport

KINDS = ("adamw", "adam", "sgd", "lion")

# Without its wrapper, which imports torch._dynamo to keep a compiler away from it: a second and
# 110 MiB at the first attach() of a process that compiles nothing.
_add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)


def group_defaults(kind: str) -> dict[str, Any]:
    """What a group of `kind` is trained with when nothing is said, as torch writes it."""
    constants: dict[str, Any] = dict(optimizer_constants(kind))
    if "beta1" in constants:
        constants["betas"] = (constants.pop("beta1"), constants.pop("beta2"))
    if "nesterov" in constants:
        constants["nesterov"] = bool(constants["nesterov"])
    return constants


def constants_of(group: dict[str, Any]) -> dict[str, float]:
    """A group's constants, as the library takes them."""
    out: dict[str, float] = {}
    for name in group_defaults(group["optimizer"]):
        if name == "betas":
            out["beta1"], out["beta2"] = (float(beta) for beta in group["betas"])
        else:
            out[name] = float(group[name])
    return out


class Optimizer(torch.optim.Optimizer):
    """Steps the engine; made by `Engine.attach`.

    `param_groups` may be written to, by hand or by `torch.optim.lr_scheduler`: what they say when
    `backward` begins is what the step uses. The state itself is paged and is not shown.

    >>> import torch, pagoda
    >>> engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = engine.attach(model, lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    >>> engine.backward(model(torch.ones(1, 2)).sum())
    >>> _ = engine.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["lr"]
    0.05
    """

    def __init__(self, handle: Handle, groups: list[dict[str, Any]],
                 take_step: Callable[[], StepReport], zero_grad: Callable[[], None]) -> None:
        super().__init__(groups, group_defaults(groups[0]["optimizer"]))
        self._handle = handle
        self._take_step = take_step
        self._zero_grad = zero_grad
        self._sent = [constants_of(group) for group in self.param_groups]
        self.report: StepReport | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for attach()."""
        _add_param_group(self, param_group)

    def send(self) -> None:
        """Tells the engine what has changed in `param_groups`."""
        if len(self.param_groups) != len(self._sent):
            raise UserError("groups cannot be added after attach(): release() the model and "
                            "attach() it again")
        for number, group in enumerate(self.param_groups):
            now = constants_of(group)
            if now == self._sent[number]:
                continue
            with translated():
                self._handle.set_optimizer(number, group["optimizer"], now)
            self._sent[number] = now

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The engine's step; `report` says what it did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.report = self._take_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last step."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The groups. Moments and masters stay in the engine's pages."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' constants over. Moments that are there, too, are not."""
        if state_dict.get("state"):
            warnings.warn("the moments in this state are not taken over: the engine's start from "
                          "zero", stacklevel=2)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
