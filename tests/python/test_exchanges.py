# SPDX-License-Identifier: Apache-2.0
"""What user code puts under an attached parameter is trained as with torch.optim, or refused before a step."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_layers import WIDTH, loss_of, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait


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


def test_a_storage_without_room_for_its_values_becomes_a_plain_one() -> None:
    """The host has room for one page more, and three are exchanged."""
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
    before = [one.clone() for one in held]
    for layer in model:
        layer.weight.data = layer.weight.data * 2
    loss_of(model, 0)
    for mine, own, layer in zip(held, before, model, strict=True):
        assert torch.equal(mine, own) and torch.equal(layer.weight, own * 2)
        layer.weight.data = mine
    engine.backward(loss_of(model, 1))
    engine.step()
    assert all(not torch.equal(mine, own) for mine, own in zip(held, before, strict=True))
    engine.release(model)
    engine.close()


def test_a_storage_comes_back_where_the_device_has_room_for_one_page() -> None:
    engine = pagoda.Engine(device="cpu", device_budget="36KiB", gradient_staging="17KiB",
                           host_budget="64MiB", parameters="host")
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    engine.attach(layer, lr=0.1)
    own = layer.weight.data
    expected = own.clone()
    for _ in range(2):
        layer.weight.data = torch.zeros(WIDTH, WIDTH)
        assert float(layer.weight.detach().square().sum()) == 0
        layer.weight.data = own
        assert torch.equal(layer.weight, expected)
    engine.backward(layer(torch.ones(1, WIDTH)).sum())
    engine.step()
    assert not torch.equal(layer.weight, expected)
    engine.close()


def test_a_loop_that_only_swaps_weights_keeps_one_page_of_each() -> None:
    """It never comes to step(): what a swap leaves goes with the next one."""
    width, page = 256, 256 * 256 * 4
    engine = pagoda.Engine(device="cpu", device_budget="2MiB", host_budget="32MiB",
                           gradient_staging="512KiB", parameters="host")
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
    engine.attach(model, lr=1e-2)
    before = int(engine.stats()["tiers"]["host"]["used"])
    averages = [torch.ones(width, width) for _ in model]
    expected = [layer.weight.detach().clone() for layer in model]
    with torch.no_grad():
        for _ in range(20):
            own = [layer.weight.data for layer in model]
            for weights in (averages, own):
                for layer, weight in zip(model, weights, strict=True):
                    layer.weight.data = weight
                    float(layer.weight.sum())
                assert int(engine.stats()["tiers"]["host"]["used"]) <= before + 4 * page
    for layer, weight in zip(model, expected, strict=True):
        assert torch.equal(layer.weight, weight)
    engine.release(model)
    engine.close()


@pytest.mark.parametrize("parameters", ["auto", "device"])
def test_an_exchanged_storage_is_read_where_all_room_is_taken(parameters: str) -> None:
    """All pages stay on the device for good, and fill it."""
    layers = 3
    pages = layers * (WIDTH * WIDTH * 4 + 512)  # with their biases, in blocks
    engine = pagoda.Engine(device="cpu", device_budget=pages + 20 * 1024, host_budget="64MiB",
                           gradient_staging="20KiB", parameters=parameters)
    model = make_model()
    engine.attach(model, lr=1e-2)
    held = [p.data for p in model.parameters()]
    before = [one.clone() for one in held]
    for p in model.parameters():
        p.data = p.data + 1
    engine.backward(loss_of(model, 1))
    engine.step()
    for mine, own in zip(held, before, strict=True):
        assert torch.equal(mine, own)
    engine.release(model)
    engine.close()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=True)
        return x.square().sum()


def test_a_storage_that_came_back_is_the_parameters_in_reentrant_checkpoints() -> None:
    """What a checkpoint's forward has used tells when the gradient of its backward is complete."""
    losses = []
    for paged in (False, True):
        model = Twice()
        engine = pagoda.Engine(device="cpu", device_budget="96KiB", host_budget="64MiB",
                               gradient_staging="20KiB")
        optimizer: Any = engine
        if paged:
            engine.attach(model, lr=2.0**-6, optimizer="sgd")
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
        torch.manual_seed(1)
        for _ in range(3):
            weight = model.layer.weight
            own = weight.data
            weight.data = own * 0.5
            weight.sum()
            weight.data = own
            weight.sum()
            loss = model(torch.randn(4, WIDTH, requires_grad=True))
            if paged:
                engine.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        engine.close()
    assert losses[:3] == losses[3:]


def test_threads_meet_an_exchanged_storage_at_once() -> None:
    """p.data = … comes before the threads start: each of them sees the new values."""
    engine = pagoda.Engine(device="cpu", device_budget="96KiB", host_budget="64MiB",
                           gradient_staging="20KiB")
    model = make_model()
    engine.attach(model, lr=1e-2)
    kept: list[torch.Tensor] = []
    for turn in range(40):
        kept = [p.data for p in model.parameters()]
        own = [one.clone() for one in kept]
        for p in model.parameters():
            p.data = torch.full_like(p, turn)
        barrier = threading.Barrier(3)
        seen: list[list[float]] = []

        def read(barrier: threading.Barrier = barrier, seen: list[list[float]] = seen) -> None:
            barrier.wait()
            with torch.no_grad():
                seen.append([float(p.mean()) for p in model.parameters()])

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [[turn] * 6] * 3
        assert all(torch.equal(mine, one) for mine, one in zip(kept, own, strict=True))
    engine.release(model)
    engine.close()


def test_an_exchange_inside_an_operator_does_not_wait_for_one_that_needs_its_room() -> None:
    """The arena has room for three small pages; a custom function has two, another thread wants the large one."""
    page = WIDTH * WIDTH * 4
    engine = pagoda.Engine(device="cpu", device_budget=3 * page + 40 * 1024, host_budget="64MiB",
                           gradient_staging="40KiB")
    model = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH if i == 3 else WIDTH, bias=False) for i in range(6))
    engine.attach(model, lr=1e-2)
    first, second, small, large = (model[i].weight for i in range(4))
    inside, begun = threading.Event(), threading.Event()

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            inside.set()
            begun.wait()
            time.sleep(0.5)  # for the other thread to ask for room
            return x @ a + x @ b + x @ small

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0], None, None

    small.data, large.data = torch.ones(WIDTH, WIDTH), torch.ones(2 * WIDTH, WIDTH)
    sums: list[float] = []

    def apply() -> None:
        x = torch.zeros(1, WIDTH, requires_grad=True)
        sums.append(float(Inner.apply(x, first, second).detach().sum()))

    def read() -> None:
        inside.wait()
        begun.set()
        with torch.no_grad():
            sums.append(float(large.sum()))

    threads = [threading.Thread(target=run, daemon=True) for run in (apply, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(sums) == [0, 2 * WIDTH * WIDTH]
    engine.close()


WITHOUT_MEMORY = """
import resource, torch, pagoda
torch.set_num_threads(1)
model = torch.nn.Linear(3000, 3000, bias=False)
engine = pagoda.Engine(device="cpu", device_budget="120MiB", host_budget="400MiB",
                       gradient_staging="36MiB", parameters="host")
engine.attach(model, lr=1e-2, optimizer="sgd")
p = model.weight
with torch.no_grad():
    own = p.data
    expected = float(own.sum())
    p.data = torch.ones(3000, 3000)
    assert float(p.sum()) == 9e6
    p.data = own
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, ((int(line.split()[1]) << 10) + (20 << 20), resource.RLIM_INFINITY))
    assert float(p.sum()) == expected
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
engine.backward(model(torch.ones(1, 3000)).sum())
engine.step()
engine.close()
"""


def test_a_storage_comes_back_where_the_host_has_no_memory_for_a_copy() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python"),
                   "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True,
                          check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
@pytest.mark.parametrize("operate", [
    lambda own, p: own - p, lambda own, p: p - own, torch.equal, lambda own, p: torch.cat([own, p]),
    lambda own, p: torch._foreach_sub([own], [p])[0], lambda own, p: own.mul_(p),
    lambda own, p: own.copy_(p)],
    ids=["old-new", "new-old", "equal", "cat", "foreach", "mul_", "copy_"])
def test_one_operator_has_the_storage_of_before_and_the_new_one(
        operate: Callable[[torch.Tensor, torch.Tensor], Any], resident: bool) -> None:
    """In whichever order it meets them."""
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB")
    model, other = make_model(), make_model()
    engine.attach(model, lr=1e-2)
    results = []
    for which in (model, other):
        p = which[0].weight
        own = p.data
        p.data = torch.full((WIDTH, WIDTH), 3.0)
        with torch.no_grad():
            result = operate(own, p)
        results += [torch.as_tensor(result).clone(), own.clone(), p.detach().clone()]
    for mine, theirs in zip(results[:3], results[3:], strict=True):
        assert torch.equal(mine, theirs)
    engine.close()


@pytest.mark.parametrize("parameters", ["auto", "device"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
def test_a_pinned_parameter_keeps_its_storage(resident: bool, parameters: str) -> None:
    """A raw pointer of a pin shows the values of the storage that it was taken from."""
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB", parameters=parameters)
    model = make_model()
    engine.attach(model, lr=1e-2)
    weight = model[0].weight
    with engine.pin(weight):
        view, own = weight.detach().numpy(), weight.data
        before = view.copy()
        weight.data = torch.zeros(WIDTH, WIDTH)
        assert float(weight.detach().sum()) == 0  # of the tensor as it is
        assert (view == before).all()
        with pytest.raises(pagoda.UserError, match="'0.weight'.* is pinned.*release the pin"):
            engine.backward(loss_of(model, 0))
        assert (view == before).all()
    engine.backward(loss_of(model, 0))
    assert (own.clone().numpy() == before).all()
    if parameters == "auto":  # the storage that it had is a page, too, which can be pinned
        with engine.pin(own):
            view = own.numpy()
            weight.data = own
            assert torch.equal(weight.detach(), torch.from_numpy(before))
            with pytest.raises(pagoda.UserError, match="is pinned"):
                engine.step()
            assert (view == before).all()
    engine.close()


def test_a_parameter_in_no_group_is_a_plain_tensor_from_then_on() -> None:
    """Nobody follows its storages, and it can be pinned like any other."""
    engine = pagoda.Engine(device="cpu", device_budget="1MiB", host_budget="64MiB")
    model = make_model()
    frozen = model[0].weight.requires_grad_(False)
    engine.attach(model, groups=[{"params": [p for p in model.parameters() if p.requires_grad]}])
    frozen.data = torch.full((WIDTH, WIDTH), 2.0)
    with engine.pin(model):
        assert (frozen.numpy() == 2).all()
        frozen.numpy()[0] = 3
    engine.backward(loss_of(model, 0))
    engine.step()
    engine.finish()
    assert (frozen[0] == 3).all() and (frozen[1:] == 2).all()
    with pytest.raises(pagoda.UserError, match="not a parameter of this engine"):
        engine.pin(torch.zeros(3))
    engine.release(model)
    assert (frozen[0] == 3).all() and (frozen[1:] == 2).all()
    engine.close()


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


@pytest.mark.parametrize("whose", ["given", "own"])
@pytest.mark.parametrize("ends", ["release", "close"])
def test_an_array_of_a_storage_that_becomes_a_parameters_keeps_its_memory(whose: str, ends: str) -> None:
    """Of a plain tensor numpy() is allowed: what it has returned points at its memory for good."""
    width = 1024  # memory that goes is given back to the system, or to the next tensor
    engine = pagoda.Engine(device="cpu", device_budget="64MiB", host_budget="256MiB",
                           gradient_staging="5MiB", parameters="device")
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    engine.attach(model, lr=1e-2)
    p, given = model.weight, torch.rand(width, width)
    own = p.data
    expected = {"given": given.clone(), "own": own.clone()}[whose]
    array = given.numpy() if whose == "given" else None
    p.data = given
    float(p.detach().sum())
    if array is None:
        array = own.numpy()  # it is a plain tensor while p has another storage
    view = torch.from_numpy(array)
    for _ in range(3):
        for storage in (own, given):
            p.data = storage
            float(p.detach().sum())
            others = [torch.full((width, width), 7.0) for _ in range(4)]
            assert torch.equal(view, expected)
            del others
    p.data = own
    engine.backward(model(torch.ones(1, width)).sum())
    engine.step()
    after = p.detach().clone()
    if ends == "release":
        engine.release(model)
    engine.close()
    others = [torch.full((width, width), 7.0) for _ in range(4)]
    assert torch.equal(p, after) and len(others) == 4
    assert torch.equal(view, expected if whose == "given" else after)  # as with plain tensors


def zero_one(model: Any) -> None:
    model[0].weight.data = torch.zeros(WIDTH, WIDTH)


def zero_all(model: Any) -> None:
    for p in model.parameters():
        p.data = torch.zeros_like(p)


def to_half_and_back(model: Any) -> None:
    model.half()
    model.float()


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
@pytest.mark.parametrize(("exchange", "told"), [
    (zero_one, "'0.weight' came between.*is dropped: it keeps"),
    (zero_all, "6 parameters.*is dropped.*'0.weight'(, '[^']*'){4} and 1 more"),
    (to_half_and_back, "6 parameters.*is dropped")])
def test_an_exchange_while_updates_are_made_is_dropped_and_told(
        exchange: Callable[[Any], None], told: str, resident: bool, touched: bool) -> None:
    """Between the last backward() and step(): torch.optim would update the new values. It is told once."""
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
                before = [p.detach().clone() for p in model.parameters()]
                exchange(model)
                if touched:
                    float(model[0].weight.detach().sum())
                with pytest.raises(pagoda.UserError, match=told):
                    engine.step()
                assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            engine.step()
        finals.append([p.detach().clone() for p in model.parameters()])
        engine.release(model)
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*finals, strict=True))
