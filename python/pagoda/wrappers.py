# SPDX-License-Identifier: Apache-2.0
"""Wrappers that distribute training over ranks or devices, by gradients in p.grad or by DTensors: DDP,
DataParallel, FSDP, fully_shard, parallelize_module, distribute_module. An engine does that itself, so
a wrapper of an attached model and an attached wrapper are errors."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any

import torch

from pagoda.errors import UserError

_FSDP = "torch.distributed.fsdp"
# Functions that make DTensors of a module's parameters, and where they are.
_DISTRIBUTE = {"torch.distributed.tensor._api": "distribute_module",
               "torch.distributed.tensor.parallel.api": "parallelize_module"}

IsAttached = Callable[[Iterable[torch.Tensor]], bool]


def _wrappers() -> list[type[torch.nn.Module]]:
    """Of the modules that are imported: torch.distributed.fsdp takes 40 MiB, and most need none."""
    known: list[type[torch.nn.Module]] = [torch.nn.parallel.DistributedDataParallel,
                                          torch.nn.DataParallel]
    if _FSDP in sys.modules:
        known.append(sys.modules[_FSDP].FullyShardedDataParallel)
    return known


def check_unwrapped(model: torch.nn.Module) -> None:
    """Before attach()."""
    known = tuple(_wrappers())
    for name, module in model.named_modules():
        if isinstance(module, known):
            kind = next(base.__name__ for base in known if isinstance(module, base))
            where = f"module '{name}'" if name else "the model"
            raise UserError(f"{where} is a {kind}: the engine shards the model over the ranks "
                            "itself; attach the model without it, and "
                            "train it under torchrun for several ranks")
    for name, parameter in model.named_parameters():
        if "DTensor" in (base.__name__ for base in type(parameter).__mro__):
            raise UserError(f"parameter '{name}' is a DTensor, as fully_shard() and tensor parallelism "
                            "make them: the engine shards parameters over the ranks itself; attach "
                            "the model of plain tensors, before or without them")


def guard_wrappers(is_attached: IsAttached) -> None:
    """From now on none can be put around attached parameters."""
    for wrapper in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        _guard_class(wrapper, is_attached)
    when_imported(_FSDP, lambda fsdp: _guard_fsdp(fsdp, is_attached))
    for name, function in _DISTRIBUTE.items():
        when_imported(name, lambda api, function=function: _guard_function(  # type: ignore[misc]
            getattr(api, function), is_attached))


def _refuse(name: str) -> None:
    raise UserError(f"{name} of a model that is attached to an engine: the engine shards the model "
                    "over the ranks and owns its gradients; train the model as it is, "
                    "under torchrun for several ranks")


def _guard_class(wrapper: type[torch.nn.Module], is_attached: IsAttached) -> None:
    plain = wrapper.__init__

    @functools.wraps(plain)
    def checked(self: torch.nn.Module, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, torch.nn.Module) and is_attached(module.parameters()):
            _refuse(wrapper.__name__)
        plain(self, module, *args, **kwargs)

    wrapper.__init__ = checked  # type: ignore[method-assign]


def _guard_fsdp(fsdp: ModuleType, is_attached: IsAttached) -> None:
    _guard_class(fsdp.FullyShardedDataParallel, is_attached)
    _guard_fully_shard(fsdp.fully_shard, is_attached)


def _guard_fully_shard(theirs: Any, is_attached: IsAttached) -> None:
    """Whatever name a script has imported it by: the function's code is exchanged. Outside of what
    torch wraps it in, which marks the module as sharded before it calls the function."""
    plain = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, None, theirs.__closure__)

    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        modules = [module] if isinstance(module, torch.nn.Module) else list(module)
        if is_attached(parameter for one in modules for parameter in one.parameters()):
            _refuse("fully_shard()")
        return plain(module, *args, **kwargs)

    def with_cells(func, state_cls):  # type: ignore[no-untyped-def] # those of torch's wrapper
        def through(module, *args, **kwargs):  # type: ignore[no-untyped-def]
            _ = (func, state_cls)
            return _pagoda_fully_shard(module, *args, **kwargs)  # type: ignore[name-defined] # noqa: F821

        return through

    theirs.__globals__["_pagoda_fully_shard"] = fully_shard
    theirs.__code__ = with_cells(None, None).__code__  # type: ignore[no-untyped-call]


def _guard_function(theirs: Any, is_attached: IsAttached) -> None:
    """As fully_shard(), of a plain function: the only one in its file that is guarded."""
    plain = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__)
    plain.__kwdefaults__ = theirs.__kwdefaults__

    def guarded(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, torch.nn.Module) and is_attached(module.parameters()):
            _refuse(f"{theirs.__name__}()")
        return plain(module, *args, **kwargs)

    def through(module, *args, **kwargs):  # type: ignore[no-untyped-def]
        return _pagoda_guarded(module, *args, **kwargs)  # type: ignore[name-defined] # noqa: F821

    theirs.__globals__["_pagoda_guarded"] = guarded
    theirs.__defaults__ = theirs.__kwdefaults__ = None
    theirs.__code__ = through.__code__


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then` with the module: now, or when somebody imports it."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenImported(name, then))


class _WhenImported(MetaPathFinder):
    """Calls `then` with the module `name` when it has been imported, once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
