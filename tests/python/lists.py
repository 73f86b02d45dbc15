# SPDX-License-Identifier: Apache-2.0
"""Every `_foreach_*` operator of torch, with arguments to call it with, and what it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def foreach_operators() -> list[str]:
    """Their names as the dispatcher has them: `_foreach_add.List`."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("aten::_foreach_")]
    # What writes to `out` is made of the same operator without.
    return sorted(name for name in names if not name.split(".")[-1].endswith("out"))


def overload(name: str) -> Any:
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


def arguments(name: str, first: list[torch.Tensor], second: list[torch.Tensor]) -> list[Any]:
    """The operator's first list is `first`, the others are `second`."""
    out: list[Any] = []
    lists = iter([first, second, second])
    for argument in overload(name)._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            out.append(next(lists))
        elif argument.has_default_value():
            break
        elif kind == "Tensor":
            scalars = torch.linspace(0.1, 0.9, len(first))
            out.append(scalars if argument.name == "scalars" else torch.tensor(0.75).to(first[0]))
        elif kind == "List[number]":
            out.append([0.25 + 0.125 * i for i in range(len(first))])
        else:
            assert kind == "number", f"{name}: {argument}"
            out.append(0.5)
    return out


def call(name: str, first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    """What it gives; where it works in place, what it leaves."""
    given = overload(name)(*arguments(name, first, second))
    return list(first) if given is None else list(given)


def weights(model: torch.nn.Sequential) -> list[torch.Tensor]:
    return [layer.weight for layer in model]


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (mine.dtype == theirs.dtype and mine.shape == theirs.shape
            and mine.stride() == theirs.stride()
            and torch.equal(*(one.detach().contiguous().view(-1).view(torch.uint8)
                              for one in (mine, theirs))))


Pair = tuple[torch.nn.Sequential, torch.nn.Sequential]


def check_foreach(name: str, mode: Callable[[], Any], paged: Pair, plain: Pair) -> None:
    """The operator on all parameters of two models has the bits that it has on plain ones."""
    with mode():
        for mine, theirs in zip(paged[0].parameters(), plain[0].parameters(), strict=True):
            mine.copy_(theirs)  # some of these operators work in place
        given, wanted = ([one.clone() for one in call(name, *(list(m.parameters()) for m in models))]
                         for models in (paged, plain))
    assert len(given) == len(list(plain[0].parameters()))
    assert all(map(same_bits, given, wanted))
