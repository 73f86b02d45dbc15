# SPDX-License-Identifier: Apache-2.0
"""The ways to train the workload: each makes the model, trains it and says what it took."""

from __future__ import annotations

import os
import tempfile
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
            "host_peak": int(status["VmHWM"].split()[0]) / 2**20}


def _result(model: Any, batch: int, timing: workload.Timing) -> dict[str, Any]:
    seconds = timing.steady(WARM)
    return {"seconds": seconds, "tokens": batch * workload.SEQUENCE / seconds,
            "tflops": workload.flops(model, batch) / seconds / 1e12,
            "parameters": sum(p.numel() for p in model.parameters()),
            "losses": timing.losses, **_memory()}


def resident(shape: str, batch: int) -> dict[str, Any]:
    """Everything on the GPU, with as few passes over it as torch allows."""
    with torch.device("cuda"):
        model = workload.make_model(shape)
    workload.prepare(model)
    parameters = list(model.parameters())
    with torch.no_grad():
        masters = [p.detach().float() for p in parameters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=workload.LR, fused=True)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for p in parameters:
            p.grad = None

    return _result(model, batch, workload.run(model, batch, STEPS, update))


def fsdp(shape: str, batch: int) -> dict[str, Any]:
    """PyTorch's FSDP2 with CPU offload, one rank."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": "29517"})
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    model = workload.make_model(shape).float()
    workload.prepare(model)
    policy = {"offload_policy": CPUOffloadPolicy(),
              "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                reduce_dtype=torch.bfloat16)}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LR, fused=True)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    out = _result(model, batch, workload.run(model, batch, STEPS, update))
    torch.distributed.destroy_process_group()
    return out


def _difference(after: dict[str, Any], before: dict[str, Any], *path: str) -> int:
    for key in path:
        after, before = after[key], before[key]
    return int(after) - int(before)


def pagoda(shape: str, batch: int, **config: Any) -> dict[str, Any]:
    """Pagoda with all states off the GPU."""
    import pagoda as package

    steps = config.pop("steps", STEPS)
    with tempfile.TemporaryDirectory() as directory:
        nvme = {"nvme": [directory]} if config.pop("disk", False) else {}
        settings = {"device": "cuda", "device_budget": "2GiB", "gradient_staging": "1GiB",
                    "parameters": "host", "gradients": "host", "optimizer": "host", **config, **nvme}
        with package.Engine(**settings) as engine:
            with engine.build():
                model = workload.make_model(shape)
            engine.attach(model, lr=workload.LR)
            workload.prepare(model)

            snapshots = []

            def update(loss: torch.Tensor) -> None:
                engine.backward(loss)
                engine.step()
                snapshots.append(engine.stats())

            timing = workload.run(model, batch, steps, update)
            out = _result(model, batch, timing)
            first, last = snapshots[min(WARM, len(snapshots) - 1) - 1], snapshots[-1]
            count = max(1, len(snapshots) - WARM)
            pages = {key: _difference(last, first, "pages", key)
                     for key in ("faults", "late_prefetches", "prefetch_hits")}
            moved = sum(pages.values())
            out["hit_rate"] = 1 - pages["faults"] / moved if moved else 1.0
            out["late"] = pages["late_prefetches"] / moved if moved else 0.0
            out["exposed_update"] = _difference(last, first, "pages",
                                                "update_stall_ns") / count / 1e9
            out["stall"] = (_difference(last, first, "pages", "fault_stall_ns")
                            + _difference(last, first, "pages", "late_stall_ns")) / count / 1e9
            out["moved"] = {key: _difference(last, first, "moved", key) / count
                            for key in ("nvme_to_host", "host_to_nvme", "host_to_device",
                                        "device_to_host")}
            tiers = last["tiers"]
            out["pages_peak"] = tiers["device"]["peak"] / 2**30
            out["host_states"] = tiers["host"]["peak"] / 2**30
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

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return _result(model, batch, workload.run(engine.module, batch, STEPS, update))
