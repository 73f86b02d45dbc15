# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libpagoda.so, and says what its classes look like."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from pagoda.errors import translated


def _candidates() -> list[Path]:
    """An installed wheel's own library; a build tree's where the package runs from its sources. Where
    PAGODA_BUILD names a build, no other one."""
    here = Path(__file__).resolve().parent
    places = [here / "lib", here.parents[1] / "build" / "lib"]
    if named := os.environ.get("PAGODA_BUILD"):
        places = [Path(named) / "lib"]
    return [place / "libpagoda.so" for place in places]


def _load() -> None:
    for path in _candidates():
        if path.exists():
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            return
    tried = ", ".join(str(path) for path in _candidates())
    raise ImportError(f"libpagoda.so was not found ({tried}): " + (
        "PAGODA_BUILD names a directory without a build; build it there, or unset PAGODA_BUILD"
        if os.environ.get("PAGODA_BUILD") else
        "build it, or set PAGODA_BUILD to the directory of a build"))


_load()
# After what engines do at exit: weakref.finalize comes before what was registered earlier.
atexit.register(torch.classes.pagoda.Interpreter().ends)


class PinHandle(Protocol):
    """torch.classes.pagoda.Pin."""

    def release(self) -> None: ...


class SavedHandle(Protocol):
    """torch.classes.pagoda.Saved."""

    def restore(self) -> torch.Tensor: ...


class ActivationsHandle(Protocol):
    """torch.classes.pagoda.Activations."""

    def keep(self, tensor: torch.Tensor) -> SavedHandle: ...
    def sweep(self) -> None: ...
    def flush(self) -> None: ...
    def pause(self, paused: bool) -> None: ...


class Handle(Protocol):
    """torch.classes.pagoda.Engine: what binding.cpp registers."""

    def require_may_close(self) -> None: ...
    def close(self, give_back: bool) -> str: ...
    def begin_build(self) -> None: ...
    def end_build(self) -> None: ...
    def adopt(self, tensor: torch.Tensor, name: str) -> None: ...
    def attach(self, names: list[str], tensors: list[torch.Tensor], group_of: list[int],
               kinds: list[str], constants: list[dict[str, float]], buffer_names: list[str],
               buffers: list[torch.Tensor], clip: float, refusal: str) -> None: ...
    def attached(self) -> bool: ...
    def release(self, parameters: list[torch.Tensor], refusal: str) -> None: ...
    def backward(self, loss: torch.Tensor, last: bool | None, retain_graph: bool) -> None: ...
    def step(self) -> tuple[int, bool, float, float]: ...
    def join(self) -> None: ...
    def finish(self) -> None: ...
    def barrier(self) -> None: ...
    def begin_call(self, label: str, name: str, argument: str) -> None: ...
    def end_call(self, error: str) -> None: ...
    def begin_work(self, label: str) -> None: ...
    def end_work(self) -> None: ...
    def open_calls(self) -> int: ...
    def fail(self, why: str) -> None: ...
    def waited_for_ranks(self) -> float: ...
    def zero_grad(self) -> None: ...
    def taken(self) -> None: ...
    def has_gradients(self) -> bool: ...
    def set_loss_is_scaled(self, scaled: bool) -> None: ...
    def set_clip(self, clip: float) -> None: ...
    def set_optimizer(self, group: int, kind: str, constants: dict[str, float]) -> None: ...
    def require_changeable(self, what: str) -> None: ...
    def loss_scale(self) -> float: ...
    def grad(self, parameter: torch.Tensor) -> torch.Tensor: ...
    def grad_norm(self) -> float: ...
    def pin(self, parameters: list[torch.Tensor], write: bool) -> PinHandle: ...
    def activations(self, place: str, least: str, in_flight: str) -> ActivationsHandle: ...
    def stats(self) -> dict[str, int]: ...
    def stats_table(self) -> str: ...
    def config(self) -> str: ...
    def device(self) -> str: ...
    def rank(self) -> int: ...
    def world_size(self) -> int: ...


def make_engine(config: str, group: Any, gradients: Any, from_env: bool) -> Handle:
    """An engine of the library. `group`, `gradients`: boxed process groups, or None."""
    with translated():
        return cast(Handle, torch.classes.pagoda.Engine(config, group, gradients, from_env))


class ConfigKey(NamedTuple):
    """One keyword of `Engine`."""

    name: str
    takes: str
    default: str
    meaning: str


def config_keys() -> list[ConfigKey]:
    """What `Engine` takes.

    >>> import pagoda
    >>> next(key.meaning for key in pagoda.config_keys() if key.name == "accumulation")
    'Micro-batches in a step'
    """
    texts = cast("list[str]", torch.ops.pagoda.config_keys())
    return [ConfigKey(*texts[i:i + 4]) for i in range(0, len(texts), 4)]


def page_at(storage: int) -> str | None:
    """The name of the page that this storage is (its `_cdata`); None: it is a plain one."""
    return cast("str | None", torch.ops.pagoda.page_at(storage))


def optimizer_constants(kind: str) -> dict[str, float]:
    """The constants of an optimizer, with their defaults."""
    with translated():
        return dict(torch.ops.pagoda.optimizer_constants(kind))


def version() -> str:
    """The version of the library."""
    return cast(str, torch.ops.pagoda.version())
