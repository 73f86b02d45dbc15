# SPDX-License-Identifier: Apache-2.0
"""What a plain loop gives: all ranks of a program in one process, on plain tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any

import arithmetic
import numpy as np
import torch
from arithmetic import Floats, floats, in_memory_order
from torch import nn

Outcome = dict[int, bool]


class Groups(torch.optim.Optimizer):
    """`param_groups` for schedulers; the step is the reference's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError


class State:
    """A trained parameter of the model, the same on all ranks."""

    def __init__(self, name: str, replicas: list[nn.Parameter], index: int,
                 config: dict[str, Any]) -> None:
        self.name = name
        self.replicas = replicas
        first = replicas[0]
        self.dtype = first.dtype
        seed = arithmetic.mix(arithmetic.mix(config.get("seed", 0)) ^ index)
        self.rule = arithmetic.Rule(first.numel(), config.get("moments") == "bf16", seed)
        self.master: Floats | None = None
        self.before = in_memory_order(first.detach()).clone()
        self.sum: torch.Tensor | None = None  # in the accumulator's type, in order of the indices
        fp32 = config.get("gradient_dtype") == "fp32"
        self.sum_dtype = torch.float32 if fp32 else first.dtype

    def add(self, grads: list[torch.Tensor | None], scale: float) -> None:
        """A micro-batch's gradients of all ranks."""
        total: torch.Tensor | None = None
        for grad in grads:
            if grad is not None:
                total = grad.float() if total is None else total + grad.float()
        if total is None:
            return
        if scale != 1:
            total = total * torch.tensor(scale, dtype=torch.float32)
        if self.sum is not None:
            total = self.sum.float() + total
        self.sum = total.to(self.sum_dtype)

    def follow(self) -> None:
        """Elements that user code has changed set their masters."""
        now = in_memory_order(self.replicas[0].detach())
        if self.master is not None and self.dtype != torch.float32:
            bits = torch.int16
            changed = (now.contiguous().view(bits) != self.before.view(bits)).numpy()
            self.master = np.where(changed, floats(now), self.master)
        self.before = now.clone()

    def update(self, group: dict[str, Any], factor: float) -> None:
        assert self.sum is not None
        parameter = self.replicas[0]
        order = sorted(range(parameter.dim()), key=lambda d: -parameter.stride(d))
        flat = in_memory_order(parameter.detach())
        if self.master is None or self.dtype == torch.float32:
            self.master = floats(flat)
        grad = floats(self.sum.permute(order).reshape(-1))
        self.master = self.rule.step(group, factor, self.master, grad)
        fresh = torch.from_numpy(self.master.copy()).to(self.dtype)
        self.before = fresh.clone()
        for replica in self.replicas:
            with torch.no_grad():
                there = replica.permute(order)
                there.copy_(fresh.view(there.shape))


class Member:
    """One rank of the plain loop: what a session needs of a trainer."""

    paged = False

    def __init__(self, together: Reference, rank: int) -> None:
        self.together = together
        self.rank = rank
        self.rounds: list[dict[str, torch.Tensor]] = []
        self.optimizer: Any = None
        self.named: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.trained: list[str] = []

    # What happened to the engine's calls that may be refused.
    def attempt(self, number: int, action: Callable[[], Any], may_refuse: bool) -> bool:
        if self.together.refused[self.rank].get(number, False):
            return False
        action()
        return True

    def was_refused(self, number: int) -> bool:
        return self.together.refused[self.rank].get(number, False)

    def make(self, build: Callable[[], nn.Module]) -> nn.Module:
        return build()

    def attach(self, model: nn.Module, groups: list[dict[str, Any]]) -> None:
        self.named = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.optimizer = Groups(groups, {})
        self.trained = []
        given = {id(p) for group in groups for p in group["params"]}
        self.trained = [name for name, p in self.named.items() if id(p) in given]
        self.rounds = []

    def backward(self, loss: torch.Tensor, how: str, last: bool | None, retain: bool) -> None:
        scale = self.together.scale
        plain = how == "plain" or retain
        try:
            (loss if scale == 1 else loss * scale).backward(retain_graph=retain)
        finally:
            found = {}
            for name in self.trained:
                parameter = self.named[name]
                if parameter.grad is not None:
                    found[name] = parameter.grad
                    parameter.grad = None
            # The engine does not see a plain pass that reaches none of its parameters.
            if found or not plain:
                self.rounds.append(found)

    def put_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """What user code has put into p.grad."""
        self.rounds.append(gradients)

    @contextlib.contextmanager
    def pin(self, what: Any) -> Generator[None]:
        yield

    def activations(self, place: str, least: int) -> Any:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass


class Reference:
    """All ranks together."""

    def __init__(self, config: dict[str, Any], ranks: int, refused: list[Outcome]) -> None:
        self.config = config
        self.refused = refused
        self.members = [Member(self, rank) for rank in range(ranks)]
        self.states: dict[str, State] = {}
        self.pages: list[tuple[int, list[str]]] = []  # elements, parameters
        self.layouts: dict[str, tuple[Any, Any, int]] = {}
        scale = config.get("loss_scale", "none")
        self.scales = scale != "none"
        self.dynamic = scale == "dynamic"
        self.scale = (config.get("loss_scale_initial", 65536.0) if self.dynamic
                      else float(scale) if self.scales else 1.0)
        self.good = 0
        self.steps = 0

    def attach(self) -> None:
        first = self.members[0]
        self.take_values(first)
        self.states, self.pages, self.layouts = {}, [], {}
        pages: dict[int, int] = {}
        for index, (name, parameter) in enumerate(first.named.items()):
            if name not in first.trained:
                continue
            replicas = [member.named[name] for member in self.members]
            self.states[name] = State(name, replicas, index, self.config)
            self.layouts[name] = (parameter.shape, parameter.stride(), parameter.storage_offset())
            storage = parameter.untyped_storage()
            if storage._cdata not in pages:
                pages[storage._cdata] = len(self.pages)
                self.pages.append((storage.nbytes() // parameter.element_size(), []))
            self.pages[pages[storage._cdata]][1].append(name)

    def take_values(self, first: Member) -> None:
        """Training starts from rank 0's parameters and buffers."""
        with torch.no_grad():
            for member in self.members[1:]:
                for mine, theirs in ((member.named, first.named), (member.buffers, first.buffers)):
                    for name, value in mine.items():
                        value.copy_(theirs[name])

    def sum_rounds(self) -> None:
        """Micro-batch after micro-batch, rank after rank."""
        scale = 1.0
        if self.config.get("reduction", "mean") == "mean":
            scale = float(np.float32(1) / np.float32(len(self.members)))
        for number in range(max(len(member.rounds) for member in self.members)):
            for name, state in self.states.items():
                state.add([member.rounds[number].get(name) if number < len(member.rounds) else None
                           for member in self.members], scale)
        for member in self.members:
            member.rounds = []

    def norm(self) -> float:
        total = 0.0
        for elements, names in self.pages:
            filled = [name for name in names if self.states[name].sum is not None]
            if not filled:
                continue
            flat = torch.zeros(elements)
            for name in filled:
                there = self.states[name].sum
                assert there is not None
                flat.as_strided(*self.layouts[name]).copy_(there)
            total += arithmetic.norm_of_blocks(flat.numpy())
        return math.sqrt(total) / self.scale

    def group_of(self, name: str) -> dict[str, Any]:
        first = self.members[0]
        group: dict[str, Any] = next(
            group for group in first.optimizer.param_groups
            if any(p is first.named[name] for p in group["params"]))
        return group

    def step(self) -> tuple[int, bool, float | None, float]:
        """What the engine's report says."""
        self.sum_rounds()
        for state in self.states.values():
            state.follow()
        filled = [state for state in self.states.values() if state.sum is not None]
        clip = self.config.get("clip", 0)
        norm: float | None = None
        factor = 1 / self.scale
        finite = True
        if clip > 0 or self.scales:
            norm = self.norm()
            finite = math.isfinite(norm)
            if clip > 0 and finite and clip / (norm + 1e-6) < 1:
                factor *= clip / (norm + 1e-6)
        skips = self.scales and not finite
        if self.scales and filled:
            self.follow_scale(finite)
        if not skips:
            self.steps += 1 if filled else 0
            for state in filled:
                state.update(self.group_of(state.name), factor)
        for state in filled:
            state.sum = None
        return self.steps, skips, norm, self.scale

    def follow_scale(self, finite: bool) -> None:
        if not finite:
            self.good = 0
            if self.dynamic and self.scale * 0.5 >= self.config.get("loss_scale_minimum", 1.0):
                self.scale *= 0.5
            return
        self.good += 1
        if self.good >= self.config.get("loss_scale_window", 2000) and self.dynamic:
            self.good = 0
            self.scale *= 2

    def zero_grad(self) -> None:
        self.sum_rounds()
        for state in self.states.values():
            state.sum = None

    def grad(self, name: str) -> torch.Tensor:
        self.sum_rounds()
        state = self.states[name]
        if state.sum is None:
            return torch.zeros(state.replicas[0].shape)
        return state.sum.float() / self.scale
