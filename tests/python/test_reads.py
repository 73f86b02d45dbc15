# SPDX-License-Identifier: Apache-2.0
"""A parameter may be read at any time: it is exact, or an error says how to read it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.checkpoint import checkpoint

import pagoda
from pagoda.library import optimizer_constants

WIDTH = 64
LAYERS = 6
TIGHT = {"device_budget": "160KiB", "gradient_staging": "64KiB", "parameters": "host"}
ROOMY = {"device_budget": "8MiB"}  # parameters live on the device for good
Habit = Callable[[pagoda.Engine, torch.nn.Sequential, int], Any]


def stack(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


def train(options: dict[str, Any], dtype: torch.dtype, steps: int = 6, clip: float = 0,
          before_step: Habit | None = None, after_step: Habit | None = None) -> list[torch.Tensor]:
    """Trains, with something done before and after each step(); the values at the end."""
    engine = pagoda.Engine(device="cpu", host_budget="64MiB", **options)
    model = stack(dtype)
    engine.attach(model, lr=0.01, clip=clip)
    for step in range(steps):
        x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH).to(dtype) * (step + 1)
        engine.backward(model(x).square().mean())
        if before_step is not None:
            before_step(engine, model, step)
        engine.step()
        if after_step is not None:
            after_step(engine, model, step)
    engine.release(model)
    values = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return values


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What numpy can see of any type."""
    return tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("options", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
class TestReads:
    def test_a_raw_read_after_a_step_is_exact_or_an_error(self, options: dict[str, Any],
                                                         dtype: torch.dtype, clip: float) -> None:
        stale, refused = [], []

        def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            raw: dict[str, Any] = {}
            for name, parameter in model.named_parameters():
                try:
                    raw[name] = bits(parameter).numpy().copy()
                except RuntimeError as error:
                    assert "pin" in str(error) and name in str(error)
                    refused.append(name)
            for name, parameter in model.named_parameters():
                if name in raw and not np.array_equal(raw[name], bits(parameter).clone().numpy()):
                    stale.append((step, name))

        train(options, dtype, clip=clip, after_step=look)
        assert not stale
        assert refused

    def test_a_pin_over_a_step_sees_what_it_changes(self, options: dict[str, Any], dtype: torch.dtype,
                                                    clip: float) -> None:
        def pinned(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if step == 3:
                held["pin"] = engine.pin(model[2])
                held["view"] = bits(model[2].weight).numpy()

        def check(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if "view" in held:
                seen = held["view"].copy()
                assert np.array_equal(seen, bits(model[2].weight).clone().numpy()), step
                changes.append(seen)
            if step == 5:
                del held["view"]
                held.pop("pin").release()

        held: dict[str, Any] = {}
        changes: list[Any] = []
        values = train(options, dtype, clip=clip, before_step=pinned, after_step=check)
        assert len(changes) == 3 and not np.array_equal(changes[0], changes[1])
        assert same(values, train(options, dtype, clip=clip))

    def test_reads_between_backward_and_step_are_exact(self, options: dict[str, Any],
                                                       dtype: torch.dtype, clip: float) -> None:
        known: dict[str, torch.Tensor] = {}
        average: list[torch.Tensor] = []

        def remember(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            known.update({name: p.detach().clone() for name, p in model.named_parameters()})

        def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if step % 2 == 0 or not known:
                return
            for name, parameter in model.named_parameters():
                if step == 3:
                    with engine.pin(parameter):
                        assert np.array_equal(bits(parameter).numpy(), bits(known[name]).numpy())
                assert torch.equal(parameter, known[name]), (step, name)
            average[:] = [p.detach() * 0.9 for p in model.parameters()]

        values = train(options, dtype, clip=clip, before_step=look, after_step=remember)
        assert same(values, train(options, dtype, clip=clip))

    def test_a_numpy_write_under_a_pin_is_a_write(self, options: dict[str, Any], dtype: torch.dtype,
                                                  clip: float) -> None:
        value = 0.25

        def by_numpy(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if step in (1, 3):
                with engine.pin(model[4].weight):
                    pattern = torch.full((1,), value, dtype=dtype)
                    bits(model[4].weight).numpy()[1:9, ::3] = bits(pattern).numpy()[0]

        def by_operator(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if step in (1, 3):
                with torch.no_grad():
                    model[4].weight[1:9, ::3] = value

        written = train(options, dtype, clip=clip, after_step=by_numpy)
        assert same(written, train(options, dtype, clip=clip, after_step=by_operator))
        assert not same(written, train(options, dtype, clip=clip))

    def test_a_pin_that_stays_sees_and_keeps_writes(self, options: dict[str, Any], dtype: torch.dtype,
                                                    clip: float) -> None:
        held: dict[str, Any] = {}

        def by_numpy(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            if step == 0:
                held["pin"] = engine.pin(model[4].weight)
                held["view"] = bits(model[4].weight).numpy()
            held["view"][step] = bits(torch.full((1,), 0.5, dtype=dtype)).numpy()[0]
            if step == 5:
                del held["view"]
                held.pop("pin").release()

        def by_operator(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            with torch.no_grad():
                model[4].weight[step] = 0.5

        written = train(options, dtype, clip=clip, after_step=by_numpy)
        assert same(written, train(options, dtype, clip=clip, after_step=by_operator))


@pytest.mark.parametrize("options", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("ahead", [False, True], ids=["final", "clip_ahead"])
@pytest.mark.parametrize("kept", [False, True], ids=["with", "kept"])
def test_a_numpy_write_under_a_pin_before_step_counts_or_is_undone(
        options: dict[str, Any], dtype: torch.dtype, first: bool, ahead: bool, kept: bool) -> None:
    """Between backward and step(): a write that comes in the first step, too, or under clip_ahead,
    is one; else an error undoes it, whether the page's update has begun or not."""
    clip = 1e6 if ahead else 0
    if ahead:
        options = {**options, "clip_ahead": True}
    counts = first or ahead

    def write(p: torch.nn.Parameter) -> None:
        bits(p).numpy()[1:9, ::3] = bits(torch.full((1,), 0.25, dtype=dtype)).numpy()[0]

    def by_numpy(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        if not first and step == 0:
            return
        for number in (0, 4, 10):  # of gradients that come early and late
            p = model[number].get_parameter("weight")
            before = p.detach().clone()
            if kept:  # until after step(), which says it
                pin = engine.pin(p)
                write(p)
                if not counts:
                    with pytest.raises(pagoda.UserError, match="under engine.pin"):
                        engine.step()
                pin.release()
            elif counts:
                with engine.pin(p):
                    write(p)
            else:
                with pytest.raises(pagoda.UserError, match="under engine.pin"), engine.pin(p):
                    write(p)
            assert torch.equal(p, before) != counts

    def by_operator(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        if counts and (first or step > 0):
            with torch.no_grad():
                for number in (0, 4, 10):
                    model[number].get_parameter("weight")[1:9, ::3] = 0.25

    written = train(options, dtype, clip=clip, before_step=by_numpy)
    assert same(written, train(options, dtype, clip=clip, before_step=by_operator))


# What takes a pointer without an operator, by names that people know it by.
RAW: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda p: p.detach().numpy(),
    "force": lambda p: p.numpy(force=True),
    "cpu().numpy": lambda p: p.detach().cpu().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage().data_ptr(),
    "safetensors": lambda p: safetensors.torch.save({"p": p.detach()}),
}


@pytest.mark.parametrize("how", RAW)
def test_a_raw_read_of_what_can_move_is_refused_wherever_it_is(how: str) -> None:
    def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        for when in ("after the step", "after an operator", "after finish"):
            for name, parameter in model.named_parameters():
                if when == "after an operator":
                    float(parameter.detach().norm())
                with pytest.raises(RuntimeError, match="raw pointer") as error:
                    RAW[how](parameter)
                assert f"'{name}'" in str(error.value) and "with engine.pin(" in str(error.value)
                with engine.pin(parameter):
                    float(parameter.detach().norm())
                    RAW[how](parameter)
            engine.finish()

    train(TIGHT, torch.float32, steps=2, after_step=look)


# What of these gives values.
VALUES: dict[str, Callable[[Any], Any]] = {
    **{how: np.asarray for how in ("numpy", "force", "cpu().numpy", "asarray", "dlpack")},
    "safetensors": lambda data: safetensors.torch.load(data)["p"].numpy(),
}


@pytest.mark.parametrize("how", VALUES)
def test_a_raw_read_of_what_stays_is_exact_or_refused(how: str) -> None:
    refused = []

    def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        for pending in (True, False):
            read: dict[str, Any] = {}
            for name, parameter in model.named_parameters():
                try:
                    read[name] = VALUES[how](RAW[how](parameter)).copy()
                except RuntimeError as error:
                    assert pending and "pending update" in str(error) and f"'{name}'" in str(error)
                    refused.append(name)
            for name, parameter in model.named_parameters():
                if name in read:
                    assert np.array_equal(read[name], parameter.detach().clone().numpy())
            engine.finish()

    train(ROOMY, torch.float32, steps=3, clip=0.05, after_step=look)
    assert refused or how == "dlpack"  # which announces an operator first


@pytest.mark.parametrize("options", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
class TestCopies:
    """What torch reads by a pointer, but announces: it works at any time."""

    def test_print_and_tolist(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            shown = [(p.tolist(), p[-1].tolist(), repr(p)) for p in model.parameters()]
            for seen, parameter in zip(shown, model.parameters(), strict=True):
                copied = torch.nn.Parameter(parameter.detach().clone())
                assert seen == (copied.tolist(), copied[-1].tolist(), repr(copied))

        values = train(options, dtype, before_step=look, after_step=look)
        assert same(values, train(options, dtype))

    def test_a_deep_copy_of_the_state_dict(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
            state = model.state_dict()
            state["again"] = state["0.weight"].t()
            copied = copy.deepcopy(state)
            for name, value in state.items():
                assert torch.equal(copied[name], value) and copied[name].stride() == value.stride()
                copied[name].data_ptr()
            copied["again"].zero_()  # what shared a storage does
            assert not copied["0.weight"].any() and model[0].weight.any()

        values = train(options, dtype, before_step=look, after_step=look)
        assert same(values, train(options, dtype))


def test_an_operator_of_ones_own_may_use_pointers() -> None:
    @torch.library.custom_op("pagoda_test_reads::total", mutates_args=())
    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.detach().numpy().astype(np.float64).sum())

    def look(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert total(parameter) == parameter.detach().clone().numpy().astype(np.float64).sum()

    train(TIGHT, torch.float32, steps=2, after_step=look)


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None,
                    reason="torch.compile needs a C++ compiler for the CPU")
def test_compiled_regions_find_their_pages() -> None:
    """In forward, in backward, which reads the norm's weight by its pointer, and without gradients."""
    def run(options: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(*[torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH))
            for _ in range(LAYERS)])
        layers = [torch.compile(layer) for layer in model]
        out: list[torch.Tensor] = []
        with pagoda.Engine(device="cpu", host_budget="64MiB", **options) as engine:
            engine.attach(model, lr=0.01)
            for step in range(3):
                x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH) * (step + 1)
                for layer in layers:
                    x = layer(x)
                engine.backward(x.square().mean())
                engine.step()
                with torch.no_grad():
                    for layer in layers:
                        x = layer(x)
                out.append(x.clone())
            if options is TIGHT:
                assert engine.stats()["pages"]["evictions"] > 0
        return out

    assert same(run(TIGHT), run(ROOMY))


def test_a_view_kept_over_a_step_sees_what_it_changes() -> None:
    views: list[Any] = []

    def keep(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        if step == 0:
            engine.finish()
            views.extend(p.detach().numpy() for p in model.parameters())
        for view, parameter in zip(views, model.parameters(), strict=True):
            assert np.array_equal(view, parameter.detach().clone().numpy()), step

    train(ROOMY, torch.float32, after_step=keep)


def test_finish_makes_raw_reads_possible_where_parameters_stay() -> None:
    def read(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        with pytest.raises(RuntimeError, match=r"pending update.*engine\.finish\(\)"):
            model[0].weight.detach().numpy()
        engine.finish()
        for parameter in model.parameters():
            assert np.array_equal(parameter.detach().numpy(), parameter.detach().clone().numpy())

    train(ROOMY, torch.float32, after_step=read)


@pytest.mark.parametrize("options", [TIGHT, ROOMY], ids=["tight", "roomy"])
def test_what_would_change_a_step_is_refused_and_the_step_completes(options: dict[str, Any]) -> None:
    def interfere(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        if step != 3:
            return
        for mistake in (
            engine.zero_grad,
            engine.grad_norm,
            lambda: engine.grad(model[0].weight),
            lambda: engine.backward(model(torch.ones(1, WIDTH)).sum()),
        ):
            with pytest.raises(pagoda.UserError, match="early_updates"):
                mistake()
        with pytest.raises(RuntimeError, match="early_updates"), torch.no_grad():
            model[0].weight.mul_(2)

    assert same(train(options, torch.float32, before_step=interfere), train(options, torch.float32))


def test_a_habit_of_changing_the_step_is_learnt_from_the_first() -> None:
    def clamp(engine: pagoda.Engine, model: torch.nn.Sequential, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)

    late = train(TIGHT, torch.float32, before_step=clamp)
    assert same(late, train({**TIGHT, "early_updates": False}, torch.float32, before_step=clamp))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("ahead", [False, True], ids=["final", "clip_ahead"])
@pytest.mark.parametrize("max_norm", [0.5, None], ids=["max_norm", "clamp"])
def test_a_recomputation_may_write_to_its_weight(reentrant: bool, ahead: bool,
                                                 max_norm: float | None) -> None:
    """In the last backward of a step, before its gradient comes. An embedding with max_norm asks to,
    and finds nothing to do, for the rows are short since the forward; clamp_() writes in any case."""
    runs = []
    for early in (False, True):
        config: dict[str, Any] = {"clip": 1e6, "clip_ahead": early} if ahead else {}
        engine = pagoda.Engine(device="cpu", host_budget="64MiB", early_updates=early or ahead,
                               **TIGHT, **config)
        torch.manual_seed(1)
        table, model = torch.nn.Embedding(240, WIDTH, max_norm=max_norm), stack(torch.float32)
        both = torch.nn.ModuleList([table, model])
        engine.attach(both, lr=0.01)
        looked_up = []

        def look_up(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            looked_up.append(ids)
            if table.max_norm is None:
                with torch.no_grad():
                    table.weight.clamp_(-0.5, 0.5)
            return (table(ids) * x).tanh()  # what these save has to be computed again

        for step in range(5):
            ids = torch.arange(8) + step
            x = torch.ones(8, WIDTH, requires_grad=True)
            if step != 0:  # which would teach that it happens
                x = x + checkpoint(look_up, x, ids, use_reentrant=reentrant)
            engine.backward(model(x).square().mean())
            engine.step()
        assert len(looked_up) == 2 * 4
        engine.release(both)
        engine.close()
        runs.append([p.detach().clone() for p in both.parameters()])
    assert same(*runs)


def test_a_view_of_a_page_of_which_a_parameter_has_died_sees_the_step() -> None:
    """As a model in C++ may lose one: the engine of Python keeps what is attached."""
    size = 1 << 22  # an update takes longer than step()
    both = [torch.nn.Parameter(half) for half in torch.ones(2 * size).split(size)]
    engine = pagoda.Engine(device="cpu", device_budget="256MiB", early_updates=False)
    engine._handle.attach(["first", "second"], both, [0, 0], ["adamw"],
                          [{**optimizer_constants("adamw"), "lr": 0.1}], [], [], 0, "")
    del both[1]
    view = both[0].detach().numpy()
    for step in range(5):
        engine._handle.backward(both[0].sum() * 1, None, False)
        engine._handle.step()
        seen = view[-1].item()
        engine.finish()
        assert seen == view[-1].item(), step
