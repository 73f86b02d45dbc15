# SPDX-License-Identifier: Apache-2.0
"""Code that reads parameters without an operator of torch: it gets an error that names the page, and
works under engine.pin(). numpy on the CPU; a CUDA graph and a Triton kernel on a GPU; and a compiled
region, which announces what it reads and needs no pin.

    python examples/python/raw_pointers.py [--compile]
"""

from __future__ import annotations

import argparse

import torch

import pagoda

try:
    import triton
    import triton.language as tl
except ImportError:  # there is none for CPUs
    triton = None


def by_numpy(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """numpy() hands out the parameter's pointer."""
    return torch.from_numpy(x.numpy() @ layer.weight.detach().numpy().T) + layer.bias.detach()


def captured(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A CUDA graph replays with the pointers of its capture: the pin must last as long as it."""
    graph = torch.cuda.CUDAGraph()
    # The engine's own threads go on while this one captures.
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer(x)
    graph.replay()
    return out


if triton is not None:

    @triton.jit
    def _linear(out, x, weight, bias, size: tl.constexpr):
        at = tl.arange(0, size)
        row = tl.load(x + tl.program_id(0) * size + at)
        products = tl.load(weight + at[:, None] * size + at[None, :]) * row[None, :]
        tl.store(out + tl.program_id(0) * size + at, tl.sum(products, 1) + tl.load(bias + at))


def by_triton(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A Triton kernel is given pointers when it is launched."""
    out = torch.empty_like(x)
    _linear[(len(x),)](out, x, layer.weight, layer.bias, layer.in_features)
    return out


def compiled(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A compiled region announces its parameters when it is called: all are there while it runs."""
    with torch.no_grad():
        return torch.compile(layer)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which is slow")
    flags = parser.parse_args()

    engine = pagoda.Engine(device_budget="160KiB")
    with engine.build():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    engine.attach(model)  # pages have the names of the model's parameters from here on
    x = torch.randn(4, 64, device=engine.device)
    ways = [by_numpy] if engine.device.type == "cpu" else [captured]
    if engine.device.type == "cuda" and triton is not None:
        ways.append(by_triton)
    if flags.compile:
        ways.append(compiled)
    for way in ways:
        model(x)  # of its sixteen layers the first have left when the last come
        try:
            for layer in model:
                way(layer, x)
            print(f"{way.__name__}: works without a pin")
        except RuntimeError as error:
            print(f"{way.__name__}: {str(error).splitlines()[0]}")
        with engine.pin(model[0]), torch.no_grad():
            torch.testing.assert_close(way(model[0], x), model[0](x))
            print(f"{way.__name__}: pinned, it works")


main()
