# SPDX-License-Identifier: Apache-2.0
"""Backward passes that fail: gradients that have come stay, as with torch, until zero_grad()."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_net import (WIDTH, Mine, Mistake, Net, check_goes_on, failing_loss, loss_of, make_engine,
                         micro_batch, net, plain_micro_batch)

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait


def an_error_in_backward(engine: pagoda.Engine, model: Net) -> None:
    loss = failing_loss(model)
    try:
        engine.backward(loss)
    finally:
        engine.zero_grad()


def an_error_in_plain_backward(engine: pagoda.Engine, model: Net) -> None:
    loss = failing_loss(model)
    try:
        loss.backward()
    finally:
        engine.zero_grad()


def a_hook_in_backward(engine: pagoda.Engine, model: Net) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise Mine

    loss = loss_of(model)
    handle = model.layers[1].weight.register_hook(hook)
    try:
        engine.backward(loss)
    finally:
        handle.remove()
        engine.zero_grad()


def an_interrupt_in_backward(engine: pagoda.Engine, model: Net) -> None:
    def hook(module: torch.nn.Module, given: Any, gradient: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    loss = loss_of(model)
    handle = model.layers[1].register_full_backward_hook(hook)
    try:
        engine.backward(loss_of(model))
    finally:
        handle.remove()
        engine.zero_grad()
        del loss


def a_hook_that_unpacks(engine: pagoda.Engine, model: Net) -> None:
    def unpack(packed: torch.Tensor) -> torch.Tensor:
        raise Mine

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = loss_of(model)
    try:
        engine.backward(loss)
    finally:
        engine.zero_grad()


def a_backward_twice(engine: pagoda.Engine, model: Net) -> None:
    loss = loss_of(model)
    engine.backward(loss)
    try:
        engine.backward(loss)
    finally:
        engine.zero_grad()


def another_storage(engine: pagoda.Engine, model: Net) -> None:
    weight = model.layers[0].weight
    before = weight.detach().clone()
    weight.data = torch.zeros_like(torch.cat([before, before]))[:WIDTH]  # a part of a larger one
    try:
        engine.backward(loss_of(model))
    finally:
        engine.zero_grad()
        weight.data = before


def another_type(engine: pagoda.Engine, model: Net) -> None:
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    model.double()
    x = torch.ones(4, WIDTH, dtype=torch.float64, requires_grad=True)
    try:
        engine.backward(model(x).sum())
    finally:
        engine.zero_grad()
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value


IN_BACKWARD: dict[Mistake, tuple[type[BaseException], str | None]] = {
    an_error_in_backward: (Mine, None),
    an_error_in_plain_backward: (Mine, None),
    a_hook_in_backward: (Mine, None),
    an_interrupt_in_backward: (KeyboardInterrupt, None),
    a_hook_that_unpacks: (Mine, None),
    a_backward_twice: (RuntimeError, "second time"),
    another_storage: (RuntimeError, "another size, type or device"),
    another_type: (RuntimeError, "another size, type or device"),
}


@pytest.mark.parametrize(("batch", "reentrant"), [(micro_batch, True), (plain_micro_batch, False),
                                                  (plain_micro_batch, True)])
@pytest.mark.parametrize("mistake", IN_BACKWARD)
def test_in_backward(mistake: Mistake, batch: Any, reentrant: bool, tmp_path: Path) -> None:
    # With few bits it shows where a gradient came in parts.
    check_goes_on({"early_updates": False, "device_budget": "40KiB", "gradient_dtype": "fp32"},
                  tmp_path, mistake, IN_BACKWARD[mistake], batch, reentrant, torch.bfloat16)


@pytest.mark.parametrize("plain", [False, True])
def test_gradients_of_a_failed_pass_stay_as_with_torch(plain: bool) -> None:
    def run(backward: Callable[[torch.Tensor], None], model: Net) -> None:
        loss = failing_loss(model)
        with pytest.raises(Mine):
            backward(loss)
        backward(loss_of(model, 1))

    for reentrant in (False, True):
        engine, model, other = make_engine(early_updates=False), net(), net()
        model.reentrant = other.reentrant = reentrant
        engine.attach(model)
        run(lambda loss: loss.backward() if plain else engine.backward(loss), model)
        run(lambda loss: loss.backward(), other)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert theirs.grad is not None
            assert torch.allclose(engine.grad(mine), theirs.grad)
            assert mine.grad is None
        engine.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plain", [(True, False, False), (True, True, True), (False, True, False),
                                   (False, False, True)])
def test_failed_passes_are_micro_batches_of_their_own(plain: tuple[bool, ...],
                                                      reentrant: bool) -> None:
    """Whoever began them: torch does not add the next gradient to what they have left."""
    engine = make_engine(early_updates=False, gradient_dtype="fp32", accumulation=8)
    model, other = net(torch.bfloat16), net(torch.bfloat16)
    model.reentrant = other.reentrant = reentrant
    engine.attach(model)
    sums: dict[str, torch.Tensor] = {}
    for number, by_torch in enumerate((*plain, False, True)):
        fails = number < len(plain)
        for one in (model, other):
            loss = failing_loss(one, number) if fails else loss_of(one, number)
            with pytest.raises(Mine) if fails else contextlib.nullcontext():
                loss.backward() if by_torch or one is other else engine.backward(loss)
        for name, parameter in other.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()
                parameter.grad = None
    for name, parameter in model.named_parameters():
        assert torch.equal(engine.grad(parameter), sums[name]), name
    engine.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_step_after_a_failed_pass_takes_what_has_come(reentrant: bool) -> None:
    """Early updates or not: the same step, and zero_grad() drops the same or raises before it does."""
    runs = []
    for early in (False, True):
        engine, model = make_engine(early_updates=early), net()
        model.reentrant = reentrant
        engine.attach(model, lr=1e-2)
        for step in range(5):
            if step == 3:
                with pytest.raises(Mine):
                    engine.backward(failing_loss(model, step))
                if early:
                    with pytest.raises(pagoda.UserError, match="early_updates"):
                        engine.zero_grad()
            else:
                micro_batch(engine, model, step)
            engine.step()
        engine.release(model)
        engine.close()
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *runs))


# Passes that fail before a gradient came: nothing has begun, so the step may still be changed.


def a_graph_without_its_buffers(engine: pagoda.Engine, model: Net) -> None:
    loss = loss_of(model)
    torch.autograd.grad(loss, list(model.parameters()))
    engine.backward(loss)


def a_hook_of_the_output(engine: pagoda.Engine, model: Net) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise Mine

    out = model(torch.ones(2, WIDTH))
    out.register_hook(hook)
    engine.backward(out.sum())


def a_scaled_loss(engine: pagoda.Engine, model: Net) -> None:
    engine.backward(torch.amp.GradScaler("cpu").scale(loss_of(model)))


WITHOUT_A_GRADIENT: dict[Mistake, tuple[type[BaseException], str | None]] = {
    a_graph_without_its_buffers: (RuntimeError, "second time"),
    a_hook_of_the_output: (Mine, None),
    a_scaled_loss: (pagoda.UserError, "GradScaler"),
}


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mistake", WITHOUT_A_GRADIENT)
def test_a_pass_without_a_gradient_is_as_if_it_had_not_been(mistake: Mistake, accumulation: int,
                                                            changes: bool) -> None:
    """In the first step, which would learn a habit, and in later ones."""
    error, match = WITHOUT_A_GRADIENT[mistake]
    runs = []
    for wrong in (False, True):
        engine, model = make_engine(accumulation=accumulation), net()
        engine.attach(model, lr=1e-2)

        def fails(wrong: bool = wrong, engine: pagoda.Engine = engine, model: Net = model) -> None:
            for _ in range(2 if wrong else 0):
                with pytest.raises(error, match=match):
                    mistake(engine, model)

        for step in range(4):
            for number in range(accumulation - 1):  # these stay
                micro_batch(engine, model, 10 * step + number)
            fails()
            if changes and step > 1:
                for group in engine.optimizer.param_groups:
                    group["lr"] /= 2
                engine.zero_grad()
                for number in range(accumulation - 1):
                    micro_batch(engine, model, 10 * step + 5 + number)
                fails()
            micro_batch(engine, model, 10 * step + 9)
            engine.step()
        assert engine.stats()["updates"]["early"] > 0
        engine.release(model)
        engine.close()
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_a_gradient_set_in_a_pass_that_fails_is_dropped() -> None:
    """The parameter's own gradient has been taken, and its update may have begun."""
    runs = []
    for sets in (False, True):
        engine, model = make_engine(), net()
        engine.attach(model, lr=1e-2)
        weight = model.layers[5].weight

        def hook(gradient: torch.Tensor, weight: Any = weight, sets: bool = sets) -> None:
            assert weight.grad is None
            if sets:
                weight.grad = torch.ones_like(weight)

        for step in range(4):
            if step == 2:
                handle = model.layers[4].weight.register_hook(hook)
                with pytest.raises(Mine):
                    engine.backward(failing_loss(model, step))
                handle.remove()
                assert weight.grad is None
            else:
                micro_batch(engine, model, step)
            engine.step()
        engine.release(model)
        engine.close()
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *runs))
