# SPDX-License-Identifier: Apache-2.0
"""How engines end, and what becomes of the weights that they have then."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_scenarios, shown

import pagoda

WIDTH = 32


def make_engine(**config: Any) -> pagoda.Engine:
    settings: dict[str, Any] = {"device": "cpu", "device_budget": "48KiB", "host_budget": "64MiB",
                                "gradient_staging": "16KiB", "staging": "16KiB"}
    return pagoda.Engine(**{**settings, **config})


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize("end", ["close", "release"])
def test_a_thread_that_reads_goes_on_when_the_engine_ends(end: str) -> None:
    for _ in range(5):
        engine, model = make_engine(), make_model()
        engine.attach(model)
        train(engine, model, 1)
        stop = threading.Event()
        errors: list[Exception] = []

        def read(model: torch.nn.Module = model, stop: threading.Event = stop,
                 errors: list[Exception] = errors) -> None:
            while not stop.is_set():
                try:
                    for parameter in model.parameters():
                        parameter.detach().norm()
                except RuntimeError as error:
                    errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        train(engine, model, 2)
        if end == "close":
            engine.close()
        else:
            engine.release(model)
        out = model(torch.ones(1, WIDTH))
        stop.set()
        reader.join()
        assert not errors, errors[0]
        assert out.isfinite().all()


def train(engine: pagoda.Engine, model: torch.nn.Module, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(model(x).square().mean())
        engine.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained() -> list[torch.Tensor]:
    """What three steps make of the model."""
    engine = make_engine()
    model = make_model()
    engine.attach(model, lr=0.01)
    train(engine, model)
    out = values(model)
    engine.release(model)
    engine.close()
    return out


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_plain(model: torch.nn.Module, wanted: list[torch.Tensor]) -> None:
    for p, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(torch.from_numpy(p.detach().numpy().copy()), value)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()  # no hook of the engine is left
    assert all(p.grad is not None for p in model.parameters())


def test_nobody_waits_for_a_graph_that_outlives_its_engine(tmp_path: Path) -> None:
    """A saved activation keeps the memory of a closed engine; the other ranks can end."""
    ended = run_scenarios(["graph_outlives_close"], tmp_path)["graph_outlives_close"]
    assert [one.code for one in ended] == [0, 0], shown(ended)


def test_a_with_block_leaves_the_model_its_weights() -> None:
    with no_warning():
        with make_engine() as engine:
            model = make_model()
            optimizer = engine.attach(model, lr=0.01)
            train(engine, model)
        assert_plain(model, trained())
    with pytest.raises(pagoda.UserError, match="engine has been closed"):
        optimizer.step()


def test_pages_without_a_step_or_an_attach_become_plain_tensors() -> None:
    with make_engine() as engine:
        with engine.build():
            model = make_model()
    assert_plain(model, values(make_model()))


def test_gradients_of_a_backward_without_its_step_are_dropped() -> None:
    with make_engine() as engine:
        model = make_model()
        engine.attach(model, lr=0.01)
        train(engine, model)
        engine.backward(model(torch.ones(1, WIDTH)).sum())
    assert_plain(model, trained())


def test_an_engine_that_is_dropped_gives_the_weights_back() -> None:
    def train_in_a_function() -> torch.nn.Module:
        engine = make_engine()
        model = make_model()
        engine.attach(model, lr=0.01)
        train(engine, model)
        return model

    with no_warning():
        model = train_in_a_function()
        gc.collect()
        assert_plain(model, trained())


def test_an_exception_in_the_block_leaves_the_weights() -> None:
    with pytest.raises(KeyboardInterrupt), make_engine() as engine:
        model = make_model()
        engine.attach(model, lr=0.01)
        train(engine, model)
        raise KeyboardInterrupt
    assert_plain(model, trained())


def test_a_pinned_page_keeps_its_pointer_and_its_parameter_its_weights() -> None:
    engine = make_engine()
    model = make_model()
    engine.attach(model, lr=0.01)
    train(engine, model)
    pin = engine.pin(model[0].weight)
    view = model[0].weight.detach().numpy()
    engine.close()
    assert_plain(model, trained())
    assert (torch.from_numpy(view) == trained()[0]).all()
    pin.release()


def test_weights_that_cannot_be_given_back_are_named() -> None:
    engine = make_engine()
    model = make_model()
    engine.attach(model, lr=0.01)
    train(engine, model)
    with engine.build():
        unread = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        other = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
    pins = [engine.pin(model), engine.pin(other)]  # they leave no room to read the last page
    with pytest.warns(RuntimeWarning) as told:
        engine.close()
    text = str(told[0].message)
    assert "10 parameters" in text and "'0.weight'" in text and "and 5 others" in text, text
    assert "engine.release(model)" in text and "engine.save_pretrained(directory)" in text, text
    assert "device_budget" in text, text
    for pin in pins:
        pin.release()
    with pytest.raises(RuntimeError, match=r"went with its engine.*release"):
        unread(torch.ones(1, WIDTH))


def test_what_has_been_saved_is_not_lost(tmp_path: Path) -> None:
    engine = make_engine()
    model = make_model()
    engine.attach(model, lr=0.01)
    train(engine, model)
    engine.save_pretrained(tmp_path / "out")
    engine._handle.fail("a test")
    with no_warning():
        engine.close()


def test_a_failed_engine_says_what_went_with_it() -> None:
    engine = make_engine()
    model = make_model()
    engine.attach(model, lr=0.01)
    train(engine, model)
    engine._handle.fail("the disk is on fire")
    with pytest.warns(RuntimeWarning, match="8 parameters.*the disk is on fire") as told:
        engine.close()
    text = str(told[0].message)  # nothing that a failed engine cannot do any more
    assert "values are lost: load what was saved before" in text, text
    assert "release(" not in text and "save_pretrained(" not in text, text


def test_the_end_of_the_interpreter_is_silent() -> None:
    script = ("import sys, torch, pagoda\n"
              "engine = pagoda.Engine(device='cpu', device_budget='1MiB')\n"
              "model = torch.nn.Linear(8, 8)\n"
              "engine.attach(model)\n"
              "engine.backward(model(torch.ones(1, 8)).sum())\n"
              "engine.step()\n")
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True,
                          text=True, timeout=120, check=False,
                          env={**os.environ,
                               "PYTHONPATH": str(Path(__file__).parents[2] / "python")})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("how", ["0", "2", "3", "later", "after_a_pause"])
def test_ranks_give_the_weights_back_together(how: str, tmp_path: Path) -> None:
    name = f"close_gives_back_{how}"
    ended = run_scenarios([name], tmp_path)[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert ended[0].output == ended[1].output != "", shown(ended)
    assert "Warning" not in ended[0].output, shown(ended)


def test_no_wait_for_a_stopped_rank_outlives_the_timeout(tmp_path: Path) -> None:
    name = "holder_of_the_store_is_stopped"
    ended = run_scenarios([name], tmp_path, limit=30)[name]
    assert [one.code for one in ended] == [-9, 0], shown(ended)  # rank 1 has killed rank 0
    assert "rank 0" in ended[1].output and " 4 s" in ended[1].output, shown(ended)
