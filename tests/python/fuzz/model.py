# SPDX-License-Identifier: Apache-2.0
"""A random model: tokens in, some layers, a head; which layers run is said at each call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import oddities  # noqa: F401  registers its layers
import torch
from layers import KINDS, Layer
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class UsersOwn(Exception):
    """What the user's own code raises in the middle of a pass."""


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UsersOwn("in backward")


class Model(nn.Module):
    """Made from a program's `model`: {"width", "vocabulary", "tied", "dtype", "layers": [...]}."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width = spec["width"]
        self.seen: list[torch.Tensor] = []  # by hooks
        self.dtype = getattr(torch, spec["dtype"])
        self.specs = spec["layers"]
        self.tokens = nn.Embedding(spec["vocabulary"], width, dtype=self.dtype)
        self.layers = nn.ModuleList(self._make(one, width) for one in self.specs)
        self.head = nn.Linear(width, spec["vocabulary"], bias=False, dtype=self.dtype)
        if spec["tied"]:
            self.head.weight = self.tokens.weight
        for module in self.layers:
            if isinstance(module, oddities.Borrower):
                others = [one for one in [*self.layers, self.head] if one is not module]
                module.other = weakref.ref(others[module.of % len(others)])
        for name, parameter in self.named_parameters():
            if parameter.is_floating_point() and any(
                    name.startswith(f"{start}.") for start in spec["frozen"]):
                parameter.requires_grad_(False)
        for hook in spec["hooks"]:
            self._hook(**hook)

    def _hook(self, how: str, on: int) -> None:
        """One of the user's own, set before attach()."""
        if how == "gradient":  # on a parameter: what it gives is what is accumulated
            trained = [p for p in self.parameters() if p.requires_grad]
            trained[on % len(trained)].register_hook(lambda grad: grad * 0.5)
        elif how == "accumulated":
            trained = [p for p in self.parameters() if p.requires_grad]
            trained[on % len(trained)].register_post_accumulate_grad_hook(self._halve)
        elif len(self.layers) > 0:
            layer = self.layers[on % len(self.layers)]
            watched = next((p for p in layer.parameters() if p.numel() > 0), None)
            if watched is None:
                return
            if how == "forward":
                layer.register_forward_hook(
                    lambda *_: self.seen.append(watched.detach().float().norm()))
            else:  # reads a weight when its gradient may have come
                layer.register_full_backward_hook(
                    lambda *_: self.seen.append(watched.detach().float().norm()))

    @staticmethod
    def _halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def _make(self, spec: dict[str, Any], width: int) -> Layer:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, spec["dtype"]))
        try:
            return KINDS[spec["kind"]](width, **spec["options"])
        finally:
            torch.set_default_dtype(before)

    def together(self) -> list[list[nn.Parameter]]:
        """Parameters that one operator may take at once."""
        groups = [[self.tokens.weight], [self.head.weight]]
        for module in self.layers:
            assert isinstance(module, Layer)
            groups += [group for group in module.together() if group]
        return groups

    def run_layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        spec, module = self.specs[number], self.layers[number]
        dtype = getattr(torch, spec["dtype"])
        how = spec["checkpoint"]

        def call(value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module(value.to(dtype)).to(value.dtype)
            return out

        if how is not None and self.training and torch.is_grad_enabled():
            y = checkpoint(call, x, use_reentrant=how == "reentrant")
        else:
            y = call(x)
        assert isinstance(y, torch.Tensor)
        return x + torch.tanh(y)

    def hidden(self, ids: torch.Tensor, skip: Sequence[int] = (), repeat: Sequence[int] = (),
               leave_at: int | None = None, fail_at: int | None = None,
               fail_backward_at: int | None = None) -> torch.Tensor:
        x: torch.Tensor = self.tokens(ids)
        for number in range(len(self.layers)):
            if number == leave_at:
                break
            if number == fail_at:
                raise UsersOwn("in forward")
            if number == fail_backward_at:
                x = Failing.apply(x)
            if number in skip:
                continue
            for _ in range(2 if number in repeat else 1):
                x = self.run_layer(number, x)
        return x

    def forward(self, ids: torch.Tensor, **control: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(ids, **control))
        return out

    def losses(self, ids: torch.Tensor, kind: str, **control: Any) -> list[torch.Tensor]:
        """One loss; of "two", two that share a graph."""
        if kind == "penalty":
            x = self.hidden(ids, **control)
            if not x.requires_grad:
                return [self.head(x).float().square().mean()]
            y = x.float().square().mean()
            grad, = torch.autograd.grad(y, x, create_graph=True)
            return [y + grad.float().square().sum() + self.head(x).float().square().mean()]
        if kind == "hidden":  # the head is not used
            return [self.hidden(ids, **control).float().square().mean()]
        logits = self(ids, **control).float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.roll(1, 1).reshape(-1))
        if kind == "two":
            return [loss, logits.square().mean() * 0.1]
        return [loss]


def autocast(on: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()
