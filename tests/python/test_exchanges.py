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
    with (pytest.raises(pagoda.UserError, match="addresses"),
          torch.autograd.graph.allow_mutation_on_saved_tensors()):
        pass
    engine.close()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        pass
