# SPDX-License-Identifier: Apache-2.0
"""engine.activations() changes where saved tensors are, never what backward reads: gradients are
those of plain autograd, byte for byte, and what raises there raises here."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import saved_cases
import saved_programs
import torch
from saved_trial import PLACES, TIMINGS, Trial, differences, make_engine, run, wait_until_dropped
from torch.autograd.graph import saved_tensors_hooks
from zoo import ZOO

import pagoda

warnings.filterwarnings("ignore", module="torch")
warnings.filterwarnings("ignore", module="saved_")

SEEDS = 320
MORE_SEEDS = 3000


@pytest.fixture(scope="module", params=["cpu", "emulated"])
def engine(request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[pagoda.Engine]:
    """On an emulated device copies go over streams and staging buffers, as on a GPU."""
    made = make_engine(tmp_path_factory.mktemp("swap"), request.param)
    yield made
    wait_until_dropped(made)
    for place in PLACES:
        assert made.stats()["tiers"][place]["holders"]["activations"]["peak"] > 0
    made.close()


@pytest.mark.parametrize("name", saved_cases.CASES)
def test_cases(engine: pagoda.Engine, name: str) -> None:
    program = saved_cases.CASES[name]
    plain = run(program, Trial())
    for place in PLACES:
        for seed, timing in enumerate(TIMINGS):
            assert not differences(plain, program, engine, place, timing, seed), (place, timing)


def check_programs(engine: pagoda.Engine, seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        place, timing = PLACES[seed % 2], TIMINGS[seed // 2 % len(TIMINGS)]
        program = saved_programs.program(seed)
        different = differences(run(program, Trial()), program, engine, place, timing, seed)
        if different:
            wrong[seed] = f"{place}, {timing}: {different}"
    assert not wrong


def test_random_programs(engine: pagoda.Engine) -> None:
    check_programs(engine, range(SEEDS))


@pytest.mark.slow
def test_more_random_programs(engine: pagoda.Engine) -> None:
    check_programs(engine, range(SEEDS, SEEDS + MORE_SEEDS))


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_recurrent_modules_with_the_defaults(kind: Any, tmp_path: Path) -> None:
    """Large enough that all that is said for them need not be said."""
    paged = pagoda.Engine(device="cpu", device_budget="4MiB", nvme=[tmp_path],
                          nvme_budget="256MiB")
    torch.manual_seed(0)
    model = kind(64, 128, 2)
    x = torch.randn(8, 32, 64)
    gradients = []
    for place in ("", *PLACES):
        model.zero_grad()
        if place:
            with paged.activations(place):
                loss = model(x)[0].square().sum()
        else:
            loss = model(x)[0].square().sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for kept in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], kept, strict=True))
    for place in PLACES:
        assert paged.stats()["tiers"][place]["holders"]["activations"]["peak"] > 1 << 20


def used(engine: pagoda.Engine) -> int:
    holders = engine.stats()["tiers"]["host"]["holders"]
    return int(holders["activations"]["used"]) if "activations" in holders else 0


def test_a_storage_is_copied_once_and_when_its_last_holder_is_gone() -> None:
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    x = torch.randn(64, 64, requires_grad=True)
    around: Any = engine.activations("host", least=1)
    with around:
        y = x * 2
        alias = y.detach().view(-1)
        z = (y.sin() * y.cos() * y)  # y is saved thrice, with both factors and their product
        held = 3 * y.nbytes
        del y
    around.handle.flush()
    assert used(engine) == held  # alias holds y's
    del alias
    around.handle.flush()
    assert used(engine) == held + x.nbytes
    z.sum().backward(retain_graph=True)
    first = x.grad
    x.grad = None
    z.sum().backward()
    assert first is not None and x.grad is not None and torch.equal(first, x.grad)
    wait_until_dropped(engine)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "convolutions", "lstm"])
def test_a_model_offloads_what_autograd_keeps_and_nothing_twice(name: str) -> None:
    specimen = ZOO[name]
    torch.manual_seed(0)
    model = specimen.make()
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage  # and keeps its address from being used again
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        specimen.loss(model, 0)
    kept = sum(storage.nbytes() for storage in storages.values())
    storages.clear()
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    around: Any = engine.activations("host", least=1)
    with around:
        loss = specimen.loss(model, 0)
    around.handle.flush()
    assert 0.95 * kept < used(engine) <= kept
    del loss


@pytest.mark.parametrize("least", [1, "16KiB"])
def test_a_graph_that_nobody_differentiates_is_freed(least: Any) -> None:
    """Results that are saved refer to their graph: holding them would be a cycle."""

    class Noted:
        pass

    def forward() -> weakref.ref[Noted]:
        x = torch.randn(8, 8, requires_grad=True)
        note = Noted()
        with engine.activations("host", least=least):
            y = x.exp().tanh().sigmoid()
            y.note = note  # type: ignore[attr-defined]
        return weakref.ref(note)

    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    note = forward()
    gc.collect()
    assert note() is None
    wait_until_dropped(engine)


def test_an_error_of_a_write_in_place_is_autograds() -> None:
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    for least in (1, "16KiB"):
        x = torch.randn(4, 8, requires_grad=True)
        with engine.activations("host", least=least):
            y = x * 2
            z = y.sin()
        y.detach().zero_()
        with pytest.raises(RuntimeError, match=r"needed for gradient computation has been modified "
                           r"by an inplace operation: .*\[4, 8\]\] is at version 1; expected "
                           "version 0 instead"):
            z.sum().backward()
