# SPDX-License-Identifier: Apache-2.0
"""A backward that fails in the user's own code."""

from __future__ import annotations

from typing import Any

import torch


class Failing(torch.autograd.Function):
    """The identity, whose backward raises. It makes the error there: one that it kept would keep, by its
    traceback, all that the pass has used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[Exception]) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        raise ctx.error("mine")


def failing(x: torch.Tensor, error: type[Exception]) -> torch.Tensor:
    """`x`, whose gradient raises `error`."""
    return Failing.apply(x, error)  # type: ignore[no-any-return]
