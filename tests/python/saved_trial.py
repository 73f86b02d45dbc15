# SPDX-License-Identifier: Apache-2.0
"""Runs one piece of code with plain autograd and with activations off the device, and compares what
it records, byte for byte. The copies off the device are made early, late or now and then, so that
nothing passes by lucky timing."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait

PLACES = ("host", "nvme")
TIMINGS = ("early", "late", "any", "natural")


def bytes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common if they are the same, NaNs and signs of zero included."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return (tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


class _Timed(saved_tensors_hooks):
    """The engine's hooks, with something that happens to the copies at each call of them."""

    def __init__(self, trial: Trial, hooks: Any) -> None:
        def pack(tensor: torch.Tensor) -> Any:
            saved = hooks.pack_hook(tensor)
            trial.tick()
            return saved

        def unpack(saved: Any) -> torch.Tensor:
            trial.tick()
            tensor: torch.Tensor = hooks.unpack_hook(saved)
            trial.tick()
            return tensor

        super().__init__(pack, unpack)
        self.hooks = hooks

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.hooks.handle.sweep()


class Trial:
    """How a piece of code is run: it puts its forward into `forward()`, calls `tick()` between its
    parts and hands what it gets to `record()`."""

    def __init__(self, engine: pagoda.Engine | None = None, place: str = "host",
                 timing: str = "natural", seed: int = 0) -> None:
        self.records: list[Any] = []
        self._timing = timing
        self._random = random.Random(seed)
        self._hooks: Any = None
        if engine is not None:
            self._hooks = engine.activations(
                place, least=1, in_flight=self._random.choice((1, 512, "4KiB", "1GiB")))
            if timing == "late":
                self._hooks.handle.pause(True)

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._hooks is None else _Timed(self, self._hooks)

    def tick(self) -> None:
        """Nothing changes by it but when copies are made."""
        if self._hooks is None or self._timing in ("late", "natural"):
            return
        handle = self._hooks.handle
        if self._timing == "early":
            handle.flush()
            return
        match self._random.randrange(8):
            case 0:
                handle.pause(True)
            case 1 | 2:
                handle.pause(False)
                handle.flush()
            case 3:
                handle.pause(False)

    def record(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            self.records.append(None if tensor is None else bytes_of(tensor))

    def attempt(self, what: Callable[[], Any]) -> Any:
        """Calls it; an error is something to be recorded. Autograd tells of a write that it caught
        in words that depend on where it was."""
        try:
            return what()
        except Exception as error:
            text = str(error)
            caught = any(words in text for words in ("has been modified by an inplace operation",
                                                     "has been modified inplace"))
            self.records.append("modified in place" if caught else text.split("\n")[0])
            return None

    def end(self) -> None:
        if self._hooks is not None:
            self._hooks.handle.pause(False)


Program = Callable[[Trial], None]


def run(program: Program, trial: Trial) -> list[Any]:
    torch.manual_seed(0)
    try:
        program(trial)
    finally:
        trial.end()
    return trial.records


def differences(plain: list[Any], program: Program, engine: pagoda.Engine, place: str, timing: str,
                seed: int = 0) -> str:
    """How the program differs with activations() from what it recorded plainly; empty: not at
    all."""
    kept = run(program, Trial(engine, place, timing, seed))
    if len(plain) != len(kept):
        return f"{len(plain)} records without activations(), {len(kept)} with it"
    out = []
    for number, (a, b) in enumerate(zip(plain, kept, strict=True)):
        if a != b:
            shown = [value if isinstance(value, str) or value is None else
                     f"{value[0]} {list(value[1])}" for value in (a, b)]
            out.append(f"record {number}: {shown[0]} without, {shown[1]} with it")
    return "; ".join(out)


def make_engine(directory: Any, device: str = "cpu") -> pagoda.Engine:
    return pagoda.Engine(device=device, device_budget="1MiB", gradient_staging="64KiB",
                         host_budget="64MiB", nvme=[directory], nvme_budget="64MiB",
                         staging="64KiB", fetch_threads=1, update_threads=1, update_chunk="64KiB")


def wait_until_dropped(engine: pagoda.Engine) -> None:
    """Returns when the engine has nothing of activations any more; copies that nobody waits for
    end on their own."""
    gc.collect()
    while any(engine.stats()["tiers"][place]["holders"].get("activations", {"used": 0})["used"]
              for place in PLACES):
        time.sleep(0.001)
