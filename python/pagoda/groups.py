# SPDX-License-Identifier: Apache-2.0
"""The parameter groups that attach() is given."""

from __future__ import annotations

from typing import Any

import torch

from pagoda.errors import UserError


def require_disjoint(groups: list[dict[str, Any]], named: dict[str, torch.nn.Parameter]) -> None:
    """Every tensor of a group is a parameter of the model, and in no other group."""
    names = {id(parameter): name for name, parameter in named.items()}
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(f"group {number}: a tensor of shape {list(parameter.shape)} is not a "
                                "parameter of the attached model")
            before = group_of.get(id(parameter))
            if before is not None:
                raise UserError(f"parameter '{name}' is in " + (
                    f"group {number} twice" if before == number else f"groups {before} and {number}"))
            group_of[id(parameter)] = number
