# SPDX-License-Identifier: Apache-2.0
"""Programs whose backward passes run on an accelerator's thread, for test_device_threads.py, which runs
them in a process of their own: `device_thread_programs.py LIBRARY` prints how each has ended."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagoda

DEVICE = "elsewhere"


def load_accelerator(library: str) -> None:
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(DEVICE)
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.get_amp_supported_dtype = lambda: []
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=0: torch.zeros(1, dtype=torch.uint8)
    module.set_rng_state = lambda *state: None
    torch._register_device_module(DEVICE, module)


def on_a_thread_of_its_own() -> bool:
    return threading.current_thread() is not threading.main_thread()


class Crossing(torch.autograd.Function):
    """A checkpoint with its result on the host, whose pass begins on the accelerator."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, times: int, x: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.times = layer, times
        ctx.save_for_backward(x)
        out: torch.Tensor = layer(x)
        return out.to(DEVICE).sum().cpu()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert not on_a_thread_of_its_own()
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(ctx.times):
                torch.autograd.backward(ctx.layer(x).to(DEVICE).sum(), grads[0].to(DEVICE) / 3)
        return None, None, x.grad


Model = nn.ModuleList
Loss = Callable[[Model, torch.Tensor], torch.Tensor]


def function(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = model[0](x)
    out: torch.Tensor = Crossing.apply(model[1], 1, x) + model[1](x).sum()
    return out


def several_passes(model: Model, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Crossing.apply(model[1], 3, model[0](x)) + model[1](x).sum()
    return out


def nested(model: Model, x: torch.Tensor) -> torch.Tensor:
    return function(model, model[1](checkpoint(model[1], x.to(DEVICE).cpu(), use_reentrant=True)))


def hook(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Of a node of the host's."""
    x = model[0](x)

    def runs_a_pass(_: torch.Tensor) -> None:
        with torch.enable_grad():
            model[0](torch.ones(2, 4)).to(DEVICE).sum().backward()

    x.register_hook(runs_a_pass)
    return model[1](x).sum()


def there(model: Model, x: torch.Tensor) -> torch.Tensor:
    """All of it on the accelerator's thread."""
    def layer(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model[1](x.cpu()).to(DEVICE)
        return out

    x = checkpoint(layer, model[0](x).to(DEVICE), use_reentrant=True)
    return layer(x * 2).sum()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model(nn.Linear(4, 4) for _ in range(2))


def make_engine(**config: Any) -> pagoda.Engine:
    return pagoda.Engine(device="cpu", device_budget="16MiB", host_budget="64MiB", **config)


def same_gradients(loss_of: Loss, plain: bool) -> None:
    engine, model, other = make_engine(early_updates=False, accumulation=8), make_model(), make_model()
    engine.attach(model)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4, requires_grad=True)
        loss_of(other, x).backward()
        loss = loss_of(model, x)
        loss.backward() if plain else engine.backward(loss)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is None and theirs.grad is not None
            assert torch.equal(engine.grad(mine), theirs.grad)
        engine.zero_grad()
        other.zero_grad()
    engine.close()


def calls_of_a_hook() -> None:
    """A hook may call the engine that runs the pass, on whichever thread autograd calls it."""
    engine, model = make_engine(early_updates=False), make_model()
    engine.attach(model)
    seen: list[Any] = []

    def calls(_: torch.Tensor) -> None:
        assert on_a_thread_of_its_own()
        seen.append((engine.grad_norm(), engine.grad(model[1].weight)))

    x = model[0](torch.ones(2, 4)).to(DEVICE) * 1
    x.register_hook(calls)
    engine.backward(model[1](x.cpu()).to(DEVICE).sum())
    ((norm, gradient),) = seen
    assert norm > 0 and torch.equal(gradient, engine.grad(model[1].weight))
    assert engine.grad_norm() > norm
    engine.step()
    engine.close()


def calls_of_another_thread() -> None:
    """They are refused while a hook on the accelerator's thread is in a pass of the engine."""
    engine, model = make_engine(), make_model()
    engine.attach(model)
    refused: list[str] = []

    def run() -> None:
        try:
            engine.grad_norm()
        except pagoda.UserError as error:
            refused.append(str(error))

    def waits(_: torch.Tensor) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    x = model[0](torch.ones(2, 4)).to(DEVICE) * 1
    x.register_hook(waits)
    engine.backward(x.sum())
    assert len(refused) == 1 and "was called while another thread is in backward()" in refused[0]
    engine.close()


def passes_of_another_thread() -> None:
    """Two passes at a time, one of which runs on the accelerator's thread, are refused."""
    engine, model = make_engine(early_updates=False, accumulation=4), make_model()
    engine.attach(model)
    refused: list[str] = []

    def run() -> None:
        try:
            model[1](torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            refused.append(str(error))

    def waits(_: torch.Tensor) -> None:
        assert on_a_thread_of_its_own()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    x = model[0](torch.ones(2, 4)).to(DEVICE) * 1
    x.register_hook(waits)
    model[1](x.cpu()).to(DEVICE).sum().backward()
    assert len(refused) == 1 and "at the same time" in refused[0]
    engine.close()


def late_gradient_of_a_failed_pass() -> None:
    """A pass has failed on the caller's thread, and a gradient of it comes on the accelerator's: the window
    of early updates stays as it is after any failure."""
    engine, model = make_engine(), make_model()
    engine.attach(model)
    for _ in range(2):
        engine.backward(model[1](model[0](torch.ones(2, 4))).sum())
        engine.step()
    before = [layer.weight.detach().clone() for layer in model]
    begun, failed = threading.Event(), threading.Event()

    def runs_a_pass(_: torch.Tensor) -> None:
        assert on_a_thread_of_its_own()
        begun.set()
        assert failed.wait(5)
        time.sleep(0.2)
        with torch.enable_grad():
            model[0](torch.ones(2, 4)).to(DEVICE).sum().backward()

    def fails(_: torch.Tensor) -> None:
        assert begun.wait(5)
        failed.set()
        raise KeyError("mine")

    there = torch.ones(2, 4, requires_grad=True).to(DEVICE) * 1
    there.register_hook(runs_a_pass)
    here = torch.ones(2, 4, requires_grad=True) * 1
    here.register_hook(fails)
    try:
        engine.backward(there.cpu().sum() + here.sum())
        raise AssertionError("the pass has not failed")
    except KeyError:
        pass
    try:
        engine.zero_grad()
        raise AssertionError("zero_grad() was not refused")
    except pagoda.UserError as error:
        assert "may have started" in str(error)
    engine.step()
    assert [torch.equal(layer.weight, old) for layer, old in zip(model, before, strict=True)] == [False, True]
    engine.close()


def gradient_programs() -> dict[str, Callable[[], None]]:
    def program(loss_of: Loss, plain: bool) -> Callable[[], None]:
        return lambda: same_gradients(loss_of, plain)

    return {f"{'plain' if plain else 'engine'}-{loss_of.__name__}": program(loss_of, plain)
            for plain in (False, True) for loss_of in (function, several_passes, nested, hook, there)}


PROGRAMS: dict[str, Callable[[], None]] = {
    **gradient_programs(),
    **{one.__name__: one for one in (calls_of_a_hook, calls_of_another_thread,
                                     passes_of_another_thread, late_gradient_of_a_failed_pass)},
}


def main() -> None:
    torch.set_num_threads(1)
    load_accelerator(sys.argv[1])
    ended: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        try:
            program()
            ended[name] = ""
        except Exception:
            ended[name] = traceback.format_exc()
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
