# SPDX-License-Identifier: Apache-2.0
"""What the calls of an engine are given: each is what it has to be, or a UserError says what it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parameter import is_lazy

from pagoda.errors import UserError
from pagoda.wrappers import check_unwrapped


def boxed(name: str, group: object) -> Any:
    """A process group as TorchBind takes it."""
    if group is None:
        return None
    if not isinstance(group, distributed.ProcessGroup):
        raise UserError(f"{name} = {group!r} is not allowed: expected a process group, as "
                        "torch.distributed.new_group() returns it on its ranks")
    return group.boxed()


def module_of(model: object, call: str) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        hint = ": pass the model, not model.parameters()" if isinstance(model, Iterator) else ""
        raise UserError(f"{call} expects a torch.nn.Module, got {described(model)}{hint}")
    return model


def tensor_of(what: object, call: str, expects: str = "a tensor") -> torch.Tensor:
    if not isinstance(what, torch.Tensor):
        raise UserError(f"{call} expects {expects}, got {described(what)}")
    return what


def directory_of(path: object) -> Path:
    if not isinstance(path, (str, PathLike)):
        raise UserError(f"the directory must be a path, got {described(path)}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise UserError(f"the directory must be a str or a path, got {described(text)}")
    if not text:
        raise UserError("the directory's name is empty; '.' is the current directory")
    if "\0" in text:
        raise UserError(f"the directory {text!r} has a NUL character in its name")
    return Path(text)


def described(what: object) -> str:
    """Of a wrong argument, what it is."""
    return "None" if what is None else type(what).__name__


def check_model(model: torch.nn.Module) -> None:
    """What cannot be paged or trained, as far as Python knows more of it than the library."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"module '{name}' has sparse gradients, which are not supported: "
                            "build it with sparse=False")
    check_unwrapped(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(f"parameter '{name}' is not initialized yet: run one forward pass of the "
                            "model, so that its lazy modules know their shapes, before attach()")
        if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UserError(f"parameter '{name}' is a {type(parameter).__name__}, a tensor subclass that "
                            "keeps its own storage: attach a model of plain tensors")
