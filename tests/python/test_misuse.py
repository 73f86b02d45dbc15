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


# Gradients that a script sets.


def reference(change: Callable[[torch.nn.Sequential], None], steps: int = 2) -> list[torch.Tensor]:
    """A plain loop, in which `change` makes the gradients."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        change(model)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def set_some(model: torch.nn.Sequential) -> None:
    """An evolution strategy, say: no backward at all."""
    model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
    model[1].bias.grad = torch.arange(float(WIDTH))


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_gradient_that_is_set_is_the_steps(placement: str, tmp_path: Path) -> None:
    expected = reference(set_some, 3)
    paged, model = engine(gradients=placement, nvme=[tmp_path]), net()
    optimizer = paged.attach(model, optimizer="sgd", lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        set_some(model)
        paged.step()
        assert all(p.grad is None for p in model.parameters())
    for mine, theirs in zip(parity.values(model).values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_set_can_be_seen_clipped_and_dropped() -> None:
    paged, model = engine(), net()
    paged.attach(model, optimizer="sgd", lr=0.1, clip=1.0)
    model[0].weight.grad = torch.full((WIDTH, WIDTH), 1.0)
    assert paged.grad_norm() == WIDTH
    assert (paged.grad(model[0].weight) == 1).all()
    assert paged.step().norm == WIDTH
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    paged.zero_grad()
    assert model[0].weight.grad is None
    before = parity.values(model)
    paged.step()
    assert all(torch.equal(value, before[key]) for key, value in parity.values(model).items())


def test_a_gradient_may_be_a_view_of_a_page() -> None:
    def shrink(model: torch.nn.Sequential) -> None:
        model[0].weight.grad = model[1].weight.detach()
        model[2].bias.grad = model[2].bias.detach()

    paged, model = engine(device_budget="4KiB", gradient_staging="1KiB"), net()
    paged.attach(model, optimizer="sgd", lr=0.1, momentum=0.9)
    for _ in range(2):
        shrink(model)
        paged.step()
    for mine, theirs in zip(parity.values(model).values(), reference(shrink), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_gradient_of_a_closure_or_a_hook_is_the_steps() -> None:
    def closure(model: torch.nn.Sequential) -> Callable[[], float]:
        def run() -> float:
            set_some(model)
            return 1.0

        return run

    paged, model = engine(), net()
    optimizer = paged.attach(model, optimizer="sgd", lr=0.1, momentum=0.9)
    for _ in range(2):
        assert optimizer.step(closure(model)) == 1.0
    for mine, theirs in zip(parity.values(model).values(), reference(set_some), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)

    def hooked(model: torch.nn.Sequential) -> torch.nn.Sequential:
        """Hooks of before attach() are called first: they may change p.grad, and do."""
        model[0].weight.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", p.grad * 2))
        model[1].weight.register_hook(lambda gradient: gradient * 3)
        return model

    plain, model = hooked(net()), hooked(net())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    paged = engine()
    paged.attach(model, optimizer="sgd", lr=0.1)
    loss_of(plain).backward()
    theirs.step()
    paged.backward(loss_of(model))
    paged.step()
    for mine, other in zip(parity.values(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_gradient_that_is_set_beside_one_of_backward_is_an_error(plainly: bool,
                                                                   early: bool) -> None:
    """To torch it replaces the other, which is in the engine here."""
    paged, model = engine(early_updates=early, accumulation=2), net()
    paged.attach(model, optimizer="sgd", lr=0.1)

    def backward(step: int) -> None:
        if plainly:
            loss_of(model, step).backward()
        else:
            paged.backward(loss_of(model, step))

    def set_gradient() -> None:
        model[1].weight.grad = torch.ones(WIDTH, WIDTH)

    for _ in range(3):  # updates begin early from the second step on
        backward(0)
        set_gradient()
        with pytest.raises(RuntimeError, match=r"p\.grad of '1\.weight' is set.*zero_grad"):
            backward(1)
        raises(paged.step, r"p\.grad of '1\.weight' was set, and backward\(\) has given it")
        raises(lambda: paged.grad(model[0].weight), r"p\.grad of '1\.weight'")
        paged.zero_grad()
        backward(0)
        backward(1)
        set_gradient()
        raises(paged.step, r"p\.grad of '1\.weight' was set")
        model[1].weight.grad = None
        paged.step()
    assert paged.stats()["steps"] == 3


def test_a_gradient_of_another_kind_is_an_error() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    model[0].weight.grad = torch.ones(WIDTH, WIDTH).to_sparse()
    raises(paged.step, r"'0\.weight' got a sparse gradient")
    paged.zero_grad()
    trains(paged, model)


def test_a_gradient_of_a_frozen_parameter_is_not_ignored() -> None:
    paged, model = engine(), net()
    model[0].weight.requires_grad_(False)
    paged.attach(model, groups=[{"params": model.parameters()}])
    trains(paged, model)
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    raises(paged.step, "frozen parameter")
    model[0].weight.grad = None
    trains(paged, model)


def test_gradients_of_before_attach_are_an_error_until_they_are_dropped() -> None:
    paged, model = engine(), net()
    loss_of(model).backward()
    paged.attach(model)
    raises(lambda: paged.backward(loss_of(model)), r"p\.grad of '0\.weight' is set")
    paged.zero_grad()
    trains(paged, model)


def test_a_plain_backward_with_a_loss_scale_is_an_error() -> None:
    def run(scale: str, familiar: bool) -> list[torch.Tensor]:
        paged, model = engine(loss_scale=scale), net()
        paged.attach(model, optimizer="sgd", lr=0.1)
        for step in range(2):
            if familiar:
                with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\)"):
                    loss_of(model, step).backward()
                assert all(p.grad is None for p in model.parameters())
            paged.backward(loss_of(model, step))
            if familiar:  # nor in the middle of an accumulation
                with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\)"):
                    loss_of(model, step).backward()
            paged.step()
        return list(parity.values(model).values())

    for scale in ("128", "dynamic"):
        expected = run("none", False)
        for familiar in (False, True):
            for mine, theirs in zip(run(scale, familiar), expected, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_gradients_are_shown_without_the_loss_scale() -> None:
    plain = net()
    loss_of(plain).backward()
    paged, model = engine(loss_scale="128"), net()
    paged.attach(model)
    paged.backward(loss_of(model))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(paged.grad(mine), theirs.grad)
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    raises(paged.step, r"p\.grad of '0\.weight' was set")
    paged.zero_grad()
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    raises(paged.step, r"loss_scale.*backward\(\(p \* gradient\)\.sum\(\)\)")
    model[0].weight.grad = None
    paged.backward((model[0].weight * torch.ones(WIDTH, WIDTH)).sum())
    assert (paged.grad(model[0].weight) == 1).all()
    paged.step()


def test_torch_functions_on_gradients_work_or_say_so() -> None:
    paged, model = engine(early_updates=False), net()
    optimizer = paged.attach(model, optimizer="sgd", lr=0.1)
    other = torch.optim.AdamW(model.parameters())
    paged.backward(loss_of(model))
    assert paged.has_gradients()
    raises(other.step, r"AdamW\.step\(\).*engine\.step")
    norm = torch.tensor(1.0)
    raises(lambda: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm),
           r"clip_grads_with_norm_: .*attach\(model, clip=")
    raises(model[0].zero_grad, r"part of an attached model.*engine\.zero_grad")
    model.zero_grad()
    assert not paged.has_gradients()
    assert paged.grad_norm() == 0
    model[0].zero_grad()  # nothing to drop
    trains(paged, model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    raises(lambda: scaler.step(optimizer), r"GradScaler.*loss_scale='dynamic'")
    paged.zero_grad()
    trains(paged, model)
    free = torch.nn.Linear(2, 2)
    mixed = torch.optim.SGD([*free.parameters()], lr=0.1)
    free(torch.ones(1, 2)).sum().backward()
    mixed.step()  # others' parameters are theirs
    free.zero_grad()
    paged.release(model)
    loss_of(model).backward()
    other.step()
    model[0].zero_grad()


# Every call, in every state of an engine.


class Scene:
    """An engine, its model, and others that have nothing to do with it."""

    def __init__(self, state: str) -> None:
        self.paged, self.model, self.other = engine(early_updates=False), net(), net()
        self.optimizer: Any = None
        if state != "fresh":
            self.optimizer = self.paged.attach(self.model)
            trains(self.paged, self.model)
        if state == "backward":
            self.paged.backward(loss_of(self.model))
        if state in ("released", "closed"):
            self.paged.release(self.model)
        if state == "closed":
            self.paged.close()
        if state == "dropped":
            self.paged.close()


STATES = ["fresh", "attached", "backward", "released", "closed", "dropped"]

SENSE: dict[str, Callable[[Scene], Any]] = {
    "attach": lambda s: s.paged.attach(s.model),
    "attach another": lambda s: s.paged.attach(s.other),
    "backward": lambda s: s.paged.backward(torch.ones((), requires_grad=True).exp()),
    "backward of another": lambda s: s.paged.backward(loss_of(s.other)),
    "step": lambda s: s.paged.step(),
    "join": lambda s: s.paged.join(),
    "finish": lambda s: s.paged.finish(),
    "zero_grad": lambda s: s.paged.zero_grad(),
    "grad": lambda s: s.paged.grad(s.model[0].weight),
    "grad_norm": lambda s: s.paged.grad_norm(),
    "has_gradients": lambda s: s.paged.has_gradients(),
    "pin": lambda s: s.paged.pin(s.model).release(),
    "pin nothing": lambda s: s.paged.pin([]).release(),
    "release": lambda s: s.paged.release(),
    "release the model": lambda s: s.paged.release(s.model),
    "serve_framework": lambda s: s.paged.serve_framework(),
    "activations": lambda s: s.paged.activations().__enter__(),
    "stats": lambda s: str(s.paged.stats()),
    "config": lambda s: s.paged.config,
    "device": lambda s: s.paged.device,
    "rank": lambda s: s.paged.rank,
    "world_size": lambda s: s.paged.world_size,
    "loss_scale": lambda s: s.paged.loss_scale,
    "optimizer": lambda s: s.paged.optimizer,
    "close": lambda s: s.paged.close(),
    "leave": lambda s: s.paged.__exit__(None, None, None),
    "optimizer.step": lambda s: s.optimizer and s.optimizer.step(),
    "optimizer.zero_grad": lambda s: s.optimizer and s.optimizer.zero_grad(),
    "optimizer.state_dict": lambda s: s.optimizer and s.optimizer.state_dict(),
}


def build(scene: Scene) -> None:
    with scene.paged.build():
        torch.nn.Linear(2, 2)


def save(scene: Scene, path: Path) -> None:
    scene.paged.save_pretrained(path)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", [*SENSE, "build", "save_pretrained"])
def test_a_call_works_or_says_why_not(call: str, state: str, tmp_path: Path) -> None:
    scene = Scene(state)
    outcome = None
    for _ in range(2):  # twice, too
        try:
            if call == "build":
                build(scene)
            elif call == "save_pretrained":
                save(scene, tmp_path)
            else:
                SENSE[call](scene)
        except pagoda.UserError as error:
            outcome = str(error)
            assert len(outcome) < 400
    if state in ("attached", "backward") and call not in (
            "release", "release the model", "close", "leave"):
        if scene.paged.has_gradients():
            scene.paged.step()
        trains(scene.paged, scene.model)
    elif state == "released" and call not in ("attach", "attach another", "close", "leave"):
        scene.paged.attach(scene.model)
        trains(scene.paged, scene.model)
    if state in ("closed", "dropped") and call not in (
            "device", "close", "leave", "optimizer", "optimizer.step"):
        assert outcome is not None, "a closed engine did something"


WRONG_CALLS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "attach None": (lambda s: s.paged.attach(None), "torch.nn.Module, and not None"),
    "attach parameters": (lambda s: s.paged.attach(s.other.parameters()), "not a generator"),
    "attach a class": (lambda s: s.paged.attach(torch.nn.Linear), "not a type"),
    "attach a tensor": (lambda s: s.paged.attach(torch.ones(2)), "not a Tensor"),
    "attach with a number as optimizer": (lambda s: s.paged.attach(s.other, optimizer=7), "'7'"),
    "attach with torch's optimizer": (
        lambda s: s.paged.attach(s.other, optimizer=torch.optim.AdamW), "no optimizer"),
    "attach with groups that are none": (lambda s: s.paged.attach(s.other, groups=7), "dicts"),
    "attach with parameters as groups": (
        lambda s: s.paged.attach(s.other, groups=list(s.other.parameters())), "dict with 'params'"),
    "attach with no groups": (lambda s: s.paged.attach(s.other, groups=[]), "nothing to train"),
    "attach with empty params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": []}]), "nothing to train"),
    "attach with no params": (lambda s: s.paged.attach(s.other, groups=[{}]), "nothing to train"),
    "attach with numbers as params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [1, 2]}]), "a tensor, and not a int"),
    "attach with a number as params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": 7}]), "tensors, and not a int"),
    "attach with an unknown constant": (
        lambda s: s.paged.attach(s.other, groups=[{"params": s.other[0].weight, "lrr": 1}]), "lrr"),
    "attach a parameter twice": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [s.other[0].weight] * 2}]), "twice"),
    "attach a parameter in two groups": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [s.other[0].weight]}] * 2),
        "two groups"),
    "attach another's parameter": (
        lambda s: s.paged.attach(s.other, groups=[{"params": net()[0].weight}]), "no parameter of"),
    "attach with a negative clip": (lambda s: s.paged.attach(s.other, clip=-1.0), "clip"),
    "attach with clip nan": (lambda s: s.paged.attach(s.other, clip=math.nan), "clip"),
    "attach with clip infinite": (lambda s: s.paged.attach(s.other, clip=math.inf), "clip"),
    "attach with a word as clip": (lambda s: s.paged.attach(s.other, clip="1"), "clip"),
    "attach nothing": (lambda s: s.paged.attach(torch.nn.ReLU()), "nothing to train"),
    "release None of nothing": (lambda s: s.paged.release("model"), "torch.nn.Module"),
    "release another": (lambda s: s.paged.release(s.other), "no parameter of this model"),
    "release nothing": (lambda s: s.paged.release(torch.nn.ReLU()), "no parameter of this model"),
    "save to None": (lambda s: s.paged.save_pretrained(None, s.model), "path"),
    "save to a number": (lambda s: s.paged.save_pretrained(7, s.model), "path"),
    "save a word": (lambda s: s.paged.save_pretrained("x", "model"), "torch.nn.Module"),
    "save in shards of nothing": (
        lambda s: s.paged.save_pretrained("x", s.model, max_shard_bytes=0), "max_shard_bytes"),
    "save in shards of words": (
        lambda s: s.paged.save_pretrained("x", s.model, max_shard_bytes="5GB"), "max_shard_bytes"),
    "pin None": (lambda s: s.paged.pin(None), "tensor, and not None"),
    "pin a number": (lambda s: s.paged.pin(7), "tensor, and not a int"),
    "pin numbers": (lambda s: s.paged.pin([7]), "tensor, and not a int"),
    "pin a word": (lambda s: s.paged.pin("weight"), "tensor, and not a str"),
    "pin another's": (lambda s: s.paged.pin(s.other), "no parameter of this engine"),
    "pin a tensor of one's own": (lambda s: s.paged.pin(torch.ones(2)), "no parameter of this"),
    "pin a sparse one": (lambda s: s.paged.pin(torch.ones(2).to_sparse()), "no parameter of this"),
    "pin one on meta": (lambda s: s.paged.pin(torch.ones(2, device="meta")), "no parameter of"),
    "activations somewhere": (lambda s: s.paged.activations("device"), "'host' or 'nvme'"),
    "activations on nvme": (lambda s: s.paged.activations("nvme"), "nvme"),
    "activations nowhere": (lambda s: s.paged.activations(None), "'host' or 'nvme'"),
    "activations from much": (lambda s: s.paged.activations(least="much"), "much"),
    "activations from None": (lambda s: s.paged.activations(least=None), "None"),
    "activations below zero": (lambda s: s.paged.activations(in_flight=-1), "-1"),
    "pickle": (lambda s: pickle.dumps(s.paged), "copied or pickled"),
    "copy": (lambda s: copy.copy(s.paged), "copied or pickled"),
    "deepcopy": (lambda s: copy.deepcopy(s.paged), "copied or pickled"),
}

WRONG_OF_ATTACHED: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "backward of None": (lambda s: s.paged.backward(None), "tensor, and not None"),
    "backward of a number": (lambda s: s.paged.backward(1.0), "tensor, and not a float"),
    "backward of many": (lambda s: s.paged.backward(s.model(torch.ones(2, WIDTH))), r"\[2, 16\]"),
    "backward of nothing": (
        lambda s: s.paged.backward(s.model(torch.ones(0, WIDTH))), r"\[0, 16\]"),
    "backward of a constant": (lambda s: s.paged.backward(torch.ones(())), "no gradient can come"),
    "backward of what is detached": (
        lambda s: s.paged.backward(loss_of(s.model).detach()), "no gradient can come"),
    "backward with a word as last": (
        lambda s: s.paged.backward(loss_of(s.model), "yes"), "True, False or None"),
    "grad of None": (lambda s: s.paged.grad(None), "tensor, and not None"),
    "grad of a word": (lambda s: s.paged.grad("0.weight"), "tensor, and not a str"),
    "grad of another's": (lambda s: s.paged.grad(s.other[0].weight), "no parameter of this engine"),
    "grad of a sparse one": (
        lambda s: s.paged.grad(torch.ones(2).to_sparse()), "no parameter of this engine"),
    "release a part": (lambda s: s.paged.release(s.model[0]), "whole model"),
    "step with a number": (lambda s: s.optimizer.step(7), "function"),
    "optimizer.state": (lambda s: s.optimizer.state[s.model[0].weight], "cannot be read or changed"),
    "optimizer.state changed": (lambda s: s.optimizer.state.clear(), "cannot be read or changed"),
    "state_dict": (lambda s: s.optimizer.state_dict(), r"after 2 steps.*save_pretrained"),
    "torch.save": (lambda s: torch.save(s.optimizer.state_dict(), "x"), "save_pretrained"),
    "load_state_dict": (lambda s: s.optimizer.load_state_dict({}), "after 2 steps"),
    "pickle": (lambda s: pickle.dumps(s.optimizer), "copied or pickled"),
    "copy": (lambda s: copy.copy(s.optimizer), "copied or pickled"),
    "deepcopy": (lambda s: copy.deepcopy(s.optimizer), "copied or pickled"),
    "add_param_group": (lambda s: s.optimizer.add_param_group({}), "attach"),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
@pytest.mark.parametrize("state", ["fresh", "released"])
def test_a_wrong_call_has_no_effect(call: str, state: str) -> None:
    scene = Scene(state)
    wrong, match = WRONG_CALLS[call]
    raises(lambda: wrong(scene), match)
    scene.paged.attach(scene.model)  # nothing of it is left
    assert scene.paged.config["clip"] == 0
    trains(scene.paged, scene.model)
    for parameter in scene.other.parameters():
        parameter.detach().numpy()  # plain, as it was


@pytest.mark.parametrize("call", WRONG_OF_ATTACHED)
def test_a_wrong_call_leaves_a_training_as_it_was(call: str) -> None:
    scene, undisturbed = Scene("attached"), Scene("attached")
    wrong, match = WRONG_OF_ATTACHED[call]
    raises(lambda: wrong(scene), match)
    for each in (scene, undisturbed):
        trains(each.paged, each.model)
        each.paged.release(each.model)
    for mine, theirs in zip(scene.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# Parameters that cannot be pages, or cannot be trained.


class Wrapper(torch.Tensor):
    """A subclass that has its bytes elsewhere, as torchao's and DTensor have."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        out.inner = inner
        return out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(func)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(WIDTH))


ODD: dict[str, tuple[Callable[[], torch.Tensor], bool, str]] = {  # and whether it is trained
    "float64": (lambda: torch.ones(4, dtype=torch.float64), True, "Double: fp32, bf16 and fp16"),
    "float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), True, "Float8_e4m3fn"),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), True, "complex: train its real view"),
    "sparse": (lambda: torch.ones(4, 4).to_sparse(), True, "sparse, quantized or packed"),
    "csr": (lambda: torch.ones(4, 4).to_sparse_csr(), True, "sparse, quantized or packed"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), False,
                  "sparse, quantized or packed"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), True,
               "subclass|bytes"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)],
                                                  layout=torch.jagged), True, "NestedTensor"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), True, "'odd' is a Wrapper"),
    "frozen wrapper": (lambda: Wrapper(torch.ones(4)), False, "'odd' is a Wrapper"),
    "expanded": (lambda: torch.ones(1).expand(4), True, r"share one place in memory \(expand"),
    "inference": (inference, True, "inference mode"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), True, "not initialised yet"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*CSR.*", "ignore:.*quantize.*")
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_parameter_is_refused_before_anything_is_a_page(kind: str) -> None:
    make, trained, match = ODD[kind]
    paged, model = engine(), net()
    odd = make()
    model.register_parameter("odd", odd if isinstance(odd, torch.nn.Parameter)
                             else torch.nn.Parameter(odd, requires_grad=trained))
    raises(lambda: paged.attach(model), match)
    model.register_parameter("odd", None)
    for parameter in model.parameters():
        parameter.detach().numpy()
    paged.attach(model)
    trains(paged, model)


EVEN: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "frozen float64": (lambda: torch.ones(4, dtype=torch.float64), False),
    "frozen int8": (lambda: torch.ones(4, dtype=torch.int8), False),
    "frozen bool": (lambda: torch.ones(4, dtype=torch.bool), False),
    "frozen float8": (lambda: torch.ones(4).to(torch.float8_e4m3fn), False),
    "frozen expanded": (lambda: torch.ones(1).expand(4), False),
    "empty": (lambda: torch.empty(0, 3), True),
    "a number": (lambda: torch.tensor(2.0), True),
    "bf16": (lambda: torch.ones(4, dtype=torch.bfloat16), True),
    "a slice": (lambda: torch.ones(8)[2:6], True),
    "transposed": (lambda: torch.ones(4, 2).t(), True),
    "a subclass that is all Python": (lambda: torch.ones(4).as_subclass(Named), True),
}


class Named(torch.Tensor):
    """As torch.nn.Buffer and bitsandbytes' are: other methods, the same bytes."""


@pytest.mark.parametrize("kind", EVEN)
def test_an_uncommon_parameter_is_trained_or_paged(kind: str) -> None:
    make, trained = EVEN[kind]
    paged, model = engine(), net()
    odd = torch.nn.Parameter(make(), requires_grad=trained)
    model.register_parameter("odd", odd)
    expected = odd.detach().clone()
    paged.attach(model, optimizer="sgd", lr=0.5)
    for step in range(2):
        loss = loss_of(model, step)
        paged.backward(loss + odd.float().sum() if trained else loss)
        paged.step()
    if trained:
        expected -= 1
    paged.release(model)
    assert torch.equal(odd.detach(), expected)


def test_an_odd_parameter_is_refused_while_building() -> None:
    paged = engine()
    with pytest.raises(pagoda.UserError, match=r"'Sequential\.odd' is a tensor subclass"), \
            paged.build():
        model = net()
        model.register_parameter("odd", torch.nn.Parameter(Wrapper(torch.ones(4))))
    with paged.build():
        model = net()
        model.append(torch.nn.LazyLinear(WIDTH))
        with torch.device("meta"):
            model.append(torch.nn.Linear(WIDTH, WIDTH))
    model[4] = model[4].to_empty(device="cpu")
    raises(lambda: paged.attach(model), "one forward pass")
    model(torch.ones(1, WIDTH))
    paged.attach(model)
    trains(paged, model)


def test_a_model_of_another_engine_is_refused_before_anything_is_a_page() -> None:
    first, second = engine(), engine()
    taken, free = net(), net()
    first.attach(taken)
    mixed = torch.nn.Sequential(free, taken)
    raises(lambda: second.attach(mixed), r"'1\.0\.weight' belongs to another engine")
    free[0].weight.detach().numpy()
    raises(lambda: second.pin(taken), "no parameter of this engine")
    raises(lambda: second.release(taken), "no parameter of this model")
    trains(first, taken)
    first.release(taken)
    second.attach(mixed)
    trains(second, mixed)


# Engines and their scopes.


@pytest.mark.parametrize("keywords", [
    {"clip": math.nan}, {"clip": -1.0}, {"clip": "one"}, {"loss_scale": "0"}, {"loss_scale": "-1"},
    {"loss_scale": "nan"}, {"loss_scale": math.inf}, {"device": 7}, {"device": "tpu"},
    {"device_budget": object()}, {"device_budget": -1}, {"device_budget": [1]},
    {"zero": "three"}, {"zero": 4}, {"zero": 1.5}, {"accumulation": 0}, {"accumulation": True},
    {"nvme": 7}, {"nvme": [7]}, {"parameters": "tape"}, {"prefetch": "maybe"}, {"group": 7},
    {"gradient_group": 7}, {"timeout": math.nan}, {"seed": "x"}, {"": 1}, {"nvme": {"a": 1}},
])
def test_an_engine_of_nonsense(keywords: dict[str, Any]) -> None:
    raises(lambda: engine(**keywords), ".")


def test_scopes_of_building_may_be_mixed_up() -> None:
    paged, other = engine(), engine()
    with paged.build():
        first = net()
        paged.attach(first)  # before it is over
        trains(paged, first)
        with other.build():
            second = net()
        third = net()
    other.attach(second)
    trains(other, second)
    trains(paged, first)
    paged.release(first)
    paged.attach(third)
    trains(paged, third)
    with pytest.raises(KeyError), paged.build():
        raise KeyError("mine")
    with paged.build():
        fourth = net()
        paged.close()
    raises(lambda: engine().attach(fourth), "went with its engine")
    with pytest.raises(pagoda.UserError, match="closed"), paged.build():
        pass
    trains(other, second)


def test_a_pin_outlives_its_engine_and_is_used_twice() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    pin = paged.pin(model)
    with pin, pin:
        array = model[0].weight.detach().numpy()
    pin.release()
    pin = paged.pin([model[0].weight, model[0].weight])
    paged.close()
    array = model[0].weight.detach().numpy().copy()
    assert array.shape == (WIDTH, WIDTH)
    pin.release()
    with pytest.raises(RuntimeError, match="went with its engine"):
        model[0].weight.sum()


def test_clip_of_one_attach_is_not_the_next_ones() -> None:
    paged, model = engine(), net()
    paged.attach(model, clip=0.5)
    assert paged.config["clip"] == 0.5
    trains(paged, model)
    paged.release(model)
    raises(lambda: paged.attach(model, clip=0.25, lr=-1.0), "lr")
    paged.attach(model)
    assert paged.config["clip"] == 0
    paged.backward(loss_of(model))
    assert paged.step().norm is None
    paged.release(model)
    other = engine(clip=2.0)
    other.attach(model, clip=1.0)
    other.release(model)
    other.attach(model)
    assert other.config["clip"] == 2


def test_release_gives_back_what_the_model_has_replaced() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    old = model[1]
    model[1] = torch.nn.Linear(WIDTH, WIDTH)
    paged.release(model)
    old.weight.detach().numpy()
    paged.attach(model)
    trains(paged, model)


def test_the_optimizer_of_a_released_model_is_retired() -> None:
    paged, model = engine(), net()
    old = paged.attach(model)
    schedule = torch.optim.lr_scheduler.StepLR(old, 1)
    trains(paged, model)
    paged.release(model)
    new = paged.attach(model, lr=0.5)
    for call in (old.step, old.zero_grad, old.state_dict, old.send):
        raises(call, r"released: attach\(\) returns a new one")
    schedule.step()
    trains(paged, model)
    assert new.param_groups[0]["lr"] == 0.5


def test_before_the_first_step_the_optimizer_has_no_state_to_lose() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.5)
    state = optimizer.state_dict()
    assert state["state"] == {}
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    plain = torch.optim.AdamW(net().parameters())
    raises(lambda: optimizer.load_state_dict(plain.state_dict()), "of the optimizers")
    raises(lambda: optimizer.load_state_dict({**state, "state": {0: {"step": 1}}}), "with moments")
    raises(lambda: optimizer.load_state_dict(7), "state_dict")  # type: ignore[arg-type]
    raises(lambda: optimizer.load_state_dict({"param_groups": [{}]}), "of the optimizers")
    state["param_groups"][0]["lr"] = math.nan
    raises(lambda: optimizer.load_state_dict(state), "lr = nan")
    state["param_groups"][0]["params"].pop()
    raises(lambda: optimizer.load_state_dict(state), "load_state_dict")
    assert optimizer.param_groups[0]["lr"] == 0.25
    trains(paged, model)


def test_torchs_own_checkpoints_make_no_step() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    paged, model = engine(), net()
    optimizer = paged.attach(model)
    trains(paged, model)
    with pytest.raises(pagoda.UserError, match="save_pretrained"):
        get_optimizer_state_dict(model, optimizer)
    assert paged.stats()["steps"] == 2


def test_a_gradient_set_after_the_last_backward_never_spoils_a_step() -> None:
    """Updates have begun by then, perhaps: the step is as if it had been set or not, never half."""
    paged, model = engine(), net()
    paged.attach(model, optimizer="sgd", lr=0.1)

    def part(step: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        return model[:2](x).square().mean()

    for step in range(4):
        paged.backward(part(step))
        model[2].bias.grad = torch.ones(WIDTH)
        before = parity.values(model)["2.bias"] if step == 0 else None
        try:
            paged.step()
            assert before is None or torch.equal(parity.values(model)["2.bias"], before - 0.1)
        except pagoda.UserError as error:
            assert "p.grad of '2.bias' was set" in str(error)
            model[2].bias.grad = None
            paged.step()
    assert paged.stats()["steps"] == 4
