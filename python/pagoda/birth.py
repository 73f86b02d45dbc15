# SPDX-License-Identifier: Apache-2.0
"""Parameters become pages when they are registered, before the next one exists."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from pagoda.errors import UserError, translated
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


def _is_innermost(adopt: Adopt) -> bool:
    return bool(_scopes) and _scopes[-1] is adopt


def _leave(adopt: Adopt) -> None:
    if adopt in _scopes:
        _scopes.remove(adopt)


def _is_open(handle: Handle) -> bool:
    try:
        handle.rank()
    except RuntimeError:
        return False
    return True


@contextmanager
def birth_scope(handle: Handle, adopt: Adopt, device: torch.device) -> Iterator[None]:
    """While it lasts, every parameter that any module registers is handed to `adopt`."""

    def registered(module: torch.nn.Module, name: str,
                   parameter: torch.nn.Parameter | None) -> None:
        # Scopes nest: the innermost engine takes it. What has no bytes yet comes again when it has.
        if parameter is None or not _is_innermost(adopt) or is_lazy(parameter) or parameter.is_meta:
            return
        try:
            adopt(parameter, f"{type(module).__name__}.{name}")
        except UserError:
            if _is_open(handle):
                raise
            _leave(adopt)  # a Ctrl-C has cut the end of the scope short

    begun, hook = False, None
    cudnn = torch._C._get_cudnn_enabled()
    # transformers' loader threads would read the whole checkpoint ahead of us.
    with _environment("HF_DEACTIVATE_ASYNC_LOAD", "1"), device if device.type == "cuda" else nullcontext():
        try:
            with translated():
                handle.begin_build()
                begun = True
            hook = register_module_parameter_registration_hook(registered)
            _scopes.append(adopt)
            yield
        finally:
            # A Ctrl-C may come as a call of the library begins or returns, so cuDNN's setting is restored
            # here as well. A hook that is left without its scope does nothing.
            try:
                if begun and not sys.is_finalizing():  # torch's wrapper of such a call imports
                    handle.end_build()
            finally:
                try:
                    torch._C._set_cudnn_enabled(cudnn)
                finally:
                    if adopt in _scopes:
                        _scopes.remove(adopt)
                    if hook is not None:
                        hook.remove()
