# SPDX-License-Identifier: Apache-2.0
"""Saved tensors with aliases that have version counters of their own."""

from __future__ import annotations


import torch
from saved_case import case, run
from saved_trial import Trial


@case
def issue_example(trial: Trial) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 1).unsafe_chunk(2)
        a = a.sigmoid_()
        trial.tick()
        return a * b.sigmoid_()

    run(trial, forward, torch.randn(64, 4, requires_grad=True))


@case
def data_written_after_it_was_saved(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        z = y.sin()
        trial.tick()
        y.data.mul_(3)  # autograd reads what is there in backward
        del y
        trial.tick()
        loss = z.sum()
    loss.backward()
    trial.record(x.grad)


@case
def data_written_between_two_backwards(trial: Trial) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = x * 2
        loss = y.sin().sum()
    trial.record(*torch.autograd.grad(loss, x, retain_graph=True))
    trial.tick()
    y.data.mul_(3)
    del y
    trial.tick()
    trial.record(*torch.autograd.grad(loss, x))


@case
def numpy_memory(trial: Trial) -> None:
    import numpy

    array = numpy.random.default_rng(0).standard_normal((8, 8)).astype(numpy.float32)
    w = torch.randn(8, 8, requires_grad=True)
    with trial.forward():
        y = torch.from_numpy(array) @ w
    trial.tick()
    array *= 2
    trial.tick()
    y.sum().backward()
    trial.record(w.grad)


@case
def shared_and_resized_storages(trial: Trial) -> None:
    w = torch.randn(8, 8, requires_grad=True)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with trial.forward():
        out = x @ w + y @ w
    x.share_memory_()
    y.untyped_storage().resize_(1024)
    trial.tick()
    del x, y
    trial.tick()
    out.sum().backward()
    trial.record(w.grad)


@case
def freed_and_filled_again(trial: Trial) -> None:
    """As FSDP does with gathered parameters: the bytes are gone between forward and backward."""
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8)
    values = w.clone()
    with trial.forward():
        y = (x @ w).sum()
    trial.tick()
    w.untyped_storage().resize_(0)
    trial.tick()
    w.untyped_storage().resize_(values.nbytes)
    with torch.autograd._unsafe_preserve_version_counter(w):
        w.copy_(values)
    del w
    trial.tick()
    y.backward()
    trial.record(x.grad)


@case
def a_storage_saved_in_two_forwards(trial: Trial) -> None:
    x = torch.randn(16, 16, requires_grad=True)
    with trial.forward():
        h = (x * 2).tanh()
        first = h.sin()
    trial.tick()
    with trial.forward():
        second = h.exp() * first
    del h, first
    trial.tick()
    second.sum().backward()
    trial.record(x.grad)
