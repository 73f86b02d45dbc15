# SPDX-License-Identifier: Apache-2.0
"""Gradients that are accumulated several times in one backward() are torch's own, to the bit: passes inside
passes, which custom autograd functions run (docs/notes/passes.md)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

WIDTH = 12
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def reentrant(call: Callable[..., Any], *values: Any) -> Any:
    return checkpoint(call, *values, use_reentrant=True)


class Passes(torch.autograd.Function):
    """A checkpoint that goes through its layer several times, a pass each."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, times: int, x: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.times = layer, times
        ctx.save_for_backward(x)
        out: torch.Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(ctx.times):
                torch.autograd.backward(ctx.layer(x), grads[0] / 3)
        return None, None, x.grad


class Unforeseen(torch.autograd.Function):
    """Uses a weight in backward of which forward knows nothing."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.layer(grads[0].detach()).sum().backward()
        return None, grads[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(4))


def in_two_checkpoints(net: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (net.layers[0], net.layers[1], net.layers[0]):
        x = torch.tanh(reentrant(layer, x)) + x
    return x


def outside_later(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(net.layers[0](in_two_checkpoints(net, x)))


def outside_earlier(net: Any, x: torch.Tensor) -> torch.Tensor:
    return in_two_checkpoints(net, torch.tanh(net.layers[0](x)))


def nested(net: Any, x: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(reentrant(net.layers[2], x))
        return torch.tanh(net.layers[3](torch.tanh(reentrant(net.layers[2], x))))

    x = torch.tanh(reentrant(block, x))
    return torch.tanh(net.layers[2](torch.tanh(reentrant(block, x))))


def borrowed(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Only a view of a weight is used in the checkpoint."""
    x = torch.tanh(reentrant(lambda x: x @ net.layers[0].weight[:, :WIDTH].t(), x))
    return torch.tanh(net.layers[0](x))


def several_passes(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(Passes.apply(net.layers[0], 1, net.layers[1](x)))
    return torch.tanh(Passes.apply(net.layers[0], 3, x))


def first_of_all(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The function is the root of the graph."""
    return Passes.apply(lambda x: net.layers[0](torch.tanh(net.layers[0](x))).float().sum(), 2,
                        net.layers[1](x))


def runs_a_pass(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A hook of the user's does, when the gradient of x comes."""
    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            net.layers[0](grad.detach()).float().sum().backward()

    x.register_hook(hook)
    return x


def by_a_hook(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(reentrant(net.layers[0], torch.tanh(net.layers[0](x))))
    x = torch.tanh(reentrant(net.layers[0], runs_a_pass(net, x * 1)))
    return torch.tanh(net.layers[1](x))


def by_a_hook_on_the_root(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Before the first node of the pass around it."""
    x = torch.tanh(net.layers[0](net.layers[1](x))).float().sum()

    def hook(_: torch.Tensor) -> None:
        with torch.enable_grad():
            net.layers[0](torch.ones(2, WIDTH).bfloat16()).float().sum().backward()

    x.register_hook(hook)
    return x


def deep(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Deeper than autograd goes on one thread."""
    def down(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return torch.tanh(net.layers[0](x))
        return torch.tanh(reentrant(lambda x: down(x, depth - 1), x))

    return down(torch.tanh(net.layers[0](x)), 66)


def more_passes_than_before(net: Any, x: torch.Tensor) -> torch.Tensor:
    """As many as the batch has, and it grows."""
    net.times = getattr(net, "times", 0) + 1
    return torch.tanh(Passes.apply(net.layers[0], net.times, net.layers[1](x)))


def passes_over_checkpoints(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Each of a function's passes runs a checkpoint."""
    return torch.tanh(Passes.apply(lambda x: reentrant(net.layers[0], x), 2, net.layers[1](x)))


SHAPES: list[Loss] = [in_two_checkpoints, outside_later, outside_earlier, nested, borrowed,
                      several_passes, first_of_all, by_a_hook, by_a_hook_on_the_root, deep,
                      more_passes_than_before, passes_over_checkpoints]


def make_engine(**config: Any) -> pagoda.Engine:
    return pagoda.Engine(**{"device": "cpu", "device_budget": "64KiB", "host_budget": "64MiB", **config})


def loss_of(shape: Loss, net: nn.Module, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(5, WIDTH).bfloat16().requires_grad_()
    return shape(net, x).float().sum()


def gradients(shape: Loss, net: nn.Module, seed: int) -> list[torch.Tensor | None]:
    loss_of(shape, net, seed).backward()
    out = [p.grad for p in net.parameters()]
    for p in net.parameters():
        p.grad = None
    return out


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: Loss, plain: bool) -> None:
    """In every pass, whatever the one before has taught."""
    engine = make_engine(early_updates=False, accumulation=8, gradient_dtype="fp32")
    model, other = Net(), Net()
    engine.attach(model)
    for seed in range(3):
        expected = gradients(shape, other, seed)
        loss = loss_of(shape, model, seed)
        loss.backward() if plain else engine.backward(loss)
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            assert mine.grad is None
            if theirs is not None:
                assert torch.equal(engine.grad(mine), theirs.float())
        engine.zero_grad()
    engine.close()


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_begin_when_gradients_are_complete(shape: Loss, clip: float) -> None:
    """Programs that change their shape from step to step train as without early updates."""
    runs = []
    for early in (True, False):
        engine, model = make_engine(early_updates=early, clip=clip), Net()
        engine.attach(model, lr=1e-2)
        for step in range(6):
            engine.backward(loss_of(shape if step % 3 != 1 else in_two_checkpoints, model, step))
            engine.step()
        begun = engine.stats()["updates"]["early"]
        assert (begun > 0) == (early and clip == 0)
        engine.release(model)
        engine.close()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*runs, strict=True))


def test_gradients_of_a_checkpoint_leave_while_it_runs() -> None:
    """Not when it ends: the gradients of all its layers would be on the device together."""
    engine, model = make_engine(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    engine.attach(model)
    held: list[int] = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            held.append(sum(p.grad is not None for p in model.parameters()))
            return grads[0]

    def layers(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = Counts.apply(torch.tanh(layer(x)))
        return x

    for _ in range(3):
        engine.backward(reentrant(layers, torch.ones(2, WIDTH, requires_grad=True)).sum())
        engine.step()
    assert len(held) == 18 and max(held) == 0
    engine.close()


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
def test_what_cannot_be_foreseen_is_refused_once(plain: bool) -> None:
    def shape(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(net.layers[0](function.apply(net.layers[0], x)))

    # What was seen once is known by the name of its class.
    function: Any = type(f"Unforeseen{plain}", (Unforeseen,), {})
    engine, model, other = make_engine(early_updates=False), Net(), Net()
    engine.attach(model)
    # From inside a pass that Python runs it comes as torch passes errors on.
    with pytest.raises(RuntimeError, match=r"parameter 'layers\.0\.(weight|bias)' got another gradient"):
        loss = loss_of(shape, model, 0)
        loss.backward() if plain else engine.backward(loss)
    engine.zero_grad()
    engine.backward(loss_of(shape, model, 1))
    expected = gradients(shape, other, 1)
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        if theirs is not None:
            assert torch.equal(engine.grad(mine), theirs.float())
    engine.close()


def test_a_graph_that_is_kept_can_be_used_again() -> None:
    engine, model, other = make_engine(early_updates=False, accumulation=4), Net(), Net()
    engine.attach(model)
    sums = []
    for net in (other, model):
        loss = loss_of(several_passes, net, 0)
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            if net is other:
                sums.append([p.grad for p in net.parameters()])
                net.zero_grad()
    for mine, first, second in zip(model.parameters(), *sums, strict=True):
        if first is not None and second is not None:
            assert torch.equal(engine.grad(mine), (first + second).float())
    engine.close()


def test_passes_of_another_model_are_not_waited_for() -> None:
    engine, model, other = make_engine(), Net(), copy.deepcopy(Net())
    engine.attach(model)
    for step in range(3):
        loss_of(nested, other, step).backward()
        engine.backward(loss_of(nested, model, step))
        torch.autograd.grad(loss_of(outside_later, other, step), list(other.layers[0].parameters()))
        engine.step()
    assert engine.stats()["updates"]["early"] > 0
    engine.close()


def test_two_passes_at_a_time_are_refused() -> None:
    """What one of them leaves in p.grad would be the other's, by timing."""
    engine, model = make_engine(early_updates=False, accumulation=4), Net()
    engine.attach(model)
    refused: list[str] = []

    def other_thread(_: torch.Tensor) -> None:
        def run() -> None:
            try:
                loss_of(in_two_checkpoints, model, 1).backward()
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    x = torch.tanh(model.layers[0](torch.ones(2, WIDTH).bfloat16()))
    x.register_hook(other_thread)
    torch.tanh(model.layers[0](model.layers[1](x))).float().sum().backward()
    assert len(refused) == 1 and "at the same time" in refused[0]
    engine.close()


def test_an_error_of_a_held_gradient_ends_with_its_pass() -> None:
    """A function's gradient that cannot be taken, and the user's own exception before that is said."""
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(20, WIDTH))
            self.layer = nn.Linear(WIDTH, WIDTH)

    model = Table()
    rows = torch.arange(5)

    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.embedding(rows, model.rows)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            with torch.enable_grad():
                nn.functional.embedding(rows, model.rows, sparse=True).sum().backward()
            return grads[0]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise ValueError("mine")

    engine = make_engine(early_updates=False)
    engine.attach(model)
    with pytest.raises(ValueError, match="mine"):
        engine.backward(Sparse.apply(Fails.apply(model.layer(torch.ones(5, WIDTH)))).sum())
    engine.zero_grad()
    engine.backward(model.layer(torch.ones(5, WIDTH)).sum())
    engine.step()
    with pytest.raises(RuntimeError, match="sparse"):
        engine.backward(Sparse.apply(model.layer(torch.ones(5, WIDTH))).sum())
    assert all(p.grad is None for p in model.parameters() if p is not model.rows)
    engine.close()


def test_a_functions_forward_may_use_its_parameters_by_their_pointers() -> None:
    class Raw(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ torch.from_numpy(weight.detach().numpy()).t()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grads[0] @ weight, grads[0].t() @ x

    engine, model = make_engine(parameters="host"), nn.Linear(WIDTH, WIDTH, bias=False)
    engine.attach(model)
    for _ in range(2):
        engine.backward(Raw.apply(torch.ones(2, WIDTH), model.weight).sum())
        engine.step()
    engine.close()
