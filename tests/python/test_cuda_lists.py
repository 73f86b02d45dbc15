# SPDX-License-Identifier: Apache-2.0
"""On a GPU: operators over lists whose pages do not fit together, and operators that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lists import check_foreach, foreach_operators, same_bits, weights

import pagoda

if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

WIDTH = 64
LAYERS = 9


def make_engine(**more: Any) -> pagoda.Engine:
    """Two of the layers of `stack()` fit, and not three."""
    return pagoda.Engine(**{"device": "cuda", "device_budget": "64KiB", "gradient_staging": "24KiB",
                            "parameters": "host", "update_chunk": "64KiB", **more})


def stack(seed: int = 0) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    # Layers draw from the CPU's generator, or from the GPU's where an engine builds them.
    own = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.25, 0.75, generator=own)
    return model


@pytest.fixture(scope="module")
def paged() -> Any:
    engine = make_engine()
    with engine.build():
        models = stack(), stack(seed=1)
    yield models
    engine.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", foreach_operators())
def test_foreach(name: str, mode: Callable[[], Any], paged: Any) -> None:
    check_foreach(name, mode, paged, (stack(), stack(seed=1)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("join", [
    torch.cat, torch.stack, lambda w: torch.cat(w, dim=1), lambda w: torch.stack(w, dim=-1),
    lambda w: torch.cat([*w, torch.ones(2, WIDTH, dtype=torch.float64, device="cuda")]),
    lambda w: torch.cat(w, out=torch.empty(0, device="cuda"))])
def test_cat(join: Callable[[list[torch.Tensor]], torch.Tensor], mode: Callable[[], Any],
             paged: Any) -> None:
    with mode():
        assert same_bits(*(join(weights(model)) for model in (paged[1], stack(seed=1))))


def test_lists_are_differentiated(paged: Any) -> None:
    gradients = []
    for model in (paged[1], stack(seed=1)):
        products = torch._foreach_mul(weights(model), [weights(model)[0]] * LAYERS)
        loss = torch.stack([product.sum() for product in products]).sum()
        loss = loss + (torch.cat(weights(model)) * torch.arange(WIDTH, device="cuda")).sum()
        gradients.append(torch.autograd.grad(loss, weights(model)))
    assert all(map(same_bits, *gradients))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
    return (model(x) / WIDTH**LAYERS - x).square().mean()


def too_large(engine: pagoda.Engine, model: torch.nn.Sequential) -> None:
    torch.addcmul(*weights(model)[:3])


def captured(work: Callable[[], Any]) -> None:
    graph = torch.cuda.CUDAGraph()
    # The engine's own threads go on while this one captures.
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()


def captured_without_a_pin(engine: pagoda.Engine, model: torch.nn.Sequential) -> None:
    captured(lambda: model[0].weight.sum())


def captured_and_written(engine: pagoda.Engine, model: torch.nn.Sequential) -> None:
    with engine.pin(model[0]):
        before = model[0].weight.data_ptr()
        try:
            captured(lambda: model[0].weight.mul_(2))
        finally:
            assert model[0].weight.data_ptr() == before


def out_of_memory(engine: pagoda.Engine, model: torch.nn.Sequential) -> None:
    model[0].weight.expand(1 << 30, WIDTH, WIDTH).clone()


@pytest.mark.parametrize(("mistake", "told"), [
    (too_large, "device_budget"), (captured_without_a_pin, "pin"),
    (captured_and_written, "written by an operator of a CUDA graph"),
    (out_of_memory, "out of memory")])
def test_the_engine_goes_on_after_an_operator_that_failed(
        mistake: Callable[[pagoda.Engine, torch.nn.Sequential], None], told: str) -> None:
    runs = []
    for wrong in (True, False):
        engine, model = make_engine(), stack()
        engine.attach(model, lr=1e-3)
        for step in range(4):
            if wrong and step == 2:
                with pytest.raises(RuntimeError, match=told):
                    mistake(engine, model)
            engine.backward(loss_of(model, step))
            engine.step()
        engine.release(model)
        engine.close()
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(same_bits, *runs))
