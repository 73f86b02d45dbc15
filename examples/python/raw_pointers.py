# SPDX-License-Identifier: Apache-2.0
"""Code that reads parameters without an operator of torch: it gets an error that names the page, and
works under engine.pin(). numpy here; a compiled region, a CUDA graph and a Triton kernel are alike.

    python examples/python/raw_pointers.py
"""

from __future__ import annotations

import argparse

import torch

import pagoda


def by_numpy(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """numpy() hands out the parameter's pointer."""
    return torch.from_numpy(x.numpy() @ layer.weight.detach().numpy().T) + layer.bias.detach()


def compiled(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A compiled region reads the pointers that its parameters have when it runs."""
    with torch.no_grad():
        return torch.compile(layer)(x)


def captured(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A CUDA graph replays with the pointers of its capture: the pin must last as long as it."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which is slow")
    flags = parser.parse_args()

    engine = pagoda.Engine(device_budget="160KiB", gradient_staging="64KiB")
    with engine.build():
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    x = torch.randn(4, 64, device=engine.device)
    for layer in model:
        layer(x)  # the first ones have left when the last ones come
    ways = [by_numpy] if engine.device.type == "cpu" else [captured]
    ways += [compiled] if flags.compile else []
    for way in ways:
        try:
            for layer in model:
                way(layer, x)
        except RuntimeError as error:
            print(f"{way.__name__}: {error}")
        with engine.pin(model[0]), torch.no_grad():
            torch.testing.assert_close(way(model[0], x), model[0](x))
            print(f"{way.__name__}: pinned, it works")


main()
