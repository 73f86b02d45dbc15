# SPDX-License-Identifier: Apache-2.0
"""On a GPU: pages, buffers and activations of unmodified models, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import parity
import pytest
import saved_cases
import saved_programs
import saved_trial
import thawing
import torch
import zoo
from unusual_operators import WITH_KERNELS, Use, assert_used_as_plain

import pagoda

if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

NAMES = ["gpt2", "llama", "qwen3_tied", "t5", "borrowing", "branching"]


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device("cuda"):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def batches_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_random", lambda step: torch.Generator("cuda").manual_seed(step))


@pytest.mark.parametrize("use", WITH_KERNELS.values(), ids=WITH_KERNELS.keys())
def test_a_composite_operator_with_a_kernel_of_its_own_finds_its_parameters(use: Use) -> None:
    """There rms_norm has one."""
    assert_used_as_plain(use, "cuda")


@pytest.mark.parametrize("place", ["", "host", "nvme"])
@pytest.mark.parametrize("name", NAMES)
def test_parity(name: str, place: str, tmp_path: Path) -> None:
    specimen = zoo.ZOO[name]
    plain = parity.train_plainly(specimen.make, specimen.loss)
    config = parity.config_below_a_third(specimen.make, device="cuda", nvme=[tmp_path])
    engine = pagoda.Engine(**config)
    torch.manual_seed(0)
    with engine.build():
        model = specimen.make()
    assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
    around = (lambda: engine.activations(place, least=256, in_flight="64KiB")) if place \
        else nullcontext
    parity.assert_equal(plain, parity.train_attached(engine, model, specimen.loss, around))


@pytest.mark.parametrize("frozen", [0.5, 1.0])
def test_thawed_later(frozen: float) -> None:
    """Also from nothing: buffers for gradients on their way are taken at the thaw."""
    specimen = zoo.ZOO["llama"]

    def schedule(model: torch.nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        for p in parameters[:int(len(parameters) * frozen)]:
            p.requires_grad_(step >= (1 if frozen == 1 else 2))

    torch.manual_seed(0)
    plain = specimen.make()
    schedule(plain, 1 if frozen == 1 else 0)
    torch.manual_seed(1)
    expected = thawing.trained_plainly(plain, lambda m, step: schedule(m, step + int(frozen)), 4,
                                         specimen.loss)
    engine = pagoda.Engine(**parity.config_below_a_third(specimen.make, device="cuda"))
    torch.manual_seed(0)
    with engine.build():
        model = specimen.make()
    schedule(model, 0)
    engine.attach(model, groups=[{"params": model.parameters()}], lr=parity.LR,
                  weight_decay=parity.DECAY)
    torch.manual_seed(1)
    thawing.assert_same(expected, thawing.trained(
        engine, model, lambda m, step: schedule(m, step + int(frozen)), 4, specimen.loss))


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
@pytest.mark.parametrize("short", [False, True])
def test_clipping_ahead_is_clipping(name: str, short: bool) -> None:
    specimen = zoo.ZOO[name]
    parity.check_clipping_ahead(specimen.make, specimen.loss, short, device="cuda")


def test_activations_free_the_device() -> None:
    engine = pagoda.Engine(device="cuda", device_budget="64MiB")
    x = torch.randn(4 << 20, requires_grad=True)
    peaks = []
    for offload in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x
        if offload:
            with engine.activations("host", in_flight="32MiB"):
                for _ in range(24):
                    y = y.sin()
        else:
            for _ in range(24):
                y = y.sin()
        y.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del y
        x.grad = None
    assert peaks[0] > 380 << 20
    assert peaks[1] < 160 << 20


@pytest.fixture(scope="module")
def offloading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pagoda.Engine]:
    engine = saved_trial.make_engine(tmp_path_factory.mktemp("swap"), "cuda")
    yield engine
    saved_trial.wait_until_dropped(engine)


@pytest.mark.parametrize("name", saved_cases.CASES)
def test_saved_tensors(offloading: pagoda.Engine, name: str) -> None:
    program = saved_cases.CASES[name]
    try:
        plain = saved_trial.run(program, saved_trial.Trial())
    except Exception as error:
        pytest.skip(f"torch does not do this on a GPU: {error}")
    if plain != saved_trial.run(program, saved_trial.Trial()):
        pytest.skip("torch itself gives different bits each time")
    for place in saved_trial.PLACES:
        for seed, timing in enumerate(saved_trial.TIMINGS):
            assert not saved_trial.differences(plain, program, offloading, place, timing, seed)


def test_random_saved_tensors(offloading: pagoda.Engine) -> None:
    wrong = {}
    for seed in range(200):
        program = saved_programs.program(seed)
        plain = saved_trial.run(program, saved_trial.Trial())
        if plain != saved_trial.run(program, saved_trial.Trial()):
            continue  # torch itself gives different bits each time
        place, timing = saved_trial.PLACES[seed % 2], saved_trial.TIMINGS[seed // 2 % 4]
        different = saved_trial.differences(plain, program, offloading, place, timing, seed)
        if different:
            wrong[seed] = f"{place}, {timing}: {different}"
    assert not wrong


def test_activations_of_several_streams() -> None:
    """Branches on streams of their own, which save, offload and prefetch beside each other."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", host_budget="1GiB")
    x = torch.randn(1024, 1024, requires_grad=True)
    weights = [torch.randn(1024, 1024) / 32 for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in weights]
    here = torch.cuda.current_stream()

    def forward() -> torch.Tensor:
        outs = []
        for weight, stream in zip(weights, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                y = x @ weight
                for _ in range(6):
                    a, b = (y * 1).unsafe_chunk(2)
                    y = torch.cat([a.sigmoid_() * b.tanh_(), a + b]) @ weight
                outs.append(y)
        for stream, out in zip(streams, outs, strict=True):
            here.wait_stream(stream)
            out.record_stream(here)
        return torch.stack(outs).sum()

    (expected,) = torch.autograd.grad(forward(), x)
    for in_flight in ("1MiB", "16MiB", "256MiB"):
        for _ in range(4):
            with engine.activations("host", in_flight=in_flight):
                loss = forward()
            (got,) = torch.autograd.grad(loss, x)
            assert torch.equal(expected, got)


def test_activations_and_cuda_graphs() -> None:
    """A captured forward keeps its activations on the device; a backward cannot be captured once
    they have left."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB")
    x = torch.randn(256, 256, requires_grad=True)

    def forward() -> torch.Tensor:
        return (x.sin() * x.exp()).tanh().sum()

    (expected,) = torch.autograd.grad(forward(), x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with engine.activations("host"):
            loss = forward()
        (got,) = torch.autograd.grad(loss, x)
    got.zero_()
    graph.replay()
    assert torch.equal(expected, got)
    around: Any = engine.activations("host")
    stream = torch.cuda.Stream()  # backward runs on the stream of its forward
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), around:
        loss = forward()
    around.handle.flush()
    with pytest.raises(RuntimeError, match="cannot capture a backward whose activations"), \
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream,
                             capture_error_mode="thread_local"):
        torch.autograd.grad(loss, x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "on_the_device"])
def test_a_cuda_graph_sees_every_step(pinned: bool, clip: float | None) -> None:
    """Its replays read parameters without an operator that could wait for their updates."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", host_budget="1GiB",
                           parameters="host" if pinned else "device")
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    engine.attach(model, lr=0.1, clip=clip)
    x = torch.randn(64, 512)

    def sums() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([p.sum() for p in model.parameters()])

    def train() -> None:
        engine.backward(model(x).square().sum())
        engine.step()

    train()
    with engine.pin(model) if pinned else nullcontext():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = sums()
        for _ in range(4):
            train()
            graph.replay()
            seen = captured.clone()
            assert torch.equal(seen, sums())
    engine.close()


class Twice(torch.autograd.Function):
    """Runs two passes inside its own, each after a kernel that takes its time."""

    @staticmethod
    def forward(ctx: Any, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        out: torch.Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        for _ in range(2):
            torch.cuda._sleep(50_000_000)
            with torch.enable_grad():
                torch.autograd.backward(ctx.layer(x), grads[0] / 3)
        return None, x.grad


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "plain"])
def test_gradients_of_another_stream(plain: bool) -> None:
    """A gradient that waits for the end of a custom function is taken when it is there: that end is told
    on the default stream, whatever stream the pass runs on."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", host_budget="1GiB")
    layer = torch.nn.Linear(512, 512)
    x = torch.randn(64, 512, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        Twice.apply(layer, x).sum().backward()
    stream.synchronize()
    expected = [p.grad.cpu() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    engine.attach(layer)
    with torch.cuda.stream(stream):
        loss = Twice.apply(layer, x).sum()
        loss.backward() if plain else engine.backward(loss)
    for p, gradient in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(engine.grad(p).cpu(), gradient)
    engine.close()


def test_gradients_of_one_page_on_several_streams() -> None:
    """They are added up one after the other, also where one of the streams is late."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", host_budget="1GiB")
    both = torch.randn(2 << 20)

    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = torch.nn.ParameterList(torch.nn.Parameter(half) for half in both.chunk(2))

    model = Halves()
    engine.attach(model)
    streams = [torch.cuda.Stream() for _ in model.halves]
    here = torch.cuda.current_stream()

    def late(gradient: torch.Tensor) -> None:
        torch.cuda._sleep(50_000_000)

    for _ in range(3):
        sums = []
        for half, stream in zip(model.halves, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                part = half * 2
                part.register_hook(late)
                sums.append(part.sum())
        for stream in streams:
            here.wait_stream(stream)
        engine.backward(sums[0] + sums[1])
        for half in model.halves:
            assert torch.equal(engine.grad(half).cpu(), torch.full(half.shape, 2.0, device="cpu"))
        engine.zero_grad()
    engine.close()


def test_a_captured_backward_is_refused() -> None:
    """And the engine goes on afterwards."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", host_budget="1GiB", parameters="device",
                           early_updates=False)
    layer = torch.nn.Linear(64, 64)
    engine.attach(layer)
    x = torch.randn(8, 64)
    engine.backward(layer(x).sum())
    engine.step()
    torch.cuda.synchronize()
    with engine.pin(layer.weight), engine.pin(layer.bias):
        with pytest.raises(RuntimeError, match="came while a CUDA graph is captured"), \
                torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            layer(x).sum().backward()
    torch.cuda.synchronize()
    engine.zero_grad()
    engine.backward(layer(x).sum())
    assert engine.grad_norm() > 0
    engine.step()
    engine.close()


def test_large_activations_through_files(tmp_path: Path) -> None:
    """In pieces, of which the last is a small one."""
    engine = pagoda.Engine(device="cuda", device_budget="64MiB", nvme=[tmp_path],
                           nvme_budget="512MiB")
    x = torch.randn((5 << 20) + 12345, requires_grad=True)
    gradients = []
    for around in (nullcontext(), engine.activations("nvme")):
        with around:
            y = x.sin().cos().sin()  # x, which stays, and two of which nobody else knows
        y.sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(*gradients)
    assert engine.stats()["tiers"]["nvme"]["holders"]["activations"]["peak"] > 3 * x.nbytes // 2


def test_raw_pointers() -> None:
    """A CUDA graph and a Triton kernel get an error that names the page, and work under a pin."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, str(root / "examples" / "python" / "raw_pointers.py"), "--compile"],
        check=False, text=True, capture_output=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(root / "python")})
    assert result.returncode == 0, result.stdout + result.stderr
    for way in ("captured", "by_triton"):
        assert f"{way}: page '" in result.stdout, result.stdout
        assert f"{way}: pinned, it works" in result.stdout, result.stdout
    assert result.stdout.count("engine.pin") == 2
    assert "compiled: works without a pin" in result.stdout
