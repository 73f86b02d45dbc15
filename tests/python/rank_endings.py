# SPDX-License-Identifier: Apache-2.0
"""Scenarios of rank_scenarios.py in which a rank ends: it raises, exits, is interrupted, or closes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from rank_scenario import (
    RANK,
    SCENARIOS,
    error_of,
    loss_of,
    make_engine,
    make_model,
    scenario,
    started,
    train,
    values,
)
from torch import distributed

import pagoda


def train_until(end: Callable[[], Any], engine: pagoda.Engine, model: torch.nn.Module) -> None:
    """Rank 0 ends after two of five steps."""
    train(engine, model, 2)
    if RANK == 0:
        end()
    train(engine, model, 3)


def train_in_with_until(end: Callable[[], Any]) -> None:
    with make_engine() as engine:
        with engine.build():
            model = make_model()
        engine.attach(model)
        train_until(end, engine, model)


def fail() -> None:
    raise ValueError("the data is gone")


@scenario
def uncaught() -> None:
    train_until(fail, *started())


@scenario
def uncaught_in_with() -> None:
    train_in_with_until(fail)


@scenario
def uncaught_with_another_hook() -> None:
    """Somebody else's hook takes the place of ours."""
    engine, model = started()
    sys.excepthook = lambda kind, error, trace: print("their hook", error)
    train_until(fail, engine, model)


@scenario
def uncaught_in_backward() -> None:
    engine, model = started()
    train(engine, model, 2)

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("the data is gone")

    loss = loss_of(model)
    engine.backward(Breaks.apply(loss) if RANK == 0 else loss)
    engine.step()


@scenario
def graph_outlives_close() -> None:
    """Rank 1 has a graph with saved activations when it closes its engine, and goes on."""
    engine, model = started(timeout=1000)
    train(engine, model, 2)
    with engine.activations("host", least=1):
        loss = loss_of(model)
    kept = loss if RANK == 1 else None
    del loss
    engine.close()
    others = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    others.set(f"closed {RANK}", "")
    others.wait(["closed 0", "closed 1"])  # nobody ends before both have closed
    del kept


def close_gives_back(zero: int, pause: Callable[[], float] = lambda: 0, **config: Any) -> None:
    engine, model = started(zero=zero, **config)
    train(engine, model, 3)
    time.sleep(pause())
    engine.close()
    for p in model.parameters():
        print(p.detach().numpy().tobytes().hex())


def used_by(engine: pagoda.Engine) -> dict[str, int]:
    holders = engine.stats()["tiers"]["host"]["holders"]
    return {name: holder["used"] for name, holder in holders.items() if holder["used"] > 0}


def attach_fails_on_one(zero: int) -> None:
    """Rank 1's budget has no room: on both ranks the model and the engine are as before."""
    engine = make_engine(zero=zero, host_budget="64MiB" if RANK == 0 else "1MiB")
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(30)))
    before = [p.detach().numpy().tobytes() for p in model.parameters()]
    used = used_by(engine)
    assert "host_budget" in error_of(lambda: engine.attach(model))
    assert used_by(engine) == used, (used, used_by(engine))
    assert [p.detach().numpy().tobytes() for p in model.parameters()] == before
    small = make_model()
    engine.attach(small)
    train(engine, small, 2)
    engine.close()


for _zero in (0, 3):
    SCENARIOS[f"attach_fails_on_one_{_zero}"] = functools.partial(attach_fails_on_one, _zero)
for _zero in (0, 2, 3):
    SCENARIOS[f"close_gives_back_{_zero}"] = functools.partial(close_gives_back, _zero)
# One rank logs or evaluates for a while; or both leave the engine alone for longer than the timeout.
SCENARIOS["close_gives_back_later"] = functools.partial(close_gives_back, 3, lambda: 2.0 * RANK)
SCENARIOS["close_gives_back_after_a_pause"] = functools.partial(close_gives_back, 3, lambda: 3.5,
                                                                timeout=2)


@scenario
def uncaught_in_training_thread() -> None:
    """The thread that trains dies; the main thread waits for it, and ends well."""
    thread = threading.Thread(target=uncaught)
    thread.start()
    thread.join()
    if RANK == 0:
        time.sleep(3)  # the others do not need the end of the process


@scenario
def uncaught_in_other_thread() -> None:
    """A thread of the user's that has nothing to do with training."""
    engine, model = started()

    def fails() -> None:
        raise ValueError("of no concern")

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    train(engine, model, 2)
    print("values", values(model))
    engine.close()


@scenario
def uncaught_in_a_fork() -> None:
    """A child that fails is not the rank."""
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        child = os.fork()
        if child == 0:
            raise ValueError("of the child alone")
        os.waitpid(child, 0)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def interrupted() -> None:
    def interrupt() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    train_until(interrupt, *started())


@scenario
def interrupted_in_step() -> None:
    """The signal comes while rank 0 waits for rank 1."""
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            loss_of(model)
    train(engine, model, 3)


@scenario
def exits_with_status() -> None:
    train_until(lambda: sys.exit(3), *started())


@scenario
def exits_with_status_in_with() -> None:
    train_in_with_until(lambda: sys.exit(3))


@scenario
def exits_at_once() -> None:
    train_until(lambda: os._exit(3), *started())


@scenario
def caught() -> None:
    """An exception that the script survives is nobody's concern."""
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        try:
            raise ValueError("caught")
        except ValueError:
            pass
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def interactive() -> None:
    """An exception in a notebook's cell: the interpreter goes on, and so do the ranks."""
    sys.ps1 = ">>> "
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        try:
            raise ValueError("in a cell")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


def train_and_fail(_: int) -> None:
    train_until(fail, *started())


def end_in_children(start: Callable[[], Any]) -> None:
    """The ranks are children of multiprocessing, which catches what they raise."""
    try:
        start()
    except Exception as error:
        print("child", str(error).splitlines()[-1])
        sys.exit(1)


@scenario
def uncaught_in_a_child() -> None:
    def start() -> None:
        child = multiprocessing.get_context("fork").Process(target=train_and_fail, args=(0,))
        child.start()
        child.join()
        sys.exit(child.exitcode)

    end_in_children(start)


@scenario
def uncaught_in_a_child_of_torch() -> None:
    end_in_children(lambda: torch.multiprocessing.start_processes(
        train_and_fail, nprocs=1, start_method="fork"))


@scenario
def forked_while_an_error_is_handled() -> None:
    """It is none of the child's."""
    def work() -> None:
        engine, model = started()
        train(engine, model, 1)
        print("values", values(model))

    try:
        fail()
    except ValueError:
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
