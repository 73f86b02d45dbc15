# SPDX-License-Identifier: Apache-2.0
"""Engines of all kinds: budgets from just enough to plenty, all placements and number formats."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from model import Model

KIB = 1024
PLACES = ("auto", "host", "nvme")


def draw_room(random: Random) -> dict[str, Any]:
    return {"pages": random.choice([0, 0, 0, 0.02, 0.1, 0.3, 1.1, 1.1]),
            "device": random.choice([[], [], ["parameters"], ["gradients", "optimizer_state"],
                                     ["parameters", "gradients", "optimizer_state"]]),
            # Of the largest gradient; none: device_budget alone.
            "staging": random.choice([None, None, 0.2, 1, 1, 2, 4]),
            "host": random.choice([None, None, None, "roomy", "scarce"])}


def draw_optimizer(random: Random) -> dict[str, Any]:
    """Groups with all that their optimizer has; layers go round them."""
    count = random.choice([1, 1, 1, 2, 2, 3])
    kind = random.choice(["adamw", "adamw", "adamw", "adam", "sgd", "lion"])
    groups = []
    for _ in range(count):
        if random.random() < 0.15:
            kind = random.choice(["adamw", "adam", "sgd", "lion"])
        group: dict[str, Any] = {"optimizer": kind, "lr": random.choice([1e-3, 3e-3, 1e-2, 5e-2]),
                                 "weight_decay": random.choice([0.0, 0.01, 0.1])}
        if kind == "sgd":
            momentum = random.choice([0.0, 0.9])
            nesterov = momentum > 0 and random.random() < 0.4
            group |= {"momentum": momentum, "nesterov": nesterov,
                      "dampening": 0.0 if nesterov else random.choice([0.0, 0.0, 0.1])}
        else:
            group["betas"] = random.choice([[0.9, 0.999], [0.8, 0.95], [0.9, 0.99]])
            if kind != "lion":
                group["eps"] = random.choice([1e-8, 1e-6])
        groups.append(group)
    # Layers of no group are not trained.
    explicit = count > 1 or random.random() < 0.4
    return {"groups": groups, "explicit": explicit,
            "left_out": random.randrange(1, 8) if explicit and random.random() < 0.2 else None}


def draw_config(random: Random, model: dict[str, Any], optimizer: dict[str, Any],
                ranks: int) -> dict[str, Any]:
    dtypes = {model["dtype"], *(spec["dtype"] for spec in model["layers"])}
    adam = all(group["optimizer"] in ("adam", "adamw") for group in optimizer["groups"])
    config: dict[str, Any] = {
        "device": random.choice(["cpu", "cpu", "cpu", "cpu", "emulated"]),
        "parameters": random.choice(PLACES), "gradients": random.choice(PLACES),
        "optimizer_state": random.choice(PLACES),
        "fetch_threads": random.choice([1, 2, 3, 4]), "update_threads": random.choice([1, 1, 2]),
        "update_chunk": random.choice([4 * KIB, 16 * KIB, 64 * KIB]),
        "update_buffers": random.choice([2, 3, 4, 8]),
        "staging": random.choice([16 * KIB, 20 * KIB, 64 * KIB, 256 * KIB]),
        "bucket": random.choice([4 * KIB, 32 * KIB, 1024 * KIB]),
        "lookup_in_place": random.choice([0, 1, 1, 2000]),
    }

    def sometimes(probability: float, **values: Any) -> None:
        if random.random() < probability:
            config.update(values)

    sometimes(0.2, check_order=True)
    sometimes(0.25, prefetch=False)
    sometimes(0.15, early_updates=False)
    sometimes(0.4, clip=random.choice([0.05, 0.5, 1.0, 5.0]))
    if random.random() < 0.5 and "clip" in config:
        config["clip_ahead"] = True
    sometimes(0.25, moments="bf16", seed=random.randrange(1000))
    sometimes(0.3, gradient_dtype="fp32")
    sometimes(0.3, accumulation=random.choice([2, 3]))
    sometimes(0.2, checksums=False)
    sometimes(0.3, io_engine=random.choice(["uring", "posix"]), direct=random.choice(["on", "off"]))
    split = random.random() < 0.4
    if split and adam and dtypes <= {"bfloat16", "float32"}:
        config["master"] = "split"
    scale = random.choice([None, None, None, None, "dynamic", 128.0, 1.0])
    if scale is not None:
        config["loss_scale"] = scale
        if scale == "dynamic":
            config["loss_scale_initial"] = random.choice([4.0, 65536.0, 2.0 ** 120])
            config["loss_scale_window"] = random.choice([1, 2, 5])
    sometimes(0.15, reduction="sum")
    zero = random.choice([0, 1, 2, 3, 3, 3])
    if ranks > 1:
        config |= {"zero": zero, "timeout": 60, "heartbeat": 5}
    return config


def early(config: dict[str, Any]) -> bool:
    """May updates begin before step(), so that some calls are refused until then."""
    if not config.get("early_updates", True) or "loss_scale" in config:
        return False
    return config.get("clip", 0) == 0 or bool(config.get("clip_ahead"))


def _aligned(size: int) -> int:
    return -(-size // 512) * 512


def resolve(config: dict[str, Any], room: dict[str, Any], model: Model, folder: Path,
            held: int, alone: bool) -> dict[str, Any]:
    """The configuration with its budgets; `held` pages are pinned at a time."""
    sizes: dict[int, int] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        sizes[storage._cdata] = _aligned(max(1, storage.nbytes()))

    def bytes_of(parameters: list[torch.nn.Parameter]) -> int:
        return sum(sizes[key] for key in {p.untyped_storage()._cdata for p in parameters})

    largest = sorted(sizes.values())[-2:]
    need = max([sum(largest), *(bytes_of(group) for group in model.together())])
    need += held * largest[-1]
    pages = int(need + room["pages"] * max(0, sum(sizes.values()) - need))
    if room["pages"] > 1:  # plenty: some of it may be for good
        config = {**config, **{state: "device" for state in room["device"]}}
        pages += 8 * (sum(sizes.values()) + 4 * KIB * len(sizes))
    states = sum(sizes.values()) * 8 + 4 * KIB * len(sizes)
    if room["staging"] is None:
        out = {**config, "device_budget": pages + pages // 7 + 1}
    else:
        staging = int(_aligned(largest[-1]) * room["staging"])
        out = {**config, "device_budget": pages + staging, "gradient_staging": staging}
    fixed = (config["fetch_threads"] + 2) * config["staging"] + 2 * config["bucket"]
    fixed += 5 * config["update_chunk"] * 4 + 256 * KIB
    if room["host"] == "roomy":
        out["host_budget"] = 2 * states + 4 * fixed
    elif room["host"] == "scarce":
        # What is written before step() has a copy on NVMe, with checksums on the host.
        out["host_budget"] = states // 4 + 2 * fixed + 64 * len(sizes)
    if room.get("slack") and "host_budget" in out:
        out["host_budget"] += sum(sizes.values()) + 4 * KIB * len(sizes)
    if not alone and "host_budget" in out:  # there it is not tried again with more
        out["host_budget"] += 2 * states + 4 * fixed + 16 * KIB * KIB
    uses_nvme = room["host"] == "scarce" or "nvme" in (
        config["parameters"], config["gradients"], config["optimizer_state"]) or room.get("nvme")
    if uses_nvme:
        out |= {"nvme": [str(folder)], "nvme_budget": 64 * KIB * KIB}
    return out
