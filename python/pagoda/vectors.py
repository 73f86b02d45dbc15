# SPDX-License-Identifier: Apache-2.0
"""torch.nn.utils.vector_to_parameters says that it copies, but gives parameters other storages:
views of the vector. Into attached parameters it copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch.nn.utils import convert_parameters

from pagoda.errors import UserError

_replaced = False


def copy_to_attached(is_attached: Callable[[list[torch.Tensor]], bool]) -> None:
    """From now on. Whatever name a script has imported it by: the function's code is exchanged."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    theirs = convert_parameters.vector_to_parameters
    plain = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__)

    def vector_to_parameters(vec: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        into = list(parameters)
        if isinstance(vec, torch.Tensor) and is_attached(into):
            _copy(vec, into)
        else:
            plain(vec, into)

    def through(vec, parameters):  # type: ignore[no-untyped-def]
        return _pagoda_vector_to_parameters(vec, parameters)  # type: ignore[name-defined] # noqa: F821

    names: dict[str, Any] = theirs.__globals__
    names["_pagoda_vector_to_parameters"] = vector_to_parameters
    theirs.__code__ = through.__code__


def _copy(vec: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    count = sum(parameter.numel() for parameter in parameters)
    if vec.dim() != 1 or vec.numel() < count:
        raise UserError(f"vector_to_parameters: expected a 1-D vector of {count} elements or more, got shape "
                        f"{tuple(vec.shape)}")
    at = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(vec[at:at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
