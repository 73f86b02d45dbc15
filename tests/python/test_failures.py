# SPDX-License-Identifier: Apache-2.0
"""An error ends the operator or the call that met it. The engine trains on, with the bits of a run
that never had the error, saves and releases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_net import (WIDTH, Mine, Mistake, Net, check_goes_on, loss_of, make_engine, micro_batch, net,
                         plain_micro_batch)

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait


# What goes wrong between two steps. Each raises what is named beside it.


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


@pytest.mark.parametrize("mistake", BETWEEN_STEPS)
def test_between_steps(mistake: Mistake, tmp_path: Path) -> None:
    check_goes_on({}, tmp_path, mistake, BETWEEN_STEPS[mistake])


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
