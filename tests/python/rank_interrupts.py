# SPDX-License-Identifier: Apache-2.0
"""Scenarios of rank_scenarios.py in which Ctrl-C comes while rank 0 waits for rank 1."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
from pagoda import engine as engine_module
from rank_scenario import RANK, error_of, loss_of, make_engine, scenario, started, train, values

LONG = 30.0
"""Seconds for which rank 1 goes on if nobody ends it: a test that has to wait so long has failed."""


def interrupt_soon() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def compute_until_told(model: torch.nn.Module, seconds: float = LONG) -> str:
    """As a rank does that is slow: it uses its parameters, and is in no call. Returns why it ended."""
    began = time.monotonic()
    why = "nothing"
    while why == "nothing" and time.monotonic() - began < seconds:
        why = error_of(lambda: loss_of(model))
    return why


@scenario
def interrupt_caught_in_step() -> None:
    """The call ends by itself soon after: the engine is not harmed."""
    engine, model = started()
    train(engine, model, 2)
    engine.backward(loss_of(model))
    if RANK == 0:
        interrupt_soon()
        try:
            engine.step()
            time.sleep(LONG)
        except KeyboardInterrupt:
            print("interrupted")
        if engine.stats()["steps"] == 2:  # it came before the call began
            engine.step()
    else:
        compute_until_told(model, 1)
        engine.step()
    train(engine, model, 2)
    print("values", values(model))
    engine.close()


@scenario
def interrupted_for_good_in_step() -> None:
    """Uncaught, and rank 1 does not come."""
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        interrupt_soon()
        train(engine, model, 1)
    else:
        print("told", compute_until_told(model))


@scenario
def interrupted_in_attach() -> None:
    engine, model = started()
    engine.release(model)
    if RANK == 0:
        interrupt_soon()
        engine.attach(model)
    else:
        time.sleep(4)
        print("told", error_of(lambda: engine.attach(model)))


@scenario
def interrupted_in_save() -> None:
    engine, model = started()
    if RANK == 0:
        interrupt_soon()
        engine.save_pretrained("never")
    else:
        print("told", compute_until_told(model))


@scenario
def interrupted_in_close() -> None:
    """Rank 0 has ended and serves its shards to rank 1."""
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        interrupt_soon()
        engine.close()
    else:
        print("told", compute_until_told(model))


@scenario
def interrupted_while_connecting() -> None:
    if RANK == 0:
        interrupt_soon()
    else:
        time.sleep(4)
    print("told", error_of(make_engine))


@scenario
def interrupted_with_another_handler() -> None:
    """A handler that raises nothing asks for a graceful end: the call goes on."""
    engine, model = started()
    train(engine, model, 2)
    asked: list[int] = []
    if RANK == 0:
        interrupt_soon()
        signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    else:
        compute_until_told(model, 4)
    train(engine, model, 1)
    print("asked", asked)
    print("values", values(model))
    engine.close()


@scenario
def interrupted_in_forward() -> None:
    """Rank 1 is stopped, and rank 0 waits for its shards."""
    engine, model = started(device_budget="28KiB")
    train(engine, model, 2)
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if RANK == 1:
        store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        print("told", compute_until_told(model))
        return
    stopped = int(store.get("stopped"))
    time.sleep(0.5)
    interrupt_soon()
    try:
        while True:
            loss_of(model)
    finally:
        os.kill(stopped, signal.SIGCONT)


@scenario
def interrupted_as_it_returns() -> None:
    """The library has made the engine, and the package does not have it yet."""
    if RANK == 0:
        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        engine_module.watch = interrupted  # type: ignore[assignment]
        make_engine()
    else:
        print("told", error_of(started))
