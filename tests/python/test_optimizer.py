# SPDX-License-Identifier: Apache-2.0
"""Optimizers, parameter groups and schedulers: as torch.optim has them."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from small_stack import engine, loss_of, stack, steps

import pagoda


def test_schedulers_drive_the_engine() -> None:
    def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
        schedule = torch.optim.lr_scheduler
        return [schedule.SequentialLR(
            optimizer, [schedule.LinearLR(optimizer, 0.1, total_iters=2),
                        schedule.CosineAnnealingLR(optimizer, 4)], milestones=[2])]

    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    their_schedule = schedulers(theirs)
    paged = engine()
    model = stack()
    ours = paged.attach(model, optimizer="sgd", lr=0.1, momentum=0.9)
    our_schedule = schedulers(ours)
    for step in range(6):
        theirs.zero_grad()
        loss_of(plain, step).backward()
        theirs.step()
        paged.backward(loss_of(model, step))
        paged.step()
        for schedule in their_schedule + our_schedule:
            schedule.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for mine, other in zip(parity.values(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach())


def test_a_scheduler_that_cycles_betas_is_followed() -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
              paged: pagoda.Engine | None) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=5)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if paged is None:
                loss.backward()
            else:
                paged.backward(loss)
            optimizer.step()
            schedule.step()
        return list(parity.values(model).values())

    plain = stack()
    expected = train(plain, torch.optim.AdamW(plain.parameters()), None)
    paged = engine()
    model = stack()
    got = train(model, paged.attach(model), paged)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_groups_are_trained_each_in_its_way() -> None:
    paged = engine()
    model = stack()
    before = parity.values(model)
    optimizer = paged.attach(
        model, lr=0.1, weight_decay=0.1,
        groups=[{"params": model[0].weight, "lr": 0.0},
                {"params": [model[1].weight], "optimizer": "sgd", "momentum": 0.9}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.param_groups[1]["momentum"] == 0.9
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    steps(paged, model, 2)
    changed = [name for name, value in parity.values(model).items()
               if not torch.equal(value, before[name])]
    assert changed == ["1.weight"]


@pytest.mark.parametrize("constant", [("momentum", 0.9), ("amsgrad", True), ("nesterov", True)])
def test_a_constant_that_the_optimizer_has_not_is_refused(constant: tuple[str, Any]) -> None:
    """Written to its group, as torch.optim reads it there: it would change nothing."""
    name, value = constant
    paged = engine()
    model = stack()
    optimizer = paged.attach(model)
    with pytest.raises(pagoda.UserError, match=f"optimizer 'adamw' has no '{name}'"):
        optimizer.param_groups[0][name] = value
    with pytest.raises(pagoda.UserError, match=f"optimizer 'adamw' has no '{name}'"):
        optimizer.param_groups[0].update({name: value})
    optimizer.param_groups[0]["amsgrad"] = False  # says what is so
    optimizer.param_groups[0]["my_name"] = "decoder"
    steps(paged, model, 2)


def test_lion_and_adam_are_trained() -> None:
    for kind in ("lion", "adam"):
        paged = engine()
        model = stack()
        paged.attach(model, optimizer=kind)
        steps(paged, model, 2)
        paged.finish()
        assert paged.stats()["updates"]["pages"] == 2 * 12
        paged.close()


def test_plain_backward_and_the_optimizers_step_work_too() -> None:
    trained = []
    for familiar in (False, True):
        paged = engine()
        model = stack()
        optimizer = paged.attach(model)
        for step in range(3):
            if familiar:
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            else:
                paged.backward(loss_of(model, step))
                paged.step()
        trained.append(parity.values(model))
        paged.close()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
