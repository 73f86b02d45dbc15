# SPDX-License-Identifier: Apache-2.0
"""A parameter that was frozen when its model was attached trains from the step after it is thawed:
the same bits as a plain loop, in which an optimizer has had it all along."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from failing import failing
from small_stack import LAYERS, WIDTH, engine, loss_of, stack
from thawing import (
    FROZEN_ON_RANKS,
    STEPS_ON_RANKS,
    Views,
    assert_same,
    freeze,
    gradually,
    on_ranks,
    state_bytes,
    thaw,
    trained,
    trained_plainly,
)
from zoo import ZOO

import pagoda


# The bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plainly", [False, True])
def test_gradual_thawing_is_a_plain_loops(dtype: torch.dtype, plainly: bool) -> None:
    expected = trained_plainly(stack(dtype), gradually, 11)
    paged = engine()
    model = stack(dtype)
    gradually(model, 0)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    got = trained(paged, model, lambda m, step: gradually(m, step) if step > 0 else None, 11,
                  plainly=plainly)
    assert_same(expected, got)
    assert all(p.grad is None for p in model.parameters())


CONFIGS: dict[str, dict[str, Any]] = {
    "host": {},
    "nvme": {"parameters": "nvme", "gradients": "nvme", "optimizer_state": "nvme"},
    "auto": {"device_budget": "1MiB", "parameters": "auto"},
    "device": {"device_budget": "1MiB", "gradients": "device", "optimizer_state": "device"},
    "stochastic": {"moments": "bf16", "master": "split"},
    "clip": {"clip": 0.01},
    "clip_ahead": {"clip": 0.5, "clip_ahead": True},
    "scaled": {"loss_scale": 1024},
    "no early updates": {"early_updates": False},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_thawed_before_the_first_step_is_trained_from_the_start(name: str, tmp_path: Path) -> None:
    """Neither the order of norms nor the seeds of rounding, nor who is updated early and where."""
    config = dict(CONFIGS[name])
    if "nvme" in config.values():
        config["nvme"] = [tmp_path]
    runs = []
    for frozen in ([], [1, 4]):
        paged = engine(**config, accumulation=2, gradient_dtype="fp32")
        model = stack(torch.bfloat16)
        freeze(model, *frozen)
        paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
        thaw(model, *frozen)
        norms = []
        for step in range(4):
            paged.backward(loss_of(model, 2 * step))
            paged.backward(loss_of(model, 2 * step + 1))
            norms.append(paged.step().norm)
        runs.append((norms, parity.values(model), paged.stats()["updates"]["elements"]))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_frozen_again_it_keeps_its_state_and_its_count() -> None:
    def now_and_then(model: torch.nn.Module, step: int) -> None:
        if step == 0:
            freeze(model, 2)
        elif step in (2, 5, 6):
            (thaw if step != 5 else freeze)(model, 2)  # 2 trains in steps 2 to 4, and from 6 on
        if step in (1, 3):  # 3 is trained from the start, and not in steps 1 and 2
            (freeze if step == 1 else thaw)(model, 3)

    expected = trained_plainly(stack(), now_and_then, 9)
    paged = engine()
    model = stack()
    now_and_then(model, 0)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    assert_same(expected, trained(paged, model, now_and_then, 9))


def test_named_in_groups() -> None:
    """Each with its own constants; what is in none is not trained, and that is said once."""
    paged = engine()
    model = stack()
    freeze(model, 0, 1, 2)
    before = parity.values(model)
    paged.attach(model, groups=[{"params": model[1].parameters(), "lr": 0.5},
                                {"params": model[5].parameters(), "lr": 0.25}], optimizer="sgd")
    assert [len(group["params"]) for group in paged.optimizer.param_groups] == [2, 2]
    trained(paged, model, lambda m, step: None, 2)
    assert torch.equal(model[1].weight, before["1.weight"])
    thaw(model, 0, 1)
    expected = model[1].weight.detach().clone()
    value = loss_of(model)
    expected -= 0.5 * torch.autograd.grad(value, model[1].weight, retain_graph=True)[0]
    paged.backward(value)
    with pytest.warns(UserWarning, match=r"does not train '0.weight', '0.bias': .*none of its groups"):
        paged.step()
    assert torch.equal(model[1].weight, expected)
    assert torch.equal(model[0].weight, before["0.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(paged, model, lambda m, step: None, 1)


def test_between_micro_batches_and_between_backward_and_step() -> None:
    def run(paged: pagoda.Engine | None, model: torch.nn.Sequential) -> dict[str, torch.Tensor]:
        optimizer = parity.PlainAdamW([])
        optimizer.parameters = list(model.parameters())
        step = optimizer.step if paged is None else paged.step
        for number in range(5):
            for micro in range(3):
                if number == 1 and micro == 1:
                    thaw(model, 0)
                if number == 2:  # has gradients in the second of three micro-batches
                    (thaw if micro == 1 else freeze)(model, 1)
                value = loss_of(model, 3 * number + micro)
                value.backward() if paged is None else paged.backward(value)
            if number == 1:
                thaw(model, 2)  # too late for this step
            step()
        return parity.values(model)

    plain = stack()
    freeze(plain, 0, 1, 2)
    expected = run(None, plain)
    paged = engine(accumulation=3)
    model = stack()
    freeze(model, 0, 1, 2)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    assert_same(expected, run(paged, model))


@pytest.mark.parametrize("plainly", [False, True])
def test_in_the_middle_of_a_backward(plainly: bool) -> None:
    """As torch.optim has it: what has a gradient when step() is called is updated."""
    def thawing(model: torch.nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        first = model.get_submodule("0")
        if step == 2:  # a node for its gradient is there, and nobody asks for it yet
            first.requires_grad_(True)
            hidden = first(x)
            first.requires_grad_(False)
            hidden.register_hook(lambda _: first.requires_grad_(True) and None)
        else:
            hidden = first(x)
        for layer in range(1, LAYERS):
            hidden = model.get_submodule(str(layer))(hidden)
        return (hidden - x).square().mean()

    plain, model = stack(), stack()
    freeze(plain, 0)
    freeze(model, 0)
    expected = trained_plainly(plain, lambda m, step: None, 5, thawing)
    assert any(not torch.equal(expected[name], value)
               for name, value in parity.values(stack()[:1]).items())
    paged = engine()
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    assert_same(expected, trained(paged, model, lambda m, step: None, 5, thawing, plainly))


@pytest.mark.parametrize("plainly", [False, True])
def test_after_a_pass_that_failed(plainly: bool) -> None:
    """Its end was never told: what is thawed next is thawed all the same."""
    def fails(m: torch.nn.Sequential) -> torch.Tensor:
        return m[3:](failing(m[:3](torch.ones(1, WIDTH)), KeyError)).sum()

    plain, model = stack(), stack()
    freeze(plain, 1)
    freeze(model, 1)
    optimizer = parity.PlainAdamW([])
    optimizer.parameters = list(plain.parameters())
    paged = engine(early_updates=False)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    for each in (plain, model):
        backward = torch.Tensor.backward if plainly or each is plain else paged.backward
        with pytest.raises(KeyError, match="mine"):
            backward(fails(each))
        thaw(each, 1)
        backward(loss_of(each))
    optimizer.step()
    paged.step()
    assert_same(parity.values(plain), parity.values(model))


@pytest.mark.parametrize("config", [{}, {"clip": 0.01}, {"moments": "bf16"}])
def test_views_of_one_storage(config: dict[str, Any]) -> None:
    """A page of several parameters: the first of them takes the memory, the others join it."""
    def schedule(model: Views, step: int) -> None:
        for number, weight in enumerate(model.weights):
            weight.requires_grad_(step > 2 * number)

    runs = []
    for from_the_start in (True, False):
        paged = engine(device_budget="256KiB", gradient_staging="64KiB", **config)
        model = Views()
        if not from_the_start:
            model.weights.requires_grad_(False)
        paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
        states = state_bytes(paged)
        runs.append(trained(paged, model, schedule, 8))  # type: ignore[arg-type]
        assert (state_bytes(paged) > states) == (not from_the_start)
    assert_same(*runs)
    if not config:
        plain = Views()
        assert_same(trained_plainly(plain, schedule, 8), runs[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen3_tied", "mixtral", "t5"])
def test_models_of_the_zoo(name: str) -> None:
    """Tied weights, experts, a stack of two: the first half of the parameters is thawed later."""
    specimen = ZOO[name]

    def schedule(model: torch.nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        for p in parameters[:len(parameters) // 2]:
            p.requires_grad_(step >= 2)

    torch.manual_seed(0)
    plain = specimen.make()
    schedule(plain, 0)
    torch.manual_seed(1)
    expected = trained_plainly(plain, schedule, 4, specimen.loss)
    paged = pagoda.Engine(**parity.config_below_a_third(specimen.make))
    torch.manual_seed(0)
    with paged.build():
        model = specimen.make()
    schedule(model, 0)
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    torch.manual_seed(1)
    assert_same(expected, trained(paged, model, schedule, 4, specimen.loss))


def test_written_by_hand_while_it_is_frozen() -> None:
    def schedule(model: torch.nn.Module, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.get_submodule("1").get_parameter("weight").mul_(2)
        if step == 3:
            thaw(model, 1)

    plain, model = stack(torch.bfloat16), stack(torch.bfloat16)
    freeze(plain, 1)
    freeze(model, 1)
    paged = engine()
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    assert_same(trained_plainly(plain, schedule, 6), trained(paged, model, schedule, 6))


def test_given_another_storage_while_it_is_frozen() -> None:
    def schedule(model: torch.nn.Module, step: int) -> None:
        weight = model.get_submodule("1").get_parameter("weight")
        if step == 2:
            weight.data = weight.detach().clone() * 2
        if step == 3:
            thaw(model, 1)

    plain, model = stack(), stack()
    freeze(plain, 1)
    freeze(model, 1)
    paged = engine()
    paged.attach(model, lr=parity.LR, weight_decay=parity.DECAY)
    expected = trained_plainly(plain, schedule, 6)
    got = trained(paged, model, schedule, 3)
    for _ in range(3):  # storages come and go: the page waits for its parameter
        with paged.build():
            torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
        gc.collect()
    for step in range(3, 6):
        schedule(model, step)
        paged.backward(loss_of(model, step))
        paged.step()
    got = parity.values(model)
    assert_same(expected, got)


def test_another_storage_of_what_is_frozen_is_its_page_at_the_next_use() -> None:
    """Also where the window between the last backward and step() follows, and without an operator."""
    paged, model = engine(), stack()
    paged.attach(model)
    for step in range(2):
        paged.backward(loss_of(model, step))
        paged.step()
    freeze(model, 1)
    weight = model[1].weight
    for use in (lambda: weight.sum().item(), lambda: paged.pin(weight)):
        weight.data = weight.detach().clone() * 2
        expected = weight.detach().clone()
        use()
        with paged.pin(weight):
            assert torch.equal(torch.from_numpy(weight.detach().numpy()), expected)
    paged.backward(loss_of(model, 2))
    paged.step()  # nothing was written since that backward began
    paged.close()


def test_on_several_ranks(tmp_path: Path) -> None:
    """…and what only one of them thaws, or has no room for, is refused on all: see ranks.py."""
    from test_ranks import MICRO, torchrun

    torchrun(2, str(tmp_path), "thaw", "0", "2", "3")
    model = stack()
    freeze(model, *FROZEN_ON_RANKS)
    optimizer = parity.PlainAdamW([])
    optimizer.parameters = list(model.parameters())
    for step in range(STEPS_ON_RANKS):
        on_ranks(model, step)
        sums: list[torch.Tensor | None] = [None] * len(optimizer.parameters)
        for rank in range(2):
            loss_of(model, MICRO * step + rank).backward()
            for i, p in enumerate(optimizer.parameters):
                before = sums[i]
                if p.grad is not None:
                    sums[i] = p.grad if before is None else before + p.grad
                p.grad = None
        for p, total in zip(optimizer.parameters, sums, strict=True):
            p.grad = None if total is None else total * 0.5
        optimizer.step()
    for zero in (0, 2, 3):
        for rank in range(2):
            assert_same(parity.values(model), torch.load(tmp_path / f"zero{zero}.{rank}.pt"))


# Gradients, and the end.


def test_gradients_of_what_was_just_thawed() -> None:
    paged = engine(early_updates=False)
    model = stack()
    freeze(model, 0)
    paged.attach(model)
    paged.backward(loss_of(model))
    with pytest.raises(pagoda.UserError, match="'0.weight' is frozen"):
        paged.grad(model[0].weight)
    paged.zero_grad()
    plain = stack()
    loss_of(plain).backward()
    thaw(model, 0)
    paged.backward(loss_of(model))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.equal(paged.grad(mine), theirs.grad)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert paged.grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    paged.zero_grad()
    assert paged.grad_norm() == 0
    assert paged.step().step == 0


def test_updates_begin_early_again_from_the_second_step_on() -> None:
    paged = engine(prefetch=False)
    model = stack()
    freeze(model, 0, 1)
    paged.attach(model)
    trained(paged, model, lambda m, step: None, 3)
    before = paged.stats()["updates"]["early"]
    assert before == 2 * 8
    thaw(model, 0, 1)
    trained(paged, model, lambda m, step: None, 2)
    assert paged.stats()["updates"]["early"] == before + 8 + 12


def test_released_models_are_plain_again() -> None:
    paged = engine()
    model = stack()
    freeze(model, 0, 1)
    paged.attach(model)
    thaw(model, 0)
    trained(paged, model, lambda m, step: None, 2)
    model[1].weight.data = model[1].weight.detach().clone()  # while it is frozen
    paged.release(model)
    thaw(model, 1)
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    paged.attach(model)
    trained(paged, model, lambda m, step: None, 2)


def test_trainer_trains_what_a_callback_thaws(tmp_path: Path) -> None:
    import test_trainer
    from transformers import Trainer, TrainerCallback

    import pagoda.trainer

    class Thaw(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                more["model"].requires_grad_(True)

    paged = pagoda.Engine(**parity.config_below_a_third(ZOO["llama"].make))
    torch.manual_seed(0)
    with paged.build():
        model: Any = ZOO["llama"].make()
    model.model.requires_grad_(False)
    before = parity.values(model)
    args = test_trainer.arguments(tmp_path)
    trainer = Trainer(model=model, args=args, train_dataset=test_trainer.Texts(),
                      **pagoda.trainer.arguments(paged, model, args))
    trainer.add_callback(Thaw())
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in parity.values(model).items())
