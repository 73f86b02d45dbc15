# SPDX-License-Identifier: Apache-2.0
"""A region that torch.compile has compiled reads its tensors by raw pointers, in forward, backward and
without gradients alike. Its pages are brought in when it is called, and stay until it returns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

_MODULE = "torch._inductor.output_code"
_watched = False


def watch_regions() -> None:
    """From now on. What compiles is a second and 110 MiB to import: this waits until somebody does."""
    global _watched
    if _watched:
        return
    _watched = True
    if _MODULE in sys.modules:
        _announce(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Sees the module when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load: Callable[[ModuleType], None] = spec.loader.exec_module

        def load_and_announce(module: ModuleType) -> None:
            load(module)
            _announce(module)

        spec.loader.exec_module = load_and_announce  # type: ignore[method-assign]
        return spec


def _announce(module: ModuleType) -> None:
    theirs = module.CompiledFxGraph.__call__
    plain = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__)

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        # Nothing here may refer to the inputs, which the region frees while it runs.
        pages = torch.classes.pagoda.RegionPages(
            [value for value in inputs if isinstance(value, torch.Tensor)],
            [inputs[number] for number in graph.mutated_input_idxs
             if isinstance(inputs[number], torch.Tensor)])
        try:
            return plain(graph, inputs)
        finally:
            pages.release()

    def through(self, inputs):  # type: ignore[no-untyped-def]
        return _pagoda_call(self, inputs)  # type: ignore[name-defined] # noqa: F821

    theirs.__globals__["_pagoda_call"] = call
    theirs.__code__ = through.__code__
