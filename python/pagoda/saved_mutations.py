# SPDX-License-Identifier: Apache-2.0
"""torch.autograd.graph.allow_mutation_on_saved_tensors() knows saved tensors by their addresses, which pages
do not keep: gradients would be those of other weights. While a model is attached it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.autograd.graph

from pagoda.errors import UserError


def guard_saved_mutations(any_attached: Callable[[], bool]) -> None:
    theirs: Callable[[], Any] = torch.autograd.graph.allow_mutation_on_saved_tensors

    @functools.wraps(theirs)
    def guarded() -> Any:
        if any_attached():
            raise UserError("allow_mutation_on_saved_tensors() is not supported while a model is "
                            "attached: it identifies saved tensors by address, and parameters "
                            "move. Write to parameters after backward()")
        return theirs()

    torch.autograd.graph.allow_mutation_on_saved_tensors = guarded
