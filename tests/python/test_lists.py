# SPDX-License-Identifier: Apache-2.0
"""Operators over lists whose pages do not fit on the device together: they run in parts, with the
bits of a plain run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lists import check_foreach, foreach_operators, same_bits, weights
from torch.nn.utils import get_total_norm, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

WIDTH = 64
LAYERS = 6


def make_engine(**more: Any) -> pagoda.Engine:
    """Two of the layers of `stack()` fit, and not three."""
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", "update_threads": 1,
                            **more})


def stack(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.25, 0.75)
    return model


def paged_stack(engine: pagoda.Engine, seed: int = 0) -> torch.nn.Sequential:
    with engine.build():
        return stack(seed)


@pytest.fixture(scope="module")
def paged() -> Any:
    """Nobody's parameters change but by what a test does to them."""
    engine = make_engine()
    models = paged_stack(engine), paged_stack(engine, seed=1)
    yield models
    engine.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", foreach_operators())
def test_foreach(name: str, mode: Callable[[], Any], paged: Any) -> None:
    check_foreach(name, mode, paged, (stack(), stack(seed=1)))


def test_foreach_is_differentiated(paged: Any) -> None:
    gradients = []
    for model in (paged[1], stack(seed=1)):
        products = torch._foreach_mul(weights(model), [weights(model)[0]] * LAYERS)
        loss = sum((product.sum() for product in products), torch.tensor(0.0))
        gradients.append(torch.autograd.grad(loss, weights(model)))
    assert all(map(same_bits, *gradients))


# What is concatenated, with some of the tensors no pages.
CATS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "rows": torch.cat,
    "columns": lambda w: torch.cat(w, dim=1),
    "from the end": lambda w: torch.cat(w, dim=-1),
    "of other lengths": lambda w: torch.cat([w[0][:3], *w[1:], torch.ones(5, WIDTH)]),
    "promoted": lambda w: torch.cat([*w, torch.ones(2, WIDTH, dtype=torch.float64)]),
    "promoted from integers": lambda w: torch.cat([torch.ones(2, WIDTH, dtype=torch.int64), *w]),
    "with nothing": lambda w: torch.cat([torch.empty(0), *w, torch.empty(0, WIDTH)]),
    "transposed": lambda w: torch.cat([one.t() for one in w]),
    "channels last": lambda w: torch.cat([
        one.view(1, 16, 16, 16).to(memory_format=torch.channels_last) for one in w] + [
        w[i].view(1, 16, 16, 16) for i in range(2)]),
    "viewed as images": lambda w: torch.cat([one.view(1, 16, 16, 16).permute(0, 3, 1, 2)
                                             for one in w], dim=1),
    "one of them twice": lambda w: torch.cat([*w, w[0]]),
    "into a tensor": lambda w: torch.cat(w, out=torch.zeros(LAYERS * WIDTH, WIDTH)),
    "into a tensor of another type": lambda w: torch.cat(
        w, out=torch.zeros(LAYERS * WIDTH, WIDTH, dtype=torch.float64)),
    "into an empty tensor": lambda w: torch.cat(w, dim=1, out=torch.empty(0)),
    "stacked": torch.stack,
    "stacked inside": lambda w: torch.stack(w, dim=1),
    "stacked last": lambda w: torch.stack(w, dim=-1),
    "stacked into a tensor": lambda w: torch.stack(w, out=torch.empty(LAYERS, WIDTH, WIDTH)),
    "side by side": torch.hstack,
    "in depth": torch.dstack,
    "flat": lambda w: torch._utils._flatten_dense_tensors(w),
    "as blocks": lambda w: torch.block_diag(*w[:4]),
    "as a vector": parameters_to_vector,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CATS)
def test_cat(name: str, mode: Callable[[], Any], paged: Any) -> None:
    with mode():
        assert same_bits(*(CATS[name](weights(model)) for model in (paged[1], stack(seed=1))))


@pytest.mark.parametrize("name", ["rows", "promoted", "one of them twice", "stacked last"])
def test_cat_is_differentiated(name: str, paged: Any) -> None:
    gradients = []
    for model in (paged[1], stack(seed=1)):
        result = CATS[name](weights(model))
        factors = torch.arange(result.numel(), dtype=result.dtype).view_as(result)
        gradients.append(torch.autograd.grad((result * factors).sum(), weights(model)))
    assert all(map(same_bits, *gradients))


@pytest.mark.parametrize("wrong", [
    lambda w: torch.cat([*w, torch.ones(3, 3)]),
    lambda w: torch.cat(w, dim=2),
    lambda w: torch.cat([*w, torch.tensor(1.0)]),
    lambda w: torch.cat(w, out=torch.empty(0, dtype=torch.int64)),
    lambda w: torch.cat(w, out=w[0]),
    lambda w: torch._foreach_add(w, w[1:]),
    lambda w: torch._foreach_add(w, [1.0]),
    lambda w: torch._foreach_add([], []),
])
def test_mistakes_are_told_as_by_torch(wrong: Callable[[list[torch.Tensor]], Any],
                                       paged: Any) -> None:
    told = []
    with torch.no_grad():
        for model in (paged[1], stack(seed=1)):
            with pytest.raises((RuntimeError, IndexError, TypeError)) as error:
                wrong(weights(model))
            told.append((error.type, str(error.value).splitlines()[0]))
    assert told[0] == told[1]


def test_pinned_pages_are_in_the_way_and_no_harm() -> None:
    engine = make_engine()
    model, plain = paged_stack(engine), stack()
    with engine.pin(model[5]), torch.no_grad():
        assert same_bits(torch.cat(weights(model)), torch.cat(weights(plain)))
        assert all(map(same_bits, torch._foreach_neg(weights(model)),
                       torch._foreach_neg(weights(plain))))
    engine.close()


# What scripts do with all parameters between steps.


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x) / WIDTH**LAYERS - x).square().mean()


Habit = Callable[[torch.nn.Module], Any]


def train(model: torch.nn.Module, habit: Habit, **config: Any) -> list[Any]:
    """What the habit gives before the first step and after each, and what training leaves."""
    engine = make_engine(**config)
    engine.attach(model, lr=1e-3)
    given = [habit(model)]
    for step in range(3):
        engine.backward(loss_of(model, step))
        engine.step()
        given.append(habit(model))
    engine.release(model)
    engine.close()
    return [*given, *model.parameters()]


def average(multi_avg_fn: Any) -> Habit:
    kept: list[AveragedModel] = []

    def habit(model: torch.nn.Module) -> torch.Tensor:
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=multi_avg_fn))
        kept[0].update_parameters(model)
        return torch.cat([p.detach().reshape(-1) for p in kept[0].parameters()])

    return habit


def there_and_back(model: torch.nn.Module) -> torch.Tensor:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.5, model.parameters())
    vector.mul_(0.75)  # which is no parameter's any more
    return vector


HABITS: dict[str, Callable[[], Habit]] = {
    "an exponential moving average": lambda: average(get_ema_multi_avg_fn(0.9)),
    "a stochastic weight average": lambda: average(get_swa_multi_avg_fn()),
    "an average of its own": lambda: average(
        lambda kept, now, count: torch._foreach_lerp_(kept, now, 0.25)),
    "a norm": lambda: lambda model: get_total_norm([p.detach() for p in model.parameters()],
                                                   foreach=True),
    "the largest": lambda: lambda model: get_total_norm([p.detach() for p in model.parameters()],
                                                        float("inf")),
    "a vector": lambda: lambda model: parameters_to_vector(model.parameters()).detach(),
    "a vector there and back": lambda: there_and_back,
    "decay": lambda: torch.no_grad()(
        lambda model: torch._foreach_mul_(list(model.parameters()), 0.999)),
    "a copy": lambda: lambda model: list(copy.deepcopy(model).parameters()),
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", HABITS)
def test_habits_of_scripts(name: str, early: bool) -> None:
    mine = train(stack(), HABITS[name](), early_updates=early)
    theirs = train(stack(), HABITS[name](), device_budget="4MiB")
    for one, other in zip(mine, theirs, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
        assert all(a is b is None or same_bits(a, b) for a, b in pairs)


def test_a_vector_that_does_not_fit_is_told() -> None:
    engine = make_engine()
    model = stack()
    engine.attach(model)
    with pytest.raises(pagoda.UserError, match=r"24960 elements or more, got shape \(7,\)"):
        vector_to_parameters(torch.ones(7), model.parameters())
    plain = stack()
    vector_to_parameters(torch.ones(24960), plain.parameters())
    assert plain[0].weight.eq(1).all()
    engine.close()
