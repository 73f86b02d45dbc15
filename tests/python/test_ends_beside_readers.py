# SPDX-License-Identifier: Apache-2.0
"""A thread reads parameters, or storages that they have had, while the engine ends, releases its model or
exchanges them: each operator has the right values, or raises why it has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import pagoda

torch.set_num_threads(1)
WIDTH = 256


def make_engine(**more: str) -> pagoda.Engine:
    return pagoda.Engine(device="cpu", device_budget="4MiB", host_budget="64MiB", **more)


@contextmanager
def beside(read: Callable[[], object]) -> Iterator[list[str]]:
    """What the reads raised; the first one that does is the last."""
    over, begun, errors = threading.Event(), threading.Event(), list[str]()

    def run() -> None:
        with torch.no_grad():
            while not over.is_set():
                try:
                    read()
                except RuntimeError as error:
                    errors.append(str(error))
                    return
                finally:
                    begun.set()

    reader = threading.Thread(target=run)
    reader.start()
    begun.wait()
    yield errors
    over.set()
    reader.join()


@pytest.mark.filterwarnings("ignore:the engine has ended")
@pytest.mark.parametrize("parameters", ["auto", "host"])
@pytest.mark.parametrize("fails", [True, False], ids=["failed", "values_are_not_given_back"])
def test_an_engine_ends_beside_operators_on_pages_that_are_lost(fails: bool, parameters: str) -> None:
    for _ in range(15):
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.ones(8, WIDTH)
        engine = make_engine(parameters=parameters)
        engine.attach(model, lr=0.1)
        with beside(lambda: model(x)) as errors:  # noqa: B023
            if fails:
                engine._handle.fail("it was made to")
                engine.close()
            else:
                engine._handle.close(False)
        for error in errors:
            assert "it was made to" in error or "went with its engine" in error \
                or "has ended" in error or "engine ends" in error, error
        with pytest.raises(RuntimeError, match="went with its engine"):
            model(x)


def test_a_model_is_released_beside_reads_of_a_storage_that_a_parameter_has_had() -> None:
    for _ in range(40):
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        engine = make_engine()
        engine.attach(model, lr=0.1)
        had = model.weight.detach()
        expected = had.sum().item()
        model.weight.data = torch.zeros(WIDTH, WIDTH)  # no operator meets it before release()
        values = []
        with beside(lambda: values.append(had.sum().item())) as errors:  # noqa: B023
            engine.release(model)
        assert set(values) <= {expected}
        assert all("had another one when its model was released" in error for error in errors), errors
        assert not model.weight.any()
        engine.close()


def test_a_loop_that_swaps_weights_leaves_no_pages_behind_beside_a_reader() -> None:
    """Only one parameter, so that for a moment no storage is a page."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    engine = make_engine(parameters="host")
    engine.attach(model, lr=0.1)
    weight = model.weight
    with torch.no_grad():
        weight.fill_(1.0)
    own, average = weight.data, torch.full((WIDTH, WIDTH), 2.0)
    values, swapped = [], []
    with beside(lambda: values.append(own.mean().item())) as errors, torch.no_grad():
        for _ in range(1500):
            weight.data = average.clone()
            swapped.append(weight.mean().item())
            weight.data = own
            swapped.append(weight.mean().item())
    with torch.no_grad():
        for values_of in (average.clone(), own):  # nobody else uses what these leave
            weight.data = values_of
            weight.sum()
    assert not errors
    assert set(values) == {1.0}
    assert swapped == [2.0, 1.0] * 1500
    assert engine.stats()["tiers"]["host"]["used"] < 16 << 20
    engine.close()
