# SPDX-License-Identifier: Apache-2.0
"""Thawing takes memory when it happens. Where there is none, or a parameter cannot be trained, step()
says so and goes on without it."""

from __future__ import annotations

import warnings
from typing import Any

import parity
import pytest
import torch
from small_stack import LAYER, LAYERS, WIDTH, engine, loss_of, stack
from thawing import assert_same, freeze, state_bytes, thaw, trained, trained_plainly

import pagoda


# Memory.


def test_memory_is_taken_at_the_thaw() -> None:
    paged = engine()
    model = stack()
    freeze(model, *range(LAYERS - 1))
    paged.attach(model)
    assert state_bytes(paged) == pytest.approx(3 * LAYER, rel=0.05)  # a gradient and two moments
    trained(paged, model, lambda m, step: None, 2)
    assert state_bytes(paged) == pytest.approx(3 * LAYER, rel=0.05)
    thaw(model, 0, 1)
    trained(paged, model, lambda m, step: None, 1)
    assert state_bytes(paged) == pytest.approx(9 * LAYER, rel=0.05)
    freeze(model, 0)
    trained(paged, model, lambda m, step: None, 1)
    assert state_bytes(paged) == pytest.approx(9 * LAYER, rel=0.05)


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_without_room_step_says_so_and_the_engine_goes_on(plainly: bool, early: bool) -> None:
    def held(**more: Any) -> tuple[pagoda.Engine, torch.nn.Sequential]:
        paged = engine(early_updates=early, **more)
        model = stack()
        freeze(model, 0, 1, 2, 3)
        paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
        return paged, model

    def backward(paged: pagoda.Engine, model: torch.nn.Module, step: int) -> None:
        if plainly:
            loss_of(model, step).backward()
        else:
            paged.backward(loss_of(model, step))

    roomy, other = held()
    used = roomy.stats()["tiers"]["host"]["used"]
    paged, model = held(host_budget=used + int(1.2 * 3 * LAYER))
    for step in range(9):
        layers = {2: (0, 1), 5: (2,)}.get(step, ())
        thaw(model, *layers)
        backward(paged, model, step)
        if step == 2:
            with pytest.raises(pagoda.UserError, match=(
                    r"parameters '0.weight', '0.bias', '1.weight', '1.bias' were thawed and cannot "
                    r"be trained: gradients and optimizer states do not fit: .*raise host_budget to "
                    r"at least .*step\(\) again goes on without them")):
                paged.step()
            assert state_bytes(paged) == state_bytes(roomy)
            said = "'0.weight' is frozen" if plainly or not early else "between the last backward"
            with pytest.raises(pagoda.UserError, match=said):
                paged.grad(model[0].weight)
        if step == 3:  # still thawed, and still no room
            with pytest.raises(pagoda.UserError, match="do not fit"):
                paged.step()
            freeze(model, 0, 1)
        paged.step()
        if step == 5:
            thaw(other, 2)
        backward(roomy, other, step)
        roomy.step()
    assert_same(parity.values(other), parity.values(model))
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_forgets_what_had_no_room() -> None:
    paged = engine(early_updates=False)
    model = stack()
    freeze(model, 0, 1, 2)
    paged.attach(model)
    used = paged.stats()["tiers"]["host"]["used"]
    paged.close()
    paged = engine(early_updates=False, host_budget=used + LAYER)
    model = stack()
    freeze(model, 0, 1, 2)
    paged.attach(model)
    thaw(model, 0, 1, 2)
    paged.backward(loss_of(model))
    paged.zero_grad()
    freeze(model, 0, 1, 2)
    paged.backward(loss_of(model))
    paged.step()


def test_a_gradient_larger_than_its_staging_is_trained() -> None:
    paged = engine(device_budget="256KiB", gradient_staging="24KiB")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, 8))
    model[0].weight.requires_grad_(False)  # of 32 KiB
    paged.attach(model)
    x = torch.ones(1, WIDTH)
    paged.backward(model(x).sum())
    paged.step()
    before = model[0].weight.detach().clone()
    model[0].weight.requires_grad_(True)
    paged.backward(model(x).sum())
    paged.step()
    assert not torch.equal(model[0].weight, before)


# What cannot be trained, and what nobody was given.


def test_what_cannot_be_trained_is_refused_when_it_is_thawed() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.precise = torch.nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
            self.whole = torch.nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
            self.part = torch.nn.Parameter(self.linear.weight.detach()[1], requires_grad=False)
            self.wide = torch.nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
            self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x) + self.whole + self.part + self.wide + self.frozen
            return (y * self.precise).float().sum()

    paged = engine()
    model = Odd()
    paged.attach(model, optimizer="sgd", lr=1.0)
    x = torch.ones(1, 4)
    for name, why in (("precise", "is float64"), ("part", "share elements"),
                      ("wide", "share one place")):
        parameter = model.get_parameter(name)
        parameter.requires_grad_(True)
        model.frozen.requires_grad_(True)
        before = model.frozen.detach().clone()
        paged.backward(model(x))
        with pytest.raises(pagoda.UserError,
                           match=f"parameter '{name}' was thawed and cannot be trained: .*{why}"):
            paged.step()
        assert parameter.grad is None
        paged.step()  # the others train
        assert torch.equal(model.frozen, before - 1)
        parameter.requires_grad_(False)
    paged.backward(model(x))
    paged.step()


def test_a_parameter_that_came_later_is_not_trained_and_that_is_said_once() -> None:
    paged = engine()
    model = stack()
    paged.attach(model)
    trained(paged, model, lambda m, step: None, 1)
    adapter = torch.nn.Linear(WIDTH, WIDTH)
    model.append(adapter)
    model[0].register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    before = adapter.weight.detach().clone()
    paged.backward(loss_of(model))
    with pytest.warns(UserWarning, match=r"does not train '6.weight', '6.bias': added after attach"):
        paged.step()
    assert torch.equal(adapter.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged.backward(loss_of(model))
        paged.step()
    paged.release(model)
    paged.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.zero_grad()
        trained(paged, model, lambda m, step: None, 1)
    assert not torch.equal(adapter.weight, before)


def test_parameters_in_no_group_are_not_trained_and_that_is_said_once() -> None:
    paged = engine()
    model = stack()
    paged.attach(model, groups=[{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    before = model[2].weight.detach().clone()
    paged.backward(loss_of(model))
    with pytest.warns(UserWarning, match=(
            r"does not train '2.weight', '2.bias', .* and 3 others: .*in none of its groups.*"
            r"requires_grad_\(False\)")):
        paged.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(paged, model, lambda m, step: None, 2)
    assert torch.equal(model[2].weight, before)


def test_frozen_parameters_in_no_group_need_no_warning() -> None:
    paged = engine()
    model = stack()
    freeze(model, *range(1, LAYERS))
    paged.attach(model, groups=[{"params": model[0].parameters()}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(paged, model, lambda m, step: None, 2)


def test_all_frozen_in_groups_until_they_are_thawed() -> None:
    paged = engine()
    model = stack().requires_grad_(False)
    paged.attach(model, groups=[{"params": model.parameters()}], lr=parity.LR,
                 weight_decay=parity.DECAY)
    model.requires_grad_(True)
    expected = trained_plainly(stack(), lambda m, step: None, 3)
    assert_same(expected, trained(paged, model, lambda m, step: None, 3))
