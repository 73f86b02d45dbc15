# SPDX-License-Identifier: Apache-2.0
"""An engine ends as soon as nobody refers to it, without the garbage collector: a notebook's cell that
makes an engine and attaches its model may run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import engine, loss_of, net, raises, trains

import pagoda


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def only_attached(paged: pagoda.Engine, model: torch.nn.Module) -> Any:
    return paged.attach(model)


def with_a_scheduler(paged: pagoda.Engine, model: torch.nn.Module) -> Any:
    schedule = torch.optim.lr_scheduler.StepLR(paged.attach(model), 1)
    trains(paged, model)
    schedule.step()
    return schedule


def trained(paged: pagoda.Engine, model: torch.nn.Module) -> Any:
    paged.attach(model, clip=1.0)
    trains(paged, model)
    paged.backward(loss_of(model))
    paged.grad_norm()
    paged.step()
    with paged.pin(model), paged.activations():
        loss_of(model)
    return paged.stats()


def served(paged: pagoda.Engine, model: torch.nn.Module) -> Any:
    paged.attach(model)
    paged.serve_framework()
    trains(paged, model)


def released(paged: pagoda.Engine, model: torch.nn.Module) -> Any:
    paged.attach(model)
    trains(paged, model)
    paged.release(model)


@pytest.mark.parametrize("use", [only_attached, with_a_scheduler, trained, served, released])
def test_an_engine_ends_with_its_last_reference(
        use: Callable[[pagoda.Engine, torch.nn.Module], Any]) -> None:
    paged, model = engine(), net()
    with paged.build():
        torch.nn.Linear(2, 2)
    kept = use(paged, model)
    reference = weakref.ref(paged)
    del paged
    assert reference() is None
    again = engine()  # the cell runs once more
    again.attach(model)
    trains(again, model)
    del kept


def test_a_trainers_engine_ends_with_its_last_reference(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    import pagoda.trainer

    paged, model = engine(), net()
    keywords = pagoda.trainer.arguments(
        paged, model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    reference = weakref.ref(paged)
    del paged
    assert reference() is not None  # the callback has it
    del keywords
    assert reference() is None
    assert model not in pagoda.trainer._attached  # another Trainer may wrap it
    assert "save_pretrained" not in vars(model)


def test_a_deepspeed_engine_ends_with_its_last_reference() -> None:
    model = net()
    wrapped, optimizer, _, _ = pagoda.initialize(
        model=model, device="cpu", device_budget="64KiB", config={
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    wrapped.backward(loss_of(model))
    wrapped.step()
    reference = weakref.ref(wrapped.engine)
    del wrapped
    assert reference() is None
    raises(optimizer.step, "the engine of this optimizer no longer exists")


def test_an_optimizer_whose_engine_is_gone_says_so() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trains(paged, model)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    del paged
    for call in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.send):
        raises(call, "the engine of this optimizer no longer exists: keep a reference to it")
    schedule.step()  # as after release()


def test_another_engines_parameter_names_the_way_out() -> None:
    first, second, model = engine(), engine(), net()
    first.attach(model)
    raises(lambda: second.attach(model),
           r"'0\.weight' belongs to another engine: call release\(\) of that engine first")
    first.release()
    second.attach(model)
    trains(second, model)
