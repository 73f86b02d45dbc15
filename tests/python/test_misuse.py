# SPDX-License-Identifier: Apache-2.0
"""What a script may do wrong, call by call: each works or is an error that says what to do, at once
and before it has an effect; then the engine trains on. Nothing is ignored, nothing ends the process."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch

import pagoda

WIDTH = 16


def engine(**more: Any) -> pagoda.Engine:
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "host_budget": "64MiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1, **more})


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x) - x).square().mean()


def trains(paged: pagoda.Engine, model: torch.nn.Module, steps: int = 2) -> None:
    before = paged.stats()["steps"]
    for step in range(steps):
        paged.backward(loss_of(model, step))
        paged.step()
    assert paged.stats()["steps"] == before + steps


def raises(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(pagoda.UserError, match=match):
        call()


# Constants of an optimizer.

WRONG = [("lr", math.nan), ("lr", math.inf), ("lr", -1.0), ("lr", "much"), ("lr", None),
         ("eps", -1e-8), ("eps", math.nan), ("weight_decay", -0.1), ("weight_decay", math.nan),
         ("weight_decay", math.inf), ("betas", (1.0, 0.9)), ("betas", (0.9, -0.1)),
         ("betas", (math.nan, 0.9)), ("betas", 0.9), ("betas", (0.9,)), ("betas", "ab")]
WRONG_SGD = [("momentum", -0.9), ("momentum", math.nan), ("dampening", math.inf),
             ("nesterov", True)]


@pytest.mark.parametrize(("kind", "name", "value"),
                         [("adamw", *wrong) for wrong in WRONG if wrong[1] is not None]
                         + [("sgd", *wrong) for wrong in WRONG_SGD])
def test_attach_refuses_constants_that_cannot_train(kind: str, name: str, value: Any) -> None:
    paged, model = engine(), net()
    before = [p.data_ptr() for p in model.parameters()]
    raises(lambda: paged.attach(model, optimizer=kind, **{name: value}),
           "beta" if name == "betas" else name)
    raises(lambda: paged.attach(model, optimizer=kind, groups=[
        {"params": model[0].parameters()}, {"params": model[1].parameters(), name: value}]),
        "beta" if name == "betas" else name)
    assert [p.data_ptr() for p in model.parameters()] == before  # no page yet
    paged.attach(model)
    trains(paged, model)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_a_schedule_sets_is_checked_before_it_is_used(name: str, value: Any) -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.1)
    trains(paged, model)
    before = parity.values(model)
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    word = "beta" if name == "betas" else name
    raises(lambda: paged.backward(loss_of(model)), word)
    raises(paged.step, word)
    assert all(torch.equal(value, before[key]) for key, value in parity.values(model).items())
    optimizer.param_groups[0][name] = good
    trains(paged, model)


def test_a_schedule_below_zero_is_an_error() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)
    trains(paged, model, 1)
    schedule.step()
    trains(paged, model, 1)  # a rate of zero trains nothing, and may be asked for
    schedule.step()
    raises(lambda: paged.backward(loss_of(model)), "lr = -0.1 is not allowed")


def test_a_learning_rate_may_be_a_tensor() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=torch.tensor(0.1))  # type: ignore[arg-type]
    trains(paged, model)
    optimizer.param_groups[0]["lr"].fill_(math.nan)
    raises(paged.step, "lr = nan")


# What a step reports.


def test_the_norm_is_nan_where_it_is_and_none_where_none_was_taken() -> None:
    for clip, expected in ((None, None), (1.0, math.nan)):
        paged, model = engine(early_updates=False), net()
        paged.attach(model, clip=clip)
        paged.backward(loss_of(model) * math.nan)
        norm = paged.step().norm
        assert norm is expected or (norm is not None and math.isnan(norm))


def test_a_step_without_gradients_changes_nothing() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    before = parity.values(model)
    report = paged.step()
    assert (report.step, report.skipped) == (2, False)
    assert all(torch.equal(value, before[key]) for key, value in parity.values(model).items())


# Groups.


def test_groups_cannot_be_changed_after_attach() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, groups=[{"params": model[0].parameters()}])
    trains(paged, model)
    raises(lambda: optimizer.add_param_group({"params": list(model[1].parameters())}),
           r"release\(\).*attach")
    assert len(optimizer.param_groups) == 1
    trains(paged, model)
    optimizer.param_groups.append({"params": list(model[1].parameters()), "lr": 1.0})
    raises(lambda: paged.backward(loss_of(model)), r"release\(\).*attach")
    optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"].append(model[1].weight)
    raises(lambda: paged.backward(loss_of(model)), r"release\(\).*attach")
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[0]["optimizer"] = "sgd"
    raises(lambda: paged.backward(loss_of(model)), "optimizer")
    optimizer.param_groups[0]["optimizer"] = "adamw"
    trains(paged, model)


# Models that cannot be attached.


def test_a_model_whose_engine_is_gone() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    paged.close()
    other = engine()
    raises(lambda: other.attach(model), r"'0\.weight'.*went with its engine")
    raises(lambda: other.pin(model), "engine")
    raises(lambda: other.grad(model[0].weight), "attach")
    other.attach(net())


def test_a_model_on_meta(tmp_path: Path) -> None:
    paged = engine()
    with torch.device("meta"):
        model = net()
    raises(lambda: paged.attach(model), r"'0\.weight' and 5 others are on the meta device.*build")
    partly = net()
    with torch.device("meta"):
        partly[1] = torch.nn.Linear(WIDTH, WIDTH)
    raises(lambda: paged.attach(partly), r"'1\.weight' and 1 other .*to_empty")
    raises(lambda: paged.pin(partly), "engine")
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    paged.attach(model)
    trains(paged, model)
    with pytest.raises(pagoda.UserError, match="meta"):
        paged.save_pretrained(tmp_path, partly)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_no_gradient_yet_reads_as_zeros(placement: str, tmp_path: Path) -> None:
    paged, model = engine(gradients=placement, nvme=[tmp_path], early_updates=False), net()
    paged.attach(model)
    assert not paged.grad(model[0].weight).any()
    paged.backward(model[0](torch.ones(1, WIDTH)).sum())
    assert paged.grad(model[0].weight).all()
    assert not paged.grad(model[1].weight).any()
    paged.step()
    assert not paged.grad(model[0].weight).any()
    assert paged.grad_norm() == 0
    trains(paged, model)
