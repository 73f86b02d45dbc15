# SPDX-License-Identifier: Apache-2.0
"""Parameters become pages when they are registered, before the next one exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from pagoda.errors import translated
from pagoda.library import Handle

Adopt = Callable[[torch.Tensor, str], None]


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_scopes: list[Adopt] = []


@contextmanager
def birth_scope(handle: Handle, adopt: Adopt, device: torch.device) -> Iterator[None]:
    """While it lasts, every parameter that any module registers is handed to `adopt`."""

    def registered(module: torch.nn.Module, name: str,
                   parameter: torch.nn.Parameter | None) -> None:
        # Scopes nest: the innermost engine takes it. What has no bytes yet comes again when it has.
        if parameter is None or _scopes[-1] is not adopt or is_lazy(parameter) or parameter.is_meta:
            return
        adopt(parameter, f"{type(module).__name__}.{name}")

    with ExitStack() as stack:
        # transformers' loader threads would read the whole checkpoint ahead of us.
        stack.enter_context(_environment("HF_DEACTIVATE_ASYNC_LOAD", "1"))
        if device.type == "cuda":
            stack.enter_context(device)
        with translated():
            handle.begin_build()
        stack.callback(handle.end_build)
        hook = register_module_parameter_registration_hook(registered)
        _scopes.append(adopt)
        try:
            yield
        finally:
            _scopes.remove(adopt)
            hook.remove()
