# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: its link, its memory, its disk, and what a row needs of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def _link(to_device: bool) -> float:
    import torch

    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if to_device:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.numel() / (time.perf_counter() - began))
    return best


def _bench(program: str, *arguments: str) -> dict[str, Any]:
    import torch

    libraries = Path(torch.__file__).parent / "lib"  # a program built elsewhere finds torch so
    result = subprocess.run([program, "bench", *arguments, "--json"], check=True, text=True,
                            capture_output=True,
                            env={**os.environ, "LD_LIBRARY_PATH": str(libraries)})
    return {row["name"]: row for row in json.loads(result.stdout)["rows"]}


def _disk(program: str, *load: str) -> float:
    """The best that any way reaches of reading and writing at once, in bytes a second. A disk may
    have a cache: the load should be as large as a row's states, nearly."""
    with tempfile.TemporaryDirectory() as directory:
        rows = _bench(program, "io", "--dir", directory, "--only", "mixed", *load)
    return max(row["value"] for name, row in rows.items() if name.startswith("mixed")) * 1e9


def measure(program: str) -> dict[str, float]:
    """Bytes a second each way over the link, of the host's memory, and of the disk."""
    out = {"to_device": _link(True), "to_host": _link(False)}
    # The memory's limit for the bytes that an update moves, on all threads.
    adam = _bench(program, "adam", "--only", "adamw bf16 grad")
    for key, kernel in (("update", "adamw bf16 grad → bf16"),
                        ("update_bf16", "adamw bf16 grad, split master, bf16 moments")):
        out[key] = max(row["limit"] for name, row in adam.items()
                       if re.fullmatch(kernel + r", \d+ threads?", name)) * 1e9
    out["disk"] = _disk(program, "--size", "8GiB", "--rounds", "3", "--seconds", "2")
    return out


def disk_now(program: str, tiny: bool) -> float:
    """What the disk gives at this moment, over nearly as much as a row has there: in turns with a
    row's steps, for some are quick for a while only, and they drift."""
    size, seconds = ("16MiB", "0.1") if tiny else ("12GiB", "6")
    return _disk(program, "--alone", "--depth", "32", "--size", size, "--rounds", "1",
                 "--seconds", seconds)


def _disk_bytes(row: dict[str, Any]) -> float:
    moved = row["moved"]
    return float(moved["nvme_to_host"] + moved["host_to_nvme"])


def of_row(row: dict[str, Any], resident: dict[str, Any] | None, machine: dict[str, float],
           short_moments: bool) -> tuple[float, str]:
    """The least seconds that a step of this row can take, and what sets them."""
    moved = row.get("moved")
    if moved is None:
        return row["seconds"], "itself"
    needs = {
        "compute": resident["seconds"] if resident is not None else 0.0,
        "link to device": moved["host_to_device"] / machine["to_device"],
        "link to host": moved["device_to_host"] / machine["to_host"],
        "update": row["parameters"] / machine["update_bf16" if short_moments else "update"],
        "disk": _disk_bytes(row) / row.get("disk", machine["disk"]),
    }
    name = max(needs, key=lambda key: needs[key])
    return needs[name], name


def of_disk(name: str, row: dict[str, Any], machine: dict[str, float]) -> str:
    """A step beside the disk's time for its bytes."""
    moved = _disk_bytes(row)
    now, best = (row["seconds"] * rate / moved for rate in (row["disk"], machine["disk"]))
    rates = ", ".join(f"{rate / 1e9:.2f}" for rate in row["disk_rates"])
    return (f"{name}: {moved / 1e9:.1f} GB to and from the disk; the step takes {now:.2f} of its time "
            f"at the rates measured in turns ({rates} GB/s), {best:.2f} at the best of two seconds "
            f"before the rows ({machine['disk'] / 1e9:.2f})")
