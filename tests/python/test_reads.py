# SPDX-License-Identifier: Apache-2.0
"""A parameter may be read at any time: it is exact, or an error says how to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pagoda

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
        with pytest.raises(RuntimeError, match="pending update"):
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
