# SPDX-License-Identifier: Apache-2.0
"""The ways to train the workload: each makes the model, trains it and says what it took."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import workload

WARM = 3
STEPS = WARM + 8


def _memory() -> dict[str, float]:
    """Peaks of this process, in GiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file if ":" in line)
    return {"device_peak": torch.cuda.max_memory_allocated() / 2**30,
            "device_reserved": torch.cuda.max_memory_reserved() / 2**30,
            "host_peak": int(status["VmHWM"].split()[0]) / 2**20}


def _result(model: Any, batch: int, timing: workload.Timing,
            seconds: float | None = None) -> dict[str, Any]:
    """`seconds` of a step, if they are not the median."""
    seconds = seconds or timing.steady(WARM)
    return {"seconds": seconds, "tokens": batch * workload.SEQUENCE / seconds,
            "tflops": workload.flops(model, batch) / seconds / 1e12,
            "parameters": sum(p.numel() for p in model.parameters()),
            "losses": timing.losses, "all_seconds": timing.seconds, **_memory()}


def resident(shape: str, batch: int) -> dict[str, Any]:
    """Everything on the GPU, with as few passes over it as torch allows."""
    with workload.DEVICE:
        model = workload.make_model(shape)
    workload.prepare(model)
    parameters = list(model.parameters())
    with torch.no_grad():
        masters = [p.detach().float() for p in parameters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=workload.LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = workload.loss_of(model, tokens)
        loss.backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for p in parameters:
            p.grad = None
        return loss

    return _result(model, batch, workload.run(workload.random_tokens(model, batch), STEPS, step))


def fsdp(shape: str, batch: int) -> dict[str, Any]:
    """PyTorch's FSDP2 with CPU offload, one rank."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": "29517"})
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    with workload.DEVICE:  # random numbers are quicker there
        model = workload.make_model(shape)
    model = model.cpu().float()
    workload.prepare(model)
    policy = {"offload_policy": CPUOffloadPolicy(),
              "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                reduce_dtype=torch.bfloat16)}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = workload.loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    out = _result(model, batch, workload.run(workload.random_tokens(model, batch), STEPS, step))
    torch.distributed.destroy_process_group()
    return out


def _difference(after: dict[str, Any], before: dict[str, Any], *path: str) -> int:
    for key in path:
        after, before = after[key], before[key]
    return int(after) - int(before)


def _paging(snapshots: list[Any]) -> dict[str, Any]:
    """What an engine did in a steady step, from its stats after each step."""
    first, last = snapshots[min(WARM, len(snapshots) - 1) - 1], snapshots[-1]
    count = max(1, len(snapshots) - WARM)
    pages = {key: _difference(last, first, "pages", key)
             for key in ("faults", "late_prefetches", "prefetch_hits")}
    moved = sum(pages.values())
    tiers = last["tiers"]
    stalls = [_difference(last, first, "pages", key) for key in ("fault_stall_ns", "late_stall_ns")]
    return {
        "hit_rate": 1 - pages["faults"] / moved if moved else 1.0,
        "late": pages["late_prefetches"] / moved if moved else 0.0,
        "in_vain": _difference(last, first, "pages", "wasted_prefetches") / count,
        "exposed_update": _difference(last, first, "pages", "update_stall_ns") / count / 1e9,
        "stall": sum(stalls) / count / 1e9,
        "gradient_stall": _difference(last, first, "gradients", "stall_ns") / count / 1e9,
        "moved": {key: _difference(last, first, "moved", key) / count
                  for key in ("nvme_to_host", "host_to_nvme", "host_to_device", "device_to_host")},
        "updates": {key: _difference(last, first, "updates", key) / count
                    for key in ("pages", "early", "rolled_back")},
        "pages_peak": tiers["device"]["peak"] / 2**30,
        "host_states": tiers["host"]["peak"] / 2**30,
        "holders": {name: {tag: holder["peak"] / 2**30 for tag, holder in tier["holders"].items()}
                    for name, tier in tiers.items()}}


@contextmanager
def _engine(**settings: Any) -> Iterator[Any]:
    """Pagoda on the workload's device; `disk`: with a directory for files."""
    import pagoda as package

    with tempfile.TemporaryDirectory() as directory:
        if settings.pop("disk", False):
            settings["nvme"] = [directory]
        with package.Engine(device=workload.DEVICE, **settings) as engine:
            yield engine


def _attached(engine: Any, shape: str) -> Any:
    """The workload's model, trained by the engine."""
    with engine.build():
        model = workload.make_model(shape)
    engine.attach(model, lr=workload.LR)
    workload.prepare(model)
    return model


def pagoda(shape: str, batch: int, *, disk_rate: Callable[[], float] | None = None,
           **config: Any) -> dict[str, Any]:
    """Pagoda, where `config` says. `deterministic`: kernels that always give the same bits. Where
    `disk_rate` measures the disk, it and four steps with all of their updates take turns: disks
    drift. A step then takes a quarter of its turn."""
    steps = config.pop("steps", STEPS)
    torch.use_deterministic_algorithms(config.pop("deterministic", False))
    turns = range(WARM, steps + 1, 4) if disk_rate is not None else ()
    rates = []
    with _engine(**config) as engine:
        model = _attached(engine, shape)
        snapshots = []
        norms: list[float | None] = []  # where it clips

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = workload.loss_of(model, tokens)
            engine.backward(loss)
            norms.append(engine.step().norm)
            if len(snapshots) + 1 in turns:
                engine.finish()
            snapshots.append(engine.stats())
            return loss

        def between(done: int) -> None:
            if disk_rate is not None and done in turns:
                rates.append(disk_rate())

        timing = workload.run(workload.random_tokens(model, batch), steps, step, between)
        steady = timing.seconds[WARM:]
        out = _result(model, batch, timing, sum(steady) / len(steady) if rates else None)
        if rates:
            out.update({"disk": sum(rates) / len(rates), "disk_rates": rates})
        return {**out, **_paging(snapshots), "norms": norms[WARM:]}


def _merged(engine: Path, profile: Path, origin_ns: int) -> dict[str, Any]:
    """One trace of two: the engine's, whose zero was at `origin_ns` of the system's clock, and what
    torch's profiler saw on the device, by its own clock of the same kind."""
    out: dict[str, Any] = json.loads(engine.read_text())
    for event in out["traceEvents"]:
        event["pid"] = 1 << 30  # the profiler's numbers are those of processes and devices
    kernels = json.loads(profile.read_text())
    later = (kernels["baseTimeNanoseconds"] - origin_ns) / 1e3
    for event in kernels["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op"):
            out["traceEvents"].append({**event, "ts": event["ts"] + later})
        elif event["ph"] == "M":
            out["traceEvents"].append(event)
    return out


def traced(shape: str, batch: int, *, trace: Path, **config: Any) -> dict[str, Any]:
    """Pagoda, of which one steady step is written to `trace` (gzip) for ui.perfetto.dev: what the
    engine did on the host and what ran on the device when. Its time is not to be compared: to be
    watched costs."""
    from torch.profiler import ProfilerActivity, profile, schedule

    shown = WARM + 2
    on_device = workload.DEVICE.type == "cuda"
    activity = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as directory:
        mine, kernels = Path(directory) / "engine.json", Path(directory) / "kernels.json"
        with _engine(trace=mine, trace_steps=str(shown), **config) as engine, profile(
                activities=[activity], schedule=schedule(wait=shown - 2, warmup=1, active=1),
                on_trace_ready=lambda done: done.export_chrome_trace(str(kernels))) as profiler:
            model = _attached(engine, shape)
            ends: list[int] = []  # of each step(): there the engine's recording begins

            def step(tokens: torch.Tensor) -> torch.Tensor:
                if ends:
                    profiler.step()
                loss = workload.loss_of(model, tokens)
                engine.backward(loss)
                engine.step()
                ends.append(time.time_ns())
                return loss

            timing = workload.run(workload.random_tokens(model, batch), shown, step)
            profiler.step()
        with gzip.open(trace, "wt") as file:
            json.dump(_merged(mine, kernels, ends[shown - 2]), file)
    return _result(model, batch, timing)


def fine_tune(shape: str, batch: int, *, steps: int = WARM + 9, accumulation: int = 1,
              lr: float = 2e-5, **config: Any) -> dict[str, Any]:
    """Pagoda on a small device: text, activations on the host, the loss without its logits."""
    import pagoda as package

    with _engine(accumulation=accumulation, **config) as engine:
        with engine.build():
            model = workload.make_model(shape)
        workload.prepare(model)

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            with engine.activations("host", in_flight="256MiB"):
                hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
                labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
                return package.chunked_cross_entropy(hidden, model.lm_head.weight, labels)

        optimizer = engine.attach(model, lr=lr)
        warmth = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM))
        snapshots = []

        def step(tokens: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device=workload.DEVICE)
            for part in tokens.chunk(accumulation):
                loss = loss_of(part) / accumulation
                engine.backward(loss)
                total += loss.detach()
            engine.step()
            warmth.step()
            snapshots.append(engine.stats())
            return total

        timing = workload.run(workload.text_tokens(batch), steps, step)
        out = {**_result(model, batch, timing), **_paging(snapshots)}
        # Pages have memory of their own beside torch's; gradients on their way are torch's.
        out["device_total"] = out["device_reserved"] + out["holders"]["device"]["pages"]
        if workload.DEVICE.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            out["device_used"] = (total - free) / 2**30  # with CUDA's own, of every process
        return out


def deepspeed(shape: str, batch: int) -> dict[str, Any]:
    """DeepSpeed's ZeRO-3 with parameters and optimizer on the host, where it is installed."""
    import deepspeed as package

    config = {"train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3,
                                    "offload_param": {"device": "cpu", "pin_memory": True},
                                    "offload_optimizer": {"device": "cpu", "pin_memory": True}},
              "optimizer": {"type": "AdamW", "params": {"lr": workload.LR}}}
    model = workload.make_model(shape)
    workload.prepare(model)
    engine, *_ = package.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = workload.loss_of(engine.module, tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return _result(model, batch, workload.run(workload.random_tokens(model, batch), STEPS, step))
