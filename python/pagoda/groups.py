# SPDX-License-Identifier: Apache-2.0
"""The parameter groups that attach() is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pagoda.arguments import described, tensor_of
from pagoda.errors import UserError
from pagoda.keywords import kind_of, no_such_constant
from pagoda.optimizer import group_defaults


def resolve_groups(named: dict[str, torch.nn.Parameter],
                   groups: Iterable[dict[str, Any]] | None, optimizer: str,
                   keywords: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups that attach() trains, each with its optimizer and all the constants of that one.
    Without `groups` there is one, of all parameters in `named`. `keywords` are attach()'s
    constants, None where it was given none. UserError for what cannot be trained."""
    if groups is None:
        if not any(p.requires_grad for p in named.values()):
            raise UserError("there is nothing to train: " + (
                f"none of the model's {len(named)} parameters requires a gradient; call "
                "requires_grad_(True) on those to train" if named else
                "the model has no parameters"))
        groups = [{"params": list(named.values())}]
    listed = [groups] if isinstance(groups, dict) else groups
    if isinstance(listed, (str, torch.Tensor)) or not isinstance(listed, Iterable):
        raise UserError("groups must be a list of dicts with 'params', as torch.optim takes them, "
                        f"got {described(groups)}")
    resolved = [resolve_group(group, optimizer, keywords) for group in listed]
    if not resolved:
        raise UserError("there is nothing to train: groups is empty")
    require_disjoint(resolved, named)
    return resolved


def resolve_group(group: dict[str, Any], optimizer: str,
                  keywords: dict[str, Any]) -> dict[str, Any]:
    """A copy of `group` with every constant of its optimizer: from the group itself, else from
    `keywords`, else the default. Its optimizer is `optimizer` unless it names another one, and its
    "params" become a list of tensors."""
    if not isinstance(group, dict):
        raise UserError(f"a group must be a dict with 'params', got {described(group)}")
    optimizer = kind_of(optimizer)
    kind = kind_of(group.get("optimizer", optimizer))
    defaults = group_defaults(kind)
    out = {"optimizer": kind, **defaults}
    given = {name: value for name, value in keywords.items() if value is not None}
    for name, value in {**given, **group}.items():
        # What the keywords say is for the groups whose optimizer has such a thing.
        if name not in defaults and name not in ("params", "optimizer", "name") and (
                name in group or kind == optimizer):
            raise no_such_constant(kind, name, defaults)
        if name in defaults or name in ("params", "name"):
            out[name] = value
    params = out.get("params", [])
    if not isinstance(params, Iterable):
        raise UserError(f"the 'params' of a group must be tensors, got {described(params)}")
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    # torch.optim takes named_parameters(), too.
    out["params"] = [tensor_of(item[1] if isinstance(item, tuple) and len(item) == 2 else item,
                               "a group", "tensors as 'params'") for item in listed]
    if not out["params"]:
        raise UserError("there is nothing to train in a group: its 'params' are empty")
    return out


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
