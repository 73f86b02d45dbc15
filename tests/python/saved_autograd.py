# SPDX-License-Identifier: Apache-2.0
"""Saved tensors and what autograd does around them: double backward, checkpoints, hooks, threads."""

from __future__ import annotations

import threading
from typing import Any

import torch
from saved_case import case, run
from saved_trial import Trial
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@case
def outputs_and_intermediates(trial: Trial) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            out, between = x.exp(), x * 2
            ctx.save_for_backward(x, out, between, between[1:])
            return out, between

        @staticmethod
        def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
            x, out, between, part = ctx.saved_tensors
            return first * out + second * between + x * part.sum()

    def forward(x: torch.Tensor) -> torch.Tensor:
        out, between = Exp.apply(x)
        return out * between

    run(trial, forward, torch.randn(8, 8, requires_grad=True))


@case
def double_backward(trial: Trial) -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = (F.layer_norm(x @ w, (8,)).tanh() * x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        loss = g.square().sum() + y
    trial.tick()
    loss.backward()
    trial.record(x.grad, w.grad)


@case
def double_backward_outside(trial: Trial) -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = ((x @ w).tanh() * x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    trial.tick()
    g.square().sum().backward()
    trial.record(x.grad, w.grad)


@case
def backward_thrice(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        for _ in range(4):
            y = y.sin() * y
    loss = y.sum()
    del y
    for last in (False, False, True):
        trial.tick()
        loss.backward(retain_graph=not last)
        trial.record(x.grad)
    trial.attempt(loss.backward)


@case
def parts_of_a_graph(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = (x * 2).tanh()
        z = (y * y.exp()).sin()
    trial.record(*torch.autograd.grad(z.sum(), y, retain_graph=True))
    trial.tick()
    trial.record(*torch.autograd.grad(y.sum(), x, retain_graph=True))
    trial.tick()
    trial.record(*torch.autograd.grad(z.sum(), x))


@case
def checkpoints(trial: Trial) -> None:
    made = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(4))
    x = torch.randn(3, 8, requires_grad=True)

    def forward(*_: torch.Tensor) -> torch.Tensor:
        h = x
        for number, cell in enumerate(made):
            h = checkpoint(cell, h, h.sin(), use_reentrant=number % 2 == 0).tanh_()
        return h

    run(trial, forward, x, *made.parameters())


@case
def forward_within_backward(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def again(gradient: torch.Tensor) -> torch.Tensor:
        with trial.forward(), torch.enable_grad():
            z = gradient.detach().requires_grad_()
            w = (z.sin() * z.exp()).sum()
        w.backward()
        assert z.grad is not None
        return gradient * z.grad.clamp(-1, 1)

    with trial.forward():
        y = x.tanh()
        y.register_hook(again)
        z = (y * y.sin()).sum()
    z.backward()
    trial.record(x.grad)


@case
def hooks_inside_and_outside(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t * 1), trial.forward():
        y = x.sin() * x.exp()
        with saved_tensors_hooks(lambda t: t.detach().double(), lambda t: t.float()):
            y = y.tanh() * y
        y = y.sigmoid() * y
    trial.tick()
    y.sum().backward()
    trial.record(x.grad)


@case
def other_threads(trial: Trial) -> None:
    """Forward on two threads, backward on a third."""
    x = torch.randn(16, 16, requires_grad=True)
    out: list[torch.Tensor | None] = [None, None]

    def forward(at: int) -> None:
        with trial.forward():
            a, b = (x * (at + 1)).unsafe_chunk(2)
            out[at] = a.sigmoid_() * b.tanh_() * x[:8].exp()

    threads = [threading.Thread(target=forward, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = (out[0] * out[1]).sum()  # type: ignore[operator]
    out.clear()
    trial.tick()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    trial.record(x.grad)


@case
def writes_that_autograd_catches(trial: Trial) -> None:
    """Of what is offloaded and of what stays, inputs and results, before and after a flush."""
    for size in (1, 64):
        for write in (lambda y, z: y.add_(1), lambda y, z: z.add_(1), lambda y, z: y.detach().zero_(),
                      lambda y, z: y[:1].mul_(2), lambda y, z: None):
            x = torch.randn(size, 8, requires_grad=True)
            with trial.forward():
                y = x * 2
                z = y.sin().exp()
            trial.tick()
            with torch.no_grad():
                write(y, z)
            del y
            trial.tick()
            trial.attempt(lambda z=z: z.sum().backward())  # type: ignore[misc]
            trial.record(x.grad)
    w = torch.randn(8, 8, requires_grad=True)  # a leaf, by its optimizer
    with trial.forward():
        y = torch.randn(8, 8, requires_grad=True) @ w
    with torch.no_grad():
        w.mul_(2)
    trial.attempt(lambda: y.sum().backward())
    trial.record(w.grad)


@case
def a_parameter_given_other_data(trial: Trial) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * w
    w.data = torch.ones(8, 8)  # autograd saved the leaf itself
    y.sum().backward()
    trial.record(x.grad, w.grad)
