# SPDX-License-Identifier: Apache-2.0
"""What user code puts under an attached parameter is trained as with torch.optim, or refused before a step;
and other threads may read while the engine trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

WIDTH = 64


def make_model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


def loss_of(model: nn.ModuleList, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(4, WIDTH)
    for layer in model:
        x = layer(x).tanh()
    return x.square().sum()


def swap(model: Any) -> None:
    a, b = model[0].weight.data, model[1].weight.data
    model[0].weight.data, model[1].weight.data = b, a


def alias(model: Any) -> None:
    model[1].weight.data = model[0].weight.data


def share_one(model: Any) -> None:
    model[0].weight.data = model[1].weight.data = torch.ones(WIDTH, WIDTH)


def transpose(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.t()


def transpose_a_copy(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.t().clone(memory_format=torch.preserve_format)


def share_memory(model: Any) -> None:
    model.share_memory()


def clone(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clone() * 2


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
@pytest.mark.parametrize(("exchange", "refusal"), [
    (swap, "storage of page"), (alias, "storage of page"), (share_one, "storage of page"),
    (transpose, "another memory layout"), (transpose_a_copy, "another memory layout"),
    (share_memory, "cannot be shared with another process"), (clone, None)])
def test_exchanges(exchange: Callable[[Any], None], refusal: str | None, resident: bool) -> None:
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB")
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    engine.attach(model, lr=1e-2, optimizer="sgd")

    def step(seed: int) -> None:
        engine.backward(loss_of(model, seed))
        engine.step()
        loss_of(other, seed).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    engine.finish()
    if refusal is None:
        exchange(model)
        exchange(other)
        step(2)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
    else:
        with pytest.raises((pagoda.UserError, RuntimeError), match=refusal):
            exchange(model)
            step(2)
    engine.close()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
@pytest.mark.parametrize("keep", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detach"])
def test_an_evaluation_with_averaged_weights(keep: Callable[[Any], torch.Tensor],
                                             resident: bool) -> None:
    """p.data = average, and back: parameters have their own values again, the average keeps its."""
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB")
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=2.0**-6)
    engine.attach(model, lr=2.0**-6, optimizer="sgd")
    seen: dict[int, list[float]] = {}
    for which in (model, other):
        averages = [p.detach().clone() for p in which.parameters()]
        losses = seen[id(which)] = []
        for seed in range(4):
            if which is model:
                engine.backward(loss_of(which, seed))
                engine.step()
            else:
                loss_of(which, seed).backward()
                optimizer.step()
                optimizer.zero_grad()
            for average, p in zip(averages, which.parameters(), strict=True):
                average.lerp_(p.detach(), 0.25)
            own = [keep(p) for p in which.parameters()]
            for average, p in zip(averages, which.parameters(), strict=True):
                p.data = average
            with torch.no_grad():
                losses.append(float(loss_of(which, seed)))
            losses += [float(one.sum()) for one in own]  # while others are in their place
            for mine, p in zip(own, which.parameters(), strict=True):
                p.data = mine
            with torch.no_grad():
                losses.append(float(loss_of(which, seed)))
    assert seen[id(model)] == seen[id(other)]
    engine.release(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    engine.close()


def test_a_storage_without_room_for_its_values_cannot_come_back() -> None:
    """Nothing is lost but what only that storage had: the engine trains on."""
    budget: int | str = "64MiB"
    for attempt in range(2):  # first to see what is needed
        engine = pagoda.Engine(device="cpu", device_budget="96KiB", gradient_staging="20KiB",
                               host_budget=budget)
        model = make_model()
        engine.attach(model, lr=1e-2)
        engine.backward(loss_of(model, 0))
        engine.step()
        engine.finish()
        if attempt == 0:
            budget = int(engine.stats()["tiers"]["host"]["peak"]) + 20 * 1024  # for one of them
            engine.close()
    held = [layer.weight.data for layer in model]
    for layer in model:
        layer.weight.data = layer.weight.data * 2
        layer.weight.sum()
    lost = [layer.weight for layer, one in zip(model, held, strict=True) if not readable(one)]
    assert 0 < len(lost) < 3
    lost[0].data = held[-1]
    with pytest.raises(pagoda.UserError, match=r"could not be kept.*p.data.clone\(\)"):
        engine.step()
    lost[0].data = torch.zeros(WIDTH, WIDTH)
    engine.backward(loss_of(model, 1))
    engine.step()
    engine.release(model)
    engine.close()


def readable(tensor: torch.Tensor) -> bool:
    try:
        tensor.sum()
    except RuntimeError as error:
        assert "values were not kept" in str(error)
        return False
    return True


def test_a_storage_comes_back_while_updates_are_made() -> None:
    """Between the last backward() and step() the exchange is dropped; what was there may return."""
    engine = pagoda.Engine(device="cpu", device_budget="96KiB", host_budget="64MiB",
                           gradient_staging="20KiB")
    model = make_model()
    engine.attach(model, lr=1e-2)
    for seed in range(2):
        engine.backward(loss_of(model, seed))
        engine.step()
    engine.backward(loss_of(model, 2))
    weight = model[0].weight
    own, before = weight.data, weight.detach().clone()
    weight.data = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(pagoda.UserError, match="is dropped"):
        engine.step()
    assert torch.equal(own, before) and torch.equal(weight, before)
    engine.step()
    weight.data = own  # of before the step
    assert torch.equal(weight, before)
    engine.backward(loss_of(model, 3))
    engine.step()
    engine.release(model)
    assert not torch.equal(weight, before)
    engine.close()


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
def test_an_exchange_while_updates_are_made_is_dropped_and_told(resident: bool,
                                                               touched: bool) -> None:
    """Between the last backward() and step(): torch.optim would update the new values."""
    budget = "64MiB" if resident else "96KiB"
    finals = []
    for exchanges in (False, True):
        engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                               gradient_staging="20KiB")
        model = make_model()
        engine.attach(model, lr=1e-2)
        for step in range(4):
            engine.backward(loss_of(model, step))
            if exchanges and step == 2:
                before = model[0].weight.detach().clone()
                model[0].weight.data = torch.zeros(WIDTH, WIDTH)
                if touched:
                    float(model[0].weight.detach().sum())
                with pytest.raises(pagoda.UserError, match="'0.weight' came between.*is dropped"):
                    engine.step()
                assert torch.equal(model[0].weight, before)
            engine.step()
        finals.append([p.detach().clone() for p in model.parameters()])
        engine.release(model)
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*finals, strict=True))


def test_channels_last_is_for_before_the_first_step() -> None:
    model = nn.Conv2d(3, 8, 3)
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    engine.attach(model, lr=1e-2)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    engine.backward(model(torch.ones(1, 3, 6, 6)).sum())
    engine.step()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with pytest.raises(pagoda.UserError, match="another memory layout"):
        engine.backward(model(torch.ones(1, 3, 6, 6)).sum())
    engine.close()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
def test_another_thread_may_read_while_the_engine_trains(resident: bool) -> None:
    """At worst it reads a value of before or after the step, as with plain tensors."""
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB")
    model, other = make_model(), make_model()
    engine.attach(model, lr=1e-2)
    over = threading.Event()
    errors: list[BaseException] = []

    def evaluate() -> None:
        try:
            with torch.no_grad():
                while not over.is_set():
                    loss_of(model, 1)
                    [float(p.sum()) for p in model.parameters()]
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=evaluate)
    reader.start()
    for step in range(30):
        engine.backward(loss_of(model, step))
        engine.step()
    over.set()
    reader.join()
    assert not errors
    engine.release(model)
    engine.attach(other, lr=1e-2)
    engine.close()


def test_calls_of_two_threads_are_refused() -> None:
    engine = pagoda.Engine(device="cpu", device_budget="1MiB", early_updates=False)
    model = make_model()
    engine.attach(model)
    refused: list[str] = []

    def look(_: torch.Tensor) -> None:
        def run() -> None:
            try:
                engine.grad_norm()
            except pagoda.UserError as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    loss = loss_of(model, 0)
    loss.register_hook(look)
    engine.backward(loss)
    assert len(refused) == 1 and "another thread is in backward()" in refused[0]
    engine.step()
    engine.close()


def test_mutation_of_saved_tensors_is_refused_while_a_model_is_attached() -> None:
    engine, model = pagoda.Engine(device="cpu", device_budget="1MiB"), make_model()
    engine.attach(model)
    with (pytest.raises(pagoda.UserError, match="by address"),
          torch.autograd.graph.allow_mutation_on_saved_tensors()):
        pass
    engine.close()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        pass
