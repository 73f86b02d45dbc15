# SPDX-License-Identifier: Apache-2.0
"""Gradients belong to the engine: what a script does to p.grad is the step's, or an error at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import parity
import pytest
import torch
from small_net import WIDTH, engine, loss_of, net, raises, trains

import pagoda

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


def test_the_gradient_of_a_parameter_with_another_storage_is_its_own() -> None:
    """No operator has used the new storage yet."""
    paged, model = engine(early_updates=False), net()
    paged.attach(model)
    weight = model[0].weight
    paged.backward(model[0](torch.ones(1, WIDTH)).sum())
    expected, own = paged.grad(weight), weight.data
    assert expected.any()
    weight.data = torch.zeros_like(own)
    assert torch.equal(paged.grad(weight), expected)
    weight.sum()
    assert torch.equal(paged.grad(weight), expected)
    weight.data = own
    assert torch.equal(paged.grad(weight), expected)
    paged.close()


@pytest.mark.parametrize("given", [
    lambda own: own.t().contiguous().t(), lambda own: own[1:].clone(), lambda own: own.double()],
    ids=["layout", "size", "type"])
def test_the_gradient_of_a_parameter_whose_new_storage_does_not_fit_is_refused(
        given: Callable[[torch.Tensor], torch.Tensor]) -> None:
    paged, model = engine(early_updates=False), net()
    paged.attach(model)
    weight = model[0].weight
    paged.backward(model[0](torch.ones(1, WIDTH)).sum())
    expected, own = paged.grad(weight), weight.data
    weight.data = given(own)
    raises(lambda: paged.grad(weight), "'0.weight' was given (another memory layout|a storage of another size)")
    weight.data = own
    assert torch.equal(paged.grad(weight), expected)
    paged.close()


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
@pytest.mark.parametrize("dropped", [False, True])
def test_a_hook_of_before_attach_that_fails_leaves_what_torch_leaves(plainly: bool, dropped: bool) -> None:
    """It is called when torch has added to p.grad, and before the engine's."""
    def failing_once(model: torch.nn.Sequential) -> torch.nn.Sequential:
        calls: list[int] = []

        def hook(_: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("a hook fails")

        model[1].weight.register_post_accumulate_grad_hook(hook)
        return model

    plain, model = failing_once(net()), failing_once(net())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    paged = engine(accumulation=2)
    paged.attach(model, optimizer="sgd", lr=0.1)

    def ours(step: int) -> None:
        if plainly:
            loss_of(model, step).backward()
        else:
            paged.backward(loss_of(model, step), last=False)

    for backward in (lambda step: loss_of(plain, step).backward(), ours):
        with pytest.raises(RuntimeError, match="a hook fails"):
            backward(0)
    if dropped:
        theirs.zero_grad()
        paged.zero_grad()
    for step in (1, 2):
        loss_of(plain, step).backward()
        ours(step)
        theirs.step()
        theirs.zero_grad()
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


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_a_grad_scaler_scales_is_never_trained_with(checkpoint: bool) -> None:
    """Nobody would divide the gradients, which the engine owns, by the scale."""
    match = r"GradScaler.*loss_scale='dynamic' and call engine\.backward\(loss\)"
    paged, model = engine(early_updates=False), net()
    optimizer = paged.attach(model, optimizer="sgd", lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss() -> torch.Tensor:
        if not checkpoint:
            return loss_of(model)
        x = torch.ones(2, WIDTH, requires_grad=True)  # passes inside the pass
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).square().mean()

    for scaled in (scaler.scale(loss()), scaler.scale([loss()])[0] / 2,
                   next(iter(scaler.scale(iter([loss()]))))):
        with pytest.raises(RuntimeError, match=match):
            scaled.backward()
    with pytest.raises(RuntimeError, match=match):
        paged.backward(scaler.scale(loss()))
    paged.zero_grad()
    paged.backward(loss())
    for other in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        raises(lambda other=other: scaler.unscale_(other), match)  # type: ignore[misc]
    paged.zero_grad()
    paged.step()
    assert all(map(torch.equal, model.parameters(), before))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss()).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    other_model = torch.nn.Linear(2, 2)  # whose gradients are its own
    plain = torch.optim.SGD(other_model.parameters(), lr=0.1)
    scaler.scale(other_model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(plain)
    assert (other_model.bias.grad == 1).all()
    scaler.step(plain)
    scaler.update()
    trains(paged, model)


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
    raises(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
           r"clip_grad_value_: .*p\.register_hook\(lambda g: g\.clamp\(-v, v\)\)")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
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


def test_a_gradient_set_beside_that_of_backward_goes_and_the_step_completes() -> None:
    """Once updates have started zero_grad() raises: the error says what works then, too."""
    finals = []
    for sets in (False, True):
        paged, model = engine(), net()
        paged.attach(model, optimizer="sgd", lr=0.1)
        for step in range(3):
            paged.backward(loss_of(model, step))
            if sets:
                model[1].weight.grad = torch.ones(WIDTH, WIDTH)
                raises(paged.step, r"p\.grad of '1\.weight' was set.*set p\.grad to None and call step\(\)")
                if step > 0:
                    raises(paged.zero_grad, "updates may have started")
                model[1].weight.grad = None
            paged.step()
        finals.append(parity.values(model))
        paged.close()
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name])


# Accumulation.


def test_a_loop_that_steps_after_every_micro_batch_is_warned_once() -> None:
    paged, model = engine(accumulation=4), net()
    paged.attach(model)
    paged.backward(loss_of(model))
    with pytest.warns(UserWarning, match=r"step\(\) was called after 1 backward\(\), with accumulation=4"):
        paged.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trains(paged, model)


def test_a_short_accumulation_that_is_meant_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in ([None, None], [False, None], [True]):
            paged, model = engine(accumulation=2), net()
            paged.attach(model)
            paged.step()  # nothing yet
            for last in first:
                paged.backward(loss_of(model), last)
            paged.step()
            trains(paged, model, 1)  # the last of an epoch
        loss_of(model).backward()
        paged.step()
        paged.release(model)
        paged.attach(model)
        loss_of(model).backward()  # a framework's loop, which counts itself
        paged.step()
