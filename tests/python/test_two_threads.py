# SPDX-License-Identifier: Apache-2.0
"""A second thread may read while the engine trains, and may not call it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_layers import loss_of, make_model

import pagoda
from pagoda import engine as engine_module

torch.set_num_threads(1)  # small work: threads would only wait


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


@pytest.mark.parametrize(("resident", "parameters"), [
    (True, "auto"), (True, "host"), (False, "auto"), (False, "host")])
def test_another_thread_reads_what_a_parameter_has_in_turns(resident: bool, parameters: str) -> None:
    """A plain tensor keeps its values, whichever parameter has its storage meanwhile."""
    budget = "64MiB" if resident else "96KiB"
    engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                           gradient_staging="20KiB", parameters=parameters)
    model = make_model()
    engine.attach(model, lr=1e-2)
    tensors = [[p.data for p in model.parameters()]]
    for p in model.parameters():  # not one that is plain: an operator may have begun on that
        p.data = torch.empty_like(p)
        p.sum()
    tensors.append([p.data for p in model.parameters()])
    for value, of_all in enumerate(tensors):
        for one in of_all:
            one.fill_(value)
    over = threading.Event()
    errors: list[object] = []

    def read(start: int) -> None:
        turn = start
        try:
            while not over.is_set():
                value, number = turn % 2, turn // 2 % len(tensors[0])
                low, high = torch.aminmax(tensors[value][number])
                if (float(low), float(high)) != (value, value):
                    errors.append((value, number, float(low), float(high)))
                if turn % 7 == 0:  # both at once
                    apart = torch.sub(tensors[1][number], tensors[0][number])
                    if not bool((apart == 1).all()):
                        errors.append((number, apart))
                turn += 1
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(start,)) for start in range(2)]
    for reader in readers:
        reader.start()
    with torch.no_grad():
        for turn in range(120):
            for number, p in enumerate(model.parameters()):
                p.data = tensors[turn % 2][number]
                if float(p.sum()) != p.numel() * (turn % 2):
                    errors.append((turn, number))
    over.set()
    for reader in readers:
        reader.join()
    assert not errors, errors[:3]
    engine.release(model)
    engine.close()


@pytest.mark.parametrize("how", ["engine", "plain"])
@pytest.mark.parametrize("call", ["grad_norm", "save_pretrained"])
def test_calls_of_two_threads_are_refused(call: str, how: str, tmp_path: Path) -> None:
    """A call in which ranks meet would end the micro-batch under the pass: both waited for ever."""
    engine = pagoda.Engine(device="cpu", device_budget="1MiB", early_updates=False)
    model = make_model()
    engine.attach(model)
    refused: list[str] = []

    def look(_: torch.Tensor) -> None:
        def run() -> None:
            try:
                engine.save_pretrained(tmp_path) if call == "save_pretrained" else \
                    getattr(engine, call)()
            except pagoda.UserError as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    loss = loss_of(model, 0)
    loss.register_hook(look)
    if how == "engine":
        engine.backward(loss)
        assert len(refused) == 1 and "another thread is in backward()" in refused[0]
    else:
        # The second pass is known when its first gradient has come.
        last = next(model.parameters()).register_hook(look)
        loss.backward()
        last.remove()
        assert "a backward pass runs on another thread" in refused[-1]
    engine.step()
    engine.close()


@pytest.mark.parametrize("end", ["close", "release"])
@pytest.mark.parametrize("returns", [False, True], ids=["new", "returned"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
def test_the_engine_ends_while_another_thread_meets_new_storages(resident: bool, returns: bool, end: str) -> None:
    """What a parameter was given is what it has afterwards, whoever comes first."""
    for _ in range(8):
        engine = pagoda.Engine(device="cpu", device_budget="64MiB" if resident else "96KiB",
                               host_budget="64MiB", gradient_staging="20KiB")
        model = make_model()
        engine.attach(model, lr=1e-2)
        engine.backward(loss_of(model, 0))
        engine.step()
        expected = [torch.full_like(p, 3) for p in model.parameters()]
        kept = []
        for i, p in enumerate(model.parameters()):
            own = p.data
            kept.append(own)
            p.data = expected[i].clone()
            if returns:
                expected[i] = own.clone()
                p.data = own
        started = threading.Event()
        errors: list[BaseException] = []

        def read(model: torch.nn.ModuleList = model, started: threading.Event = started,
                 errors: list[BaseException] = errors) -> None:
            try:
                with torch.no_grad():
                    started.set()
                    for _ in range(20):
                        [float(p.sum()) for p in model.parameters()]
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        started.wait()
        engine.close() if end == "close" else engine.release(model)
        reader.join()
        assert not errors, errors
        for p, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p, value)
        engine.close()


def test_close_waits_for_a_save_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads parameters between two calls of the library, and its files are complete."""
    engine = pagoda.Engine(device="cpu", device_budget="96KiB", host_budget="64MiB",
                           gradient_staging="20KiB")
    model = make_model()
    engine.attach(model)
    inside, go_on = threading.Event(), threading.Event()
    save = engine_module.save

    def slow(*arguments: object) -> None:
        inside.set()
        go_on.wait(60)
        save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "save", slow)
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    saving = threading.Thread(target=run, args=(lambda: engine.save_pretrained(tmp_path),))
    saving.start()
    assert inside.wait(60)
    closing = threading.Thread(target=run, args=(engine.close,))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    go_on.set()
    for thread in (saving, closing):
        thread.join(60)
    assert not errors, errors
    assert (tmp_path / "model.safetensors").exists()
    assert all(p.isfinite().all() for p in model.parameters())


def test_two_threads_close_an_engine_at_once() -> None:
    for _ in range(10):
        engine = pagoda.Engine(device="cpu", device_budget="96KiB", host_budget="64MiB",
                               gradient_staging="20KiB")
        model = make_model()
        engine.attach(model, lr=1e-2)
        engine.backward(loss_of(model, 0))
        engine.step()
        expected = [p.detach().clone() for p in model.parameters()]
        barrier = threading.Barrier(2)
        errors: list[BaseException] = []

        def close(engine: pagoda.Engine = engine, barrier: threading.Barrier = barrier,
                  errors: list[BaseException] = errors) -> None:
            barrier.wait()
            try:
                engine.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        for p, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p, value)
