# SPDX-License-Identifier: Apache-2.0
"""Scenarios of rank_scenarios.py in which ranks have other tensors, arguments or settings than each
other, or one of them is refused what the others are not."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rank_scenario import (
    RANK,
    WIDTH,
    error_of,
    loss_of,
    make_engine,
    make_model,
    move_store_to_rank_0,
    scenario,
    started,
    train,
    values,
)

import pagoda


def say_error(call: Callable[[], Any]) -> None:
    print("error", error_of(call))


def parameters(**tensors: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    return model


@scenario
def other_tensors() -> None:
    """As many bytes of the same names, which mean something else on rank 1."""
    engine = make_engine(device_budget="1MiB", gradient_staging="256KiB")
    flat = torch.arange(32.)
    layout = (torch.contiguous_format, torch.channels_last)[RANK]
    for model in (
            parameters(w=torch.ones(4, dtype=(torch.bfloat16, torch.float16)[RANK])),
            torch.nn.Conv2d(4, 8, 3).to(memory_format=layout),
            parameters(w=torch.ones(((4, 16), (16, 4))[RANK])),
            parameters(a=flat[16 * RANK:][:16], b=flat[16 - 16 * RANK:][:16])):
        say_error(lambda model=model: engine.attach(model))  # type: ignore[misc]
    model = make_model()
    model.register_buffer("halved", torch.full((2,), 1.5).to((torch.bfloat16, torch.float16)[RANK]))
    engine.attach(model)
    print("buffer", model.halved.tolist())
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def names_that_are_long() -> None:
    engine = make_engine()
    model = inner = torch.nn.Module()
    for _ in range(14):
        inner.longmodule = inner = torch.nn.Module()  # type: ignore[assignment]
    inner.a = torch.nn.Parameter(torch.ones(64))
    inner.b = torch.nn.Parameter(torch.ones(64))
    engine.attach(model)
    engine.backward((inner.a + 100 * inner.b).sum())
    say_error(lambda: engine.grad(inner.a if RANK == 0 else inner.b))
    engine.close()


@scenario
def refused_release() -> None:
    """Nothing has changed: what came for a parameter that was thawed in the pass is still there."""
    engine, model = make_engine(early_updates=False), make_model()
    weight = model[1].weight  # type: ignore[index]
    weight.requires_grad_(False)
    engine.attach(model, lr=0.01)
    train(engine, model, 1)
    hook = model[2].weight.register_hook(lambda _: weight.requires_grad_(True))  # type: ignore[index]
    weight.requires_grad_(True)
    loss = loss_of(model)
    weight.requires_grad_(False)
    engine.backward(loss)
    hook.remove()
    before = weight.detach().clone()
    bias = model[0].bias.detach()  # type: ignore[index]
    kept = bias.clone()
    if RANK == 0:
        bias.zero_()
    say_error(lambda: engine.release(model))
    bias.copy_(kept)
    engine.step()
    print("moved", not torch.equal(weight, before))
    print("values", values(model))
    engine.close()


@scenario
def pins_leave_no_room() -> None:
    """Rank 1 has written to a parameter that rank 0 cannot look at: its pins fill the device."""
    engine = make_engine()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(9)))
    engine.attach(model, lr=0.01)
    train(engine, model, 1)
    weight = model[8].weight.detach()
    if RANK == 1:
        weight.add_(1)
    pins = []
    while RANK == 0:
        try:
            pins.append(engine.pin(model[len(pins)].weight))
        except pagoda.UserError:
            break
    say_error(engine.step)
    for pin in pins:
        pin.release()
    if RANK == 0:
        weight.add_(1)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def folder_that_is_no_text() -> None:
    engine, model = started()
    train(engine, model, 1)
    said = error_of(lambda: engine.save_pretrained("/proc/\udcff/out"))
    print("error", said.encode("utf-8", "backslashreplace").decode())

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("it cannot be shown")

    def fail() -> None:
        with engine._calls.together("save_pretrained", "the number", 1):
            if RANK == 0:
                raise Mute

    try:
        fail()
    except Mute:
        print("error mute")
    except pagoda.UserError as error:
        print("error", error)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def engines_one_after_another() -> None:
    """Rank 0 has the store, and rank 1 is ahead of it or behind."""
    move_store_to_rank_0()
    for turn in range(6):
        engine, model = started(join_timeout=10)
        train(engine, model, 1)
        print("values", values(model))
        if turn % 3 == RANK:
            time.sleep(0.2)
        engine.close()


@scenario
def other_timeouts() -> None:
    say_error(lambda: make_engine(timeout=3 + RANK, heartbeat=0))
    say_error(lambda: make_engine(timeout=3, heartbeat=0.5 + RANK / 2))


@scenario
def other_staging() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for zero in (1, 3):
            engine = make_engine(zero=zero, parameters="nvme", nvme=[folder], nvme_budget="8MiB",
                                 staging=("128KiB", "16KiB")[RANK], device_budget="1MiB",
                                 gradient_staging="256KiB", update_chunk="64KiB")
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
            engine.attach(model, lr=0.01)
            for _ in range(2):
                engine.backward(model(torch.ones(2, 256)).square().mean())
                engine.step()
            print("values", values(model))
            engine.close()


@scenario
def refused_in_the_window() -> None:
    """Rank 0 has had its last micro-batch, rank 1 has not: what one is refused, none does."""
    engine, model = started(accumulation=2)

    def micro_batches(count: int) -> None:
        for number in range(count):
            engine.backward(loss_of(model, number))

    for _ in range(2):
        micro_batches(2)
        engine.step()
    for call in (engine.grad_norm, engine.zero_grad,
                 lambda: engine.grad(model[0].weight)):  # type: ignore[index]
        micro_batches(2 - RANK)
        say_error(call)
        engine.step()
        print("values", values(model))
    if RANK == 1:
        engine.join()
    else:
        micro_batches(2)
        say_error(engine.zero_grad)
        engine.step()
        engine.join()
    print("values", values(model))
    engine.close()


@scenario
def wrong_arguments_of_one_rank() -> None:
    engine, model = make_engine(), make_model()
    mine: dict[str, Any]
    for wrong in ({"clip": -1.0}, {"clip": "much"}, {"lr": -1.0}, {"learning_rate": 0.1},
                  {"groups": [{"params": model.parameters(), "betas2": 1}]}, {"optimizer": "adamv"}):
        mine = wrong if RANK == 1 else {}
        say_error(lambda mine=mine: engine.attach(model, **mine))  # type: ignore[misc]
    say_error(lambda: engine.attach(model if RANK == 0 else 5))  # type: ignore[arg-type]
    engine.attach(model, lr=0.01)
    train(engine, model, 1)
    say_error(lambda: engine.release(make_model() if RANK == 1 else model))
    say_error(lambda: engine.release(5 if RANK == 1 else model))  # type: ignore[arg-type]
    train(engine, model, 1)
    print("values", values(model))
    engine.release(model)
    engine.close()


@scenario
def slow_disk_of_a_framework() -> None:
    """Rank 0 saves by itself, as Trainer lets it, and its disk takes longer than timeout."""
    engine, model = started(timeout=1)
    engine.serve_framework()
    train(engine, model, 1)
    if RANK == 0:
        fsync = os.fsync

        def slow(file: int) -> None:
            time.sleep(3)
            fsync(file)

        os.fsync = slow  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)  # type: ignore[operator]
        os.fsync = fsync
    train(engine, model, 1)
    print("values", values(model))
    engine.close()
