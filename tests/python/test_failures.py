# SPDX-License-Identifier: Apache-2.0
"""An error ends the operator or the call that met it. The engine trains on, with the bits of a run
that never had the error, saves and releases."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import failing
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

WIDTH = 64


class Net(torch.nn.Module):
    """Six layers, of which the fourth is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.reentrant = False
        self.failing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 2, 3, 4, 3, 5):
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
            if self.failing and number == 3:
                x = failing(x, Mine)
                self.failing = False  # after its first use: backward meets it second
        return x


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def make_engine(**more: Any) -> pagoda.Engine:
    """Two layers fit, and not three."""
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1,
                            **more})


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    return (model(x) - x).square().mean()


def micro_batch(engine: pagoda.Engine, model: torch.nn.Module, step: int) -> None:
    engine.backward(loss_of(model, step))


def plain_micro_batch(engine: pagoda.Engine, model: torch.nn.Module, step: int) -> None:
    loss_of(model, step).backward()


class Mine(Exception):
    """What the user's own code throws."""


def failing_loss(model: Net, step: int = 0) -> torch.Tensor:
    """Its backward fails when some parameters have their gradients, and one a part of it."""
    model.failing = True
    return loss_of(model, step)


# What goes wrong between two steps. Each raises what is named beside it.

Mistake = Callable[[pagoda.Engine, Net], Any]


def too_large(engine: pagoda.Engine, model: Net) -> None:
    torch.addcmul(*(model.layers[i].weight for i in range(3)))


def too_large_and_in_place(engine: pagoda.Engine, model: Net) -> None:
    with torch.no_grad():
        model.layers[0].weight.addcmul_(model.layers[1].weight, model.layers[2].weight)


def too_large_beside_a_pin(engine: pagoda.Engine, model: Net) -> None:
    with engine.pin(model.layers[5]):
        held = model.layers[5].weight.detach().numpy()
        assert held[0, 0] == model.layers[5].weight[0, 0]
        try:
            torch.nn.functional.bilinear(torch.ones(1, 8), torch.ones(1, 8),
                                         model.layers[0].weight.view(64, 8, 8),
                                         model.layers[5].bias + model.layers[1].weight[0])
            torch.addcmul(*(model.layers[i].weight for i in (5, 0, 1)))
        finally:
            model.layers[5].weight.detach().numpy()


def too_much_pinned(engine: pagoda.Engine, model: Net) -> None:
    with engine.pin(model):
        pass


def a_hook_in_forward(engine: pagoda.Engine, model: Net) -> None:
    def hook(*_: Any) -> None:
        raise Mine

    handle = model.layers[3].register_forward_hook(hook)
    try:
        loss_of(model)
    finally:
        handle.remove()


def a_shape(engine: pagoda.Engine, model: Net) -> None:
    model(torch.ones(1, WIDTH + 1))


def a_type(engine: pagoda.Engine, model: Net) -> None:
    model(torch.ones(1, WIDTH, dtype=torch.float64))


def memory(engine: pagoda.Engine, model: Net) -> None:
    model.layers[0].weight.expand(1 << 40, WIDTH, WIDTH).clone()


def a_raw_pointer(engine: pagoda.Engine, model: Net) -> None:
    for layer in model.layers:
        layer.weight.detach().numpy()


def an_operator_without_a_kernel(engine: pagoda.Engine, model: Net) -> None:
    torch.cholesky_inverse(model.layers[0].weight.half())


def an_interrupt_in_forward(engine: pagoda.Engine, model: Net) -> None:
    def hook(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    handle = model.layers[2].register_forward_pre_hook(hook)
    try:
        loss_of(model)
    finally:
        handle.remove()


def an_error_while_building(engine: pagoda.Engine, model: Net) -> None:
    with engine.build():
        torch.nn.Linear(8, 8)
        raise Mine


def a_layer_too_large_while_building(engine: pagoda.Engine, model: Net) -> None:
    with engine.build():
        torch.nn.Linear(200, 200)


def a_hook_that_packs(engine: pagoda.Engine, model: Net) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        raise Mine

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        loss_of(model)


def a_worker(engine: pagoda.Engine, model: Net) -> None:
    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> torch.Tensor:
            return model.layers[0].weight * 2

    list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))


def a_second_engine(engine: pagoda.Engine, model: Net) -> None:
    other = make_engine()
    try:
        other.attach(model)
    finally:
        other.close()


def another_optimizer(engine: pagoda.Engine, model: Net) -> None:
    engine.attach(model, optimizer="adagrad")


def a_stranger_pinned(engine: pagoda.Engine, model: Net) -> None:
    engine.pin(torch.nn.Linear(2, 2))


def a_graph_used_twice(engine: pagoda.Engine, model: Net) -> None:
    loss = loss_of(model)
    torch.autograd.grad(loss, list(model.parameters()))
    torch.autograd.grad(loss, list(model.parameters()))


BETWEEN_STEPS: dict[Mistake, tuple[type[BaseException], str | None]] = {
    too_large: (RuntimeError, "raise device_budget|device_budget"),
    too_large_and_in_place: (RuntimeError, "device_budget"),
    too_large_beside_a_pin: (RuntimeError, "device_budget"),
    too_much_pinned: (pagoda.UserError, "device_budget"),
    a_hook_in_forward: (Mine, None),
    a_shape: (RuntimeError, "shapes cannot be multiplied"),
    a_type: (RuntimeError, "dtype"),
    memory: (RuntimeError, "memory"),
    a_raw_pointer: (RuntimeError, "engine.pin"),
    an_operator_without_a_kernel: (RuntimeError, "not implemented"),
    an_interrupt_in_forward: (KeyboardInterrupt, None),
    an_error_while_building: (Mine, None),
    a_layer_too_large_while_building: (RuntimeError, "device_budget"),
    a_hook_that_packs: (Mine, None),
    a_worker: (RuntimeError, "forked child"),
    a_second_engine: (pagoda.UserError, "belongs to another engine"),
    another_optimizer: (pagoda.UserError, "attached already"),
    a_stranger_pinned: (pagoda.UserError, "not a parameter of this engine"),
    a_graph_used_twice: (RuntimeError, "second time"),
}


def check_goes_on(config: dict[str, Any], folder: Path, mistake: Mistake,
                  error: tuple[type[BaseException], str | None], batch: Any = micro_batch,
                  reentrant: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Two steps, the mistake, two steps, a saved model and a released one: as without it."""
    runs = []
    for wrong in (True, False):
        engine, model = make_engine(**config), net(dtype)
        model.reentrant = reentrant
        engine.attach(model, lr=1e-2)
        for step in range(4):
            if wrong and step == 2:
                for _ in range(2):  # the second time finds what the first one left
                    with pytest.raises(error[0], match=error[1]):
                        mistake(engine, model)
            batch(engine, model, step)
            engine.step()
        engine.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        engine.release(model)
        engine.close()
        left = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert all(torch.equal(left[name], value) for name, value in saved.items())
        runs.append(left)
    assert [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])] == []


@pytest.mark.parametrize("mistake", BETWEEN_STEPS)
def test_between_steps(mistake: Mistake, tmp_path: Path) -> None:
    check_goes_on({}, tmp_path, mistake, BETWEEN_STEPS[mistake])


# Passes that fail: gradients that have come stay, as ever with torch, until zero_grad().


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


def test_an_operator_of_another_thread_goes_on_beside_one_that_fails() -> None:
    engine, model = make_engine(), net()
    engine.attach(model)
    ended = threading.Event()
    wrong: list[float] = []

    def read() -> None:
        with torch.no_grad():
            first = [float(layer.weight.sum()) for layer in model.layers]
            while not ended.is_set():
                wrong.extend(float(layer.weight.sum()) - value
                             for layer, value in zip(model.layers, first, strict=True))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(50):
            with pytest.raises(RuntimeError, match="device_budget"):
                torch.addcmul(*(model.layers[i].weight for i in range(3)))
    finally:
        ended.set()
        reader.join()
    assert not any(wrong)
    engine.backward(loss_of(model))
    engine.step()
    engine.close()


# Gradients without a step.


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("batch", [micro_batch, plain_micro_batch])
def test_release_after_a_backward_without_step(batch: Any, steps: int, reentrant: bool,
                                               early: bool) -> None:
    values = []
    for extra in (True, False):
        engine, model = make_engine(early_updates=early, accumulation=2), net()
        model.reentrant = reentrant
        engine.attach(model, lr=1e-2)
        for step in range(steps):
            batch(engine, model, step)
            batch(engine, model, step + 10)
            engine.step()
        for number in range(2 if extra else 0):
            batch(engine, model, 20 + number)
        engine.release(model)
        assert all(parameter.grad is None for parameter in model.parameters())
        values.append([parameter.detach().clone() for parameter in model.parameters()])
        engine.attach(model, lr=1e-2)  # and nothing of it is left
        for step in range(2):
            batch(engine, model, step)
            engine.step()
        values[-1] += [parameter.detach().clone() for parameter in model.parameters()]
        engine.close()
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ranks_release_after_a_backward_without_step(zero: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(Path(__file__).with_name("unstepped_rank.py")), str(zero)]
    result = subprocess.run(command, check=False, text=True, capture_output=True, timeout=200,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
