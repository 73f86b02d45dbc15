# SPDX-License-Identifier: Apache-2.0
"""The engine's updates, as torch.optim and its schedulers know them."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch

from pagoda.errors import UserError, sendable, translated
from pagoda.grad_scaler import refused
from pagoda.keywords import KINDS, no_such_optimizer
from pagoda.library import Handle, optimizer_constants

if TYPE_CHECKING:
    from pagoda.engine import Engine, StepReport

# Without its wrapper, which imports torch._dynamo to keep a compiler away from it: a second and
# 110 MiB at the first attach() of a process that compiles nothing.
_add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)

NO_CHECKPOINTS = ("checkpoints of the engine's optimizer (moments and fp32 masters) are not supported "
                  "yet. engine.save_pretrained(directory) saves the weights; training restarted from "
                  "them begins with fresh moments")


@functools.cache
def _constants(kind: str) -> dict[str, float]:
    return optimizer_constants(kind)


def group_defaults(kind: str) -> dict[str, Any]:
    """What a group of `kind` is trained with when nothing is said, as torch writes it."""
    constants: dict[str, Any] = dict(_constants(kind))
    if "beta1" in constants:
        constants["betas"] = (constants.pop("beta1"), constants.pop("beta2"))
    if "nesterov" in constants:
        constants["nesterov"] = bool(constants["nesterov"])
    return constants


def number(name: str, value: Any) -> float:
    """A constant that somebody has set to `value`."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} = {value!r} is not allowed: expected a number") from None


def constants_of(group: dict[str, Any]) -> dict[str, float]:
    """A group's constants, as the library takes them."""
    kind = group.get("optimizer")
    if kind not in KINDS:
        raise no_such_optimizer(kind)
    out: dict[str, float] = {}
    for name in group_defaults(kind):
        if name not in group:
            raise UserError(f"a parameter group of optimizer '{kind}' no longer has '{name}'")
        value = group[name]
        if name != "betas":
            out[name] = number(name, value)
            continue
        try:
            first, second = value
        except (TypeError, ValueError):
            raise UserError(f"betas = {value!r} is not allowed: expected two numbers") from None
        out["beta1"], out["beta2"] = number("beta1", first), number("beta2", second)
    return out


class _EngineState(defaultdict[torch.Tensor, Any]):
    """`Optimizer.state`, which is the engine's: nothing is in it, and nothing can be put there."""

    def __bool__(self) -> bool:
        """There is one: torch.distributed.checkpoint makes a step to have one where there is none."""
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"optimizer.state cannot be read or changed: {NO_CHECKPOINTS}")

    __missing__ = __setitem__ = __delitem__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


# What torch.optim's optimizers compute with. (A scheduler's or a script's own keys mean nothing here, either.)
_TORCHS_CONSTANTS = frozenset({
    "alpha", "amsgrad", "betas", "centered", "dampening", "decoupled_weight_decay", "eps", "etas", "lambd",
    "lr_decay", "maximize", "momentum", "momentum_decay", "nesterov", "rho", "weight_decay"})


class _Group(dict[str, Any]):
    """A parameter group. A change of a constant that comes too late for the step raises here, where
    it is made, and is not made: see "Between backward and step" in docs/python.md."""

    def __init__(self, group: dict[str, Any], require_changeable: Callable[[str], None]) -> None:
        super().__init__(group)
        self._require_changeable = require_changeable

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self and name in _TORCHS_CONSTANTS and value is not None and value is not False:
            raise UserError(f"optimizer '{self.get('optimizer')}' has no '{name}'")
        if name in self and name in _constants_as_torch_writes_them(self):
            before = self[name]
            same = before is value or (not isinstance(value, torch.Tensor)
                                       and not isinstance(before, torch.Tensor) and before == value)
            if not same:
                self._require_changeable(f"a change of '{name}'")
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> _Group:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _constants_as_torch_writes_them(group: dict[str, Any]) -> dict[str, Any]:
    kind = group.get("optimizer")
    return group_defaults(kind) if kind in KINDS else {}


class Optimizer(torch.optim.Optimizer):
    """Steps the engine; made by `Engine.attach`.

    `param_groups` may be written to, by hand or by `torch.optim.lr_scheduler`: what they say when
    `backward` begins is what the step uses. The state itself is paged and is not shown: from the
    first step on, state_dict() and load_state_dict() are errors.

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

    # A GradScaler leaves the gradients to such an optimizer, which then can say what it thinks of it.
    _step_supports_amp_scaling = True

    def __init__(self, engine: Engine, handle: Handle, groups: list[dict[str, Any]]) -> None:
        self._fixed = False
        super().__init__(groups, group_defaults(groups[0]["optimizer"]))
        self.state = _EngineState()
        self._handle = handle
        self._watch_groups()
        self._engine = weakref.ref(engine)  # which refers to this: a cycle would keep it open
        self._kinds = [group["optimizer"] for group in self.param_groups]
        self._params = [list(group["params"]) for group in self.param_groups]
        self._sent = [constants_of(group) for group in self.param_groups]
        self._retired: str | None = None
        with translated():
            self._steps_before = handle.stats()["steps"]
        self._fixed = True
        self.report: StepReport | None = None

    def _watch_groups(self) -> None:
        me = weakref.ref(self)

        def require_changeable(what: str) -> None:
            optimizer = me()
            if optimizer is None or optimizer._retired or optimizer._engine() is None:
                return
            with translated():
                optimizer._handle.require_changeable(sendable(what))

        self.param_groups = [_Group(group, require_changeable) for group in self.param_groups]

    def _restore(self, number: int) -> None:
        """The constants that the engine has, in place of others."""
        group = self.param_groups[number]
        sent: dict[str, Any] = dict(self._sent[number])
        if "beta1" in sent:
            sent["betas"] = (sent.pop("beta1"), sent.pop("beta2"))
        for name, value in sent.items():
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                dict.__setitem__(group, name, bool(value) if name == "nesterov" else value)

    def retire(self, why: str) -> None:
        """Nothing here reaches the engine any more; the first reason is the one that is told."""
        self._retired = self._retired or why

    def _require_attached(self) -> Engine:
        if self._retired is not None:
            raise UserError(self._retired)
        engine = self._engine()
        if engine is None:
            raise UserError("the engine of this optimizer no longer exists: keep a reference to it for "
                            "as long as you train")
        return engine

    def _check_groups(self) -> list[dict[str, float]]:
        """The constants of each group; an error if something else has changed."""
        self._require_attached()
        same = len(self.param_groups) == len(self._params) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(self.param_groups, self._params, strict=True))
        if not same:
            raise UserError("groups and their parameters cannot change after attach(): release() the "
                            "model and attach() it again with the new groups")
        for group, kind in zip(self.param_groups, self._kinds, strict=True):
            if group.get("optimizer") != kind:
                raise UserError(f"the optimizer of a group is '{kind}' and cannot change after "
                                "attach(): release() the model and attach() it again")
        return [constants_of(group) for group in self.param_groups]

    def send(self) -> None:
        """Tells the engine what has changed in `param_groups`."""
        for number, now in enumerate(self._check_groups()):
            if now == self._sent[number]:
                continue
            try:
                with translated():
                    self._handle.require_changeable("a change of the optimizer's constants")
            except UserError as error:
                self._restore(number)  # step() completes the step when it is called again
                raise UserError(f"{error}. The group keeps its previous values") from None
            with translated():
                self._handle.set_optimizer(number, self._kinds[number], now)
            self._sent[number] = now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """An error: the engine has made room for the states of what was attached."""
        if self._fixed:
            raise UserError("groups cannot be added after attach(): release() the model and attach() "
                            "it again with the new groups")
        _add_param_group(self, param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The engine's step; `report` says what it did."""
        engine = self._require_attached()
        if vars(self).pop("found_inf", None) is not None:  # left by a GradScaler
            vars(self).pop("grad_scale", None)
            raise refused("GradScaler.step()")
        loss = None
        if closure is not None:
            if not callable(closure):
                raise UserError(f"step({closure!r}) expects a function that returns the loss")
            with torch.enable_grad():
                loss = closure()
        self.report = engine._take_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last step."""
        self._require_attached().zero_grad()

    @contextmanager
    def scaled(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """For frameworks that begin the backward pass themselves: the loss to begin it with, multiplied
        by the engine's loss scale."""
        self._require_attached()
        with translated():
            scale = self._handle.loss_scale()
            self._handle.set_loss_is_scaled(True)
        try:
            yield loss if scale == 1 else loss * scale
        finally:
            with translated():
                self._handle.set_loss_is_scaled(False)

    def require_no_state(self, call: str) -> None:
        """UserError where `call` would lose the state that there is."""
        self._require_attached()
        with translated():
            steps = self._handle.stats()["steps"] - self._steps_before
        if steps > 0:
            raise UserError(f"{call} after {steps} step{'s' * (steps > 1)}: {NO_CHECKPOINTS}")

    def state_dict(self) -> dict[str, Any]:
        """The groups, as long as there is no state: an error after the first step."""
        self.require_no_state("optimizer.state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' constants over, before the first step. A state with moments is an error."""
        self.require_no_state("optimizer.load_state_dict()")
        if not isinstance(state_dict, dict) or "param_groups" not in state_dict:
            raise UserError("load_state_dict() expects what state_dict() returns")
        if state_dict.get("state"):
            raise UserError(f"load_state_dict() of a state with moments: {NO_CHECKPOINTS}")
        kinds = [group.get("optimizer") for group in state_dict["param_groups"]]
        if kinds != self._kinds:
            if None in kinds:
                raise UserError("load_state_dict(): this state_dict is from a torch.optim optimizer; only "
                                "one from engine.optimizer can be loaded")
            raise UserError(f"load_state_dict(): this state_dict is of the optimizers {kinds}, and "
                            f"{self._kinds} are attached")
        before = self.param_groups
        try:
            super().load_state_dict({**state_dict, "state": {}})
            self._watch_groups()
            self.send()
        except (KeyError, TypeError, ValueError) as error:
            self.param_groups = before
            if isinstance(error, UserError):
                raise
            raise UserError(f"load_state_dict(): {error}") from None
        finally:
            self.state = _EngineState()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError(f"an engine's optimizer cannot be copied or pickled: {NO_CHECKPOINTS}")

