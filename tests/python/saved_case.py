# SPDX-License-Identifier: Apache-2.0
"""How a case of test_saved_tensors.py is made: a program for saved_trial.py, under a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from saved_trial import Program, Trial
from torch import nn


CASES: dict[str, Program] = {}

Forward = Callable[..., torch.Tensor]


def case(program: Program) -> Program:
    CASES[program.__name__] = program
    return program


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def run(trial: Trial, forward: Forward, *leaves: torch.Tensor) -> None:
    """Forward and backward; records the gradients of the leaves."""
    with trial.forward():
        loss = _real(forward(*leaves)).float().square().sum()
    trial.tick()
    loss.backward()
    trial.record(*(leaf.grad for leaf in leaves))


def function(name: str, forward: Forward, *shapes: tuple[int, ...],
             dtype: torch.dtype = torch.float32) -> None:
    """A case of one function of tensors."""

    def program(trial: Trial) -> None:
        run(trial, forward, *(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes))

    CASES[name] = program


def complex_function(name: str, forward: Forward, *shapes: tuple[int, ...]) -> None:
    def program(trial: Trial) -> None:
        run(trial, forward, *(torch.randn(shape, dtype=torch.complex64).requires_grad_()
                               for shape in shapes))

    CASES[name] = program


def module(name: str, make: Callable[[], nn.Module], forward: Callable[..., Any],
           *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """A case of a module whose parameters are no pages: what they are saved as stays."""

    def program(trial: Trial) -> None:
        made = make().to(dtype)
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        run(trial, lambda *_: forward(made, *inputs), *inputs, *made.parameters())

    CASES[name] = program
