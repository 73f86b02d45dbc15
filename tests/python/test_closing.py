# SPDX-License-Identifier: Apache-2.0
"""How engines end, and what becomes of the weights that they have then."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_scenarios, shown

import pagoda
from pagoda.errors import translated

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


def beside(engine: pagoda.Engine, model: torch.nn.Sequential, call: str) -> Iterator[None]:
    """Makes the call again and again; yields after each time."""
    while True:
        if call in ("step", "plain"):
            loss = model(torch.ones(4, WIDTH)).square().mean()
            loss.backward() if call == "plain" else engine.backward(loss)
            engine.step()
        elif call == "backward":
            engine.backward(model(torch.ones(4, WIDTH)).square().mean())
        elif call == "grad":
            engine.grad(next(model.parameters()))
        elif call == "pin":
            engine.pin(model[0]).release()
        elif call == "activations":
            with engine.activations("host", least=0):
                loss = model(torch.ones(4, WIDTH)).square().mean()
            engine.backward(loss)
        else:
            getattr(engine, call)()
        yield


@pytest.mark.parametrize("call", ["backward", "step", "plain", "stats", "finish", "grad", "pin",
                                  "activations"])
def test_close_beside_a_call_of_another_thread(call: str) -> None:
    """A library that took the engine from under the call would end the process."""
    for attempt in range(12):
        engine = make_engine(early_updates=call in ("step", "plain"))
        model = make_model()
        engine.attach(model, lr=0.01)
        train(engine, model, 1)
        calls: list[None] = []
        errors: list[Exception] = []

        def run(engine: pagoda.Engine = engine, model: torch.nn.Sequential = model,
                calls: list[None] = calls, errors: list[Exception] = errors) -> None:
            try:
                calls.extend(beside(engine, model, call))
            except Exception as error:
                errors.append(error)

        with no_warning():
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(0.003 + 0.002 * attempt)
            engine.close()
            thread.join(60)
        assert not thread.is_alive()
        assert len(errors) == 1 and "engine has been closed" in str(errors[0]), errors
        assert isinstance(errors[0], RuntimeError if call == "plain" else pagoda.UserError), errors
        if call in ("step", "plain"):
            assert_plain(model, after(len(calls)))
        with pytest.raises(pagoda.UserError, match="engine has been closed"):
            engine.stats()


def after(steps: int) -> list[torch.Tensor]:
    """What beside() makes of the model with so many steps."""
    with make_engine() as engine:
        model = make_model()
        engine.attach(model, lr=0.01)
        train(engine, model, 1)
        for _ in range(steps):
            engine.backward(model(torch.ones(4, WIDTH)).square().mean())
            engine.step()
    return values(model)


def test_close_does_not_wait_for_a_call_that_is_stuck() -> None:
    engine, model = make_engine(timeout=0.5), make_model()
    engine.attach(model, lr=0.01)
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: torch.Tensor) -> None:
        inside.set()
        go_on.wait(60)

    errors = []

    def run() -> None:
        out = model(torch.ones(1, WIDTH))
        out.register_hook(wait)
        try:
            engine.backward(out.sum())
        except pagoda.Error as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(60)
    with pytest.warns(RuntimeWarning, match=r"another thread is still in backward\(\)"):
        engine.close()
    go_on.set()
    thread.join(60)
    assert len(errors) == 1, errors


@pytest.mark.parametrize("call", ["close", "release"])
@pytest.mark.parametrize("how", ["engine", "plain"])
def test_an_end_inside_a_backward_is_refused(how: str, call: str) -> None:
    """Of the parameter's hooks, which autograd goes through just then, release() would take some away."""
    with make_engine() as engine:
        model = make_model()
        engine.attach(model, lr=0.01)
        told = []

        def end(_: torch.Tensor) -> None:
            try:
                engine.close() if call == "close" else engine.release(model)
            except pagoda.UserError as error:
                told.append(str(error))

        out = model(torch.ones(1, WIDTH))
        hook = next(model.parameters()).register_hook(end)  # gradients of others have come by then
        out.sum().backward() if how == "plain" else engine.backward(out.sum())
        hook.remove()
        engine.step()
        assert len(told) == 1 and f"{call}() was called inside" in told[0], told
        train(engine, model, 1)


class InterruptedAfter:
    """A library whose call `name` is the last thing before a Ctrl-C."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name = handle, name

    def __getattr__(self, name: str) -> Any:
        def run(*arguments: Any) -> Any:
            result = getattr(self.handle, name)(*arguments)
            if name == self.name:
                raise KeyboardInterrupt
            return result

        return run


@pytest.mark.parametrize("call", ["begin_call", "end_call"])
def test_ctrl_c_as_a_call_begins_or_ends_leaves_none_open(call: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it once the library's call has returned."""
    model = make_model()
    with make_engine() as engine:
        engine.attach(model)
        train(engine, model, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._calls, "_handle", InterruptedAfter(engine._handle, call))
            engine.save_pretrained(tmp_path)
        train(engine, model, 1)
    assert all(p.isfinite().all() for p in model.parameters())


def test_ctrl_c_as_attach_or_release_returns_leaves_both_of_one_mind(
        monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with make_engine() as engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "_handle", InterruptedAfter(engine._handle, "attach"))
            engine.attach(model, lr=0.01)
        train(engine, model)  # it is attached
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "_handle", InterruptedAfter(engine._handle, "release"))
            engine.release(model)
        assert_plain(model, trained())
        model.zero_grad()
        engine.attach(model)  # and is no more
        train(engine, model, 1)


def test_ctrl_c_before_the_library_is_called_leaves_nothing_attached(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model = make_model()
    with make_engine() as engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("pagoda.engine.UntrainedWatch", interrupted)
            engine.attach(model, lr=0.01)
        engine.attach(model, lr=0.01)
        train(engine, model)
    assert_plain(model, trained())


def test_a_second_close_does_what_ctrl_c_kept_the_first_from(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make_engine(), make_model()
    optimizer = engine.attach(model, lr=0.01)
    train(engine, model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._ending, "_handle", InterruptedAfter(engine._handle, "close"))
        engine.close()
    assert not engine.is_open
    with pytest.raises(pagoda.UserError, match="closed"):
        engine.stats()
    engine.close()
    assert_plain(model, trained())
    with pytest.raises(pagoda.UserError, match="engine has been closed"):
        optimizer.step()


def test_models_are_made_after_a_build_that_ctrl_c_has_cut_short() -> None:
    """Of its end nothing has run."""
    engine = make_engine()
    scope = engine.build()
    scope.__enter__()
    engine.close()
    assert_plain(make_model(), values(make_model()))
    with make_engine() as other, other.build():
        model = make_model()
    assert_plain(model, values(make_model()))


@pytest.mark.parametrize("name", ["begin_build", "end_build"])
def test_ctrl_c_as_a_build_begins_or_ends_restores_what_it_had_changed(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "_handle", InterruptedAfter(engine._handle, name))
        with engine.build():
            pass
    assert torch.backends.cudnn.enabled
    assert pagoda.birth._scopes == []
    engine.close()


def interrupted_build(engine: pagoda.Engine, at: int) -> bool:
    """Whether Ctrl-C came: at that Python call, or return of a call, of a build."""
    seen = 0

    def interrupt(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == at:
                raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        with engine.build():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_ctrl_c_anywhere_in_a_build_restores_what_it_had_changed() -> None:
    engine = make_engine()
    at = 1
    while interrupted_build(engine, at):
        assert torch.backends.cudnn.enabled, at
        assert pagoda.birth._scopes == [], at
        at += 1
    assert at > 20
    with engine.build():
        model = make_model()
    engine.close()
    assert_plain(model, values(make_model()))


def test_ctrl_c_while_torch_converts_arguments_is_one() -> None:
    """Torch makes a RuntimeError of what its conversions meet."""
    with pytest.raises(KeyboardInterrupt), translated():
        raise RuntimeError("pagoda::attach() Expected a value of type 'List[str]'\n"
                           "Python error details: KeyboardInterrupt: ")


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


@pytest.mark.parametrize("how", ["0", "2", "3", "later", "after_a_pause"])
def test_ranks_give_the_weights_back_together(how: str, tmp_path: Path) -> None:
    name = f"close_gives_back_{how}"
    ended = run_scenarios([name], tmp_path)[name]
    assert [one.code for one in ended] == [0, 0], shown(ended)
    assert ended[0].output == ended[1].output != "", shown(ended)
    assert "Warning" not in ended[0].output, shown(ended)


class TakenMeanwhile(list[Any]):
    """Another thread empties it once it has been found to have something."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        self.clear()
        return found


def test_two_threads_may_undo_what_a_release_undoes() -> None:
    engine, undone = make_engine(), []
    engine.attach(make_model())
    engine._ending.on_release = TakenMeanwhile([lambda: undone.append(1)])
    engine.close()
    assert undone == [1]
    assert not engine._ending.on_release


def test_no_wait_for_a_stopped_rank_outlives_the_timeout(tmp_path: Path) -> None:
    name = "holder_of_the_store_is_stopped"
    ended = run_scenarios([name], tmp_path, limit=30)[name]
    assert [one.code for one in ended] == [-9, 0], shown(ended)  # rank 1 has killed rank 0
    assert "rank 0" in ended[1].output and " 4 s" in ended[1].output, shown(ended)


def test_a_pin_is_used_twice_and_outlives_its_engine() -> None:
    engine = make_engine()
    model = make_model()
    engine.attach(model)
    pin = engine.pin(model)
    with pin, pin:
        model[0].weight.detach().numpy()
    pin.release()
    pin = engine.pin([model[0].weight, model[0].weight])
    engine.close()
    array = model[0].weight.detach().numpy().copy()
    pin.release()
    assert (model[0].weight.detach().numpy() == array).all()
