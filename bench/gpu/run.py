#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All states off the GPU beside everything on it: one table.

    bench/gpu/run.py [--results DIR] [ROW…]

Runs each row in a process of its own, those named or all, and writes DIR/ROW.json when it is over. A
row whose file is there is not run again: a table can be made in several goes. Then prints the table,
and below it what its columns have no room for. libpagoda.so and the pagoda program are looked for in
PAGODA_BUILD, or build/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
BUILD = Path(os.environ.get("PAGODA_BUILD", HERE.parents[1] / "build"))

_HOST = {"device_budget": "2GiB", "gradient_staging": "1GiB", "parameters": "host",
         "gradients": "host", "optimizer_state": "host"}
_COMPACT = {"moments": "bf16", "master": "split"}

# name: way, shape, batch, settings.
ROWS: dict[str, tuple[str, str, int, dict[str, Any]]] = {}
for _batch in (4, 16):
    ROWS[f"a{_batch}"] = ("resident", "3B", _batch, {})
    ROWS[f"b{_batch}"] = ("fsdp", "3B", _batch, {})
    ROWS[f"c{_batch}"] = ("pagoda", "3B", _batch, _HOST)
    ROWS[f"c{_batch}-clip"] = ("pagoda", "3B", _batch, {**_HOST, "clip": 1.0})
    # Nothing has been learnt: norms are above 1 in every step, and the row before clips in all of
    # them. This one clips in none, as most steps of a training do not.
    ROWS[f"c{_batch}-clip-ahead"] = ("pagoda", "3B", _batch,
                                     {**_HOST, "clip": 100.0, "clip_ahead": True})
    ROWS[f"c{_batch}-bf16"] = ("pagoda", "3B", _batch, {**_HOST, **_COMPACT})
    ROWS[f"e{_batch}"] = ("deepspeed", "3B", _batch, {})
ROWS["d-a4"] = ("resident", "1B", 4, {})
ROWS["d-b4"] = ("fsdp", "1B", 4, {})
_NVME = {**_HOST, "optimizer_state": "nvme", "disk": True, "host_budget": "8GiB", "nvme_budget": "16GiB",
         "device_budget": "3GiB"}
ROWS["d-nvme"] = ("pagoda", "1B", 4, _NVME)
ROWS["d-nvme-bf16"] = ("pagoda", "1B", 4, {**_NVME, **_COMPACT})
ROWS["d-auto"] = ("pagoda", "1B", 4, {"device_budget": "2GiB", "gradient_staging": "1GiB",
                                      "disk": True, "host_budget": "50GiB", "nvme_budget": "32GiB"})
# The same losses, whatever is paged.
_PARITY = {**_HOST, "deterministic": True, "steps": 5}
ROWS["p4"] = ("pagoda", "3B", 4, _PARITY)
ROWS["p4-resident"] = ("pagoda", "3B", 4, {**_PARITY, "device_budget": "64GiB",
                                           "parameters": "device", "gradients": "device",
                                           "optimizer_state": "device"})
# The embedding and the head are pages of almost 1 GiB, and so are their gradients: pages have 2 GiB,
# gradients on their way 1, and torch 6 in all, for these and for what a layer computes.
_SMALL = {"device_limit": "8GiB", "device_budget": "3GiB", "gradient_staging": "1GiB",
          "host_budget": "99GiB", "activation_reserve": "3GiB", "nvme_budget": "32GiB",
          "disk": True}
ROWS["8B"] = ("fine_tune", "8B", 4, {**_SMALL, "master": "split"})
ROWS["8B-x4"] = ("fine_tune", "8B", 16, {**_SMALL, "master": "split", "accumulation": 4, "steps": 6})
ROWS["8B-bf16"] = ("fine_tune", "8B", 4, {**_SMALL, **_COMPACT})

# Rows that are run when they are named: each writes DIR/ROW.perfetto.json.gz, for ui.perfetto.dev and
# picture.py.
TRACES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    f"c{batch}-trace": ("traced", "3B", batch, _HOST) for batch in (4, 16)}
TRACES["c4-bf16-trace"] = ("traced", "3B", 4, {**_HOST, **_COMPACT})
TRACES["d-nvme-trace"] = ("traced", "1B", 4, _NVME)
ALL = {**ROWS, **TRACES}

# The row with everything on the GPU that a shape and batch are compared with.
BASES = {("3B", 4): "a4", ("3B", 16): "a16", ("1B", 4): "d-a4"}
PARITY = ("p4-resident", "p4")


def environment(way: str, settings: dict[str, Any]) -> dict[str, str]:
    """What torch must be told before CUDA begins."""
    out = {}
    if way == "fine_tune":  # sizes of all kinds in little memory: without gaps
        out["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if settings.get("deterministic"):
        out["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return out


def shrunk(settings: dict[str, Any], by: int) -> dict[str, Any]:
    """The settings for a workload that is smaller by as much."""
    if not settings:
        return {}
    out = {key: int(value.removesuffix("GiB")) * 2**30 // by
           if isinstance(value, str) and value.endswith("GiB") else value
           for key, value in settings.items()}
    if "host_budget" in out:
        out["host_budget"] += 10 << 20  # buffers do not shrink with the model
    return {**out, "staging": "64KiB", "update_chunk": "64KiB", "fetch_threads": 2}


def child(name: str, path: Path, tiny: bool) -> None:
    """One row, in this process."""
    sys.path.insert(0, str(HERE.parents[1] / "python"))
    if name == "machine":
        import limits

        out: dict[str, Any] = limits.measure(str(BUILD / "bin" / "pagoda"))
    else:
        import ways
        import workload

        way, shape, batch, settings = ALL[name]
        if not tiny and workload.DEVICE.type != "cuda":
            sys.exit("there is no GPU here")
        if tiny:
            workload.shrink()
            settings = shrunk(settings, workload.SHRUNK)
        if name in TRACES:
            settings = {**settings, "trace": path.with_suffix(".perfetto.json.gz")}
        elif settings.get("optimizer_state") == "nvme":
            import limits

            settings = {**settings,
                        "disk_rate": partial(limits.disk_now, str(BUILD / "bin" / "pagoda"), tiny)}
        out = getattr(ways, way)(shape, batch, **settings)
    part = path.with_suffix(".part")  # a row that was cut off is not there
    part.write_text(json.dumps(out))
    part.rename(path)


def run(name: str, directory: Path, tiny: bool) -> None:
    path = directory / f"{name}.json"
    if path.exists():
        return
    print(f"running {name}", file=sys.stderr, flush=True)
    way, _, _, settings = ALL.get(name, ("", "", 0, {}))
    process = subprocess.Popen([sys.executable, __file__, "--child", name, str(path),
                                *(["--tiny"] if tiny else [])], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, **environment(way, settings)})
    assert process.stdout is not None
    why = ""
    try:
        for line in process.stdout:
            if line.startswith("step "):
                print(f"{name}: {line}", end="", file=sys.stderr, flush=True)
            elif line.strip():
                why = line.strip()
    except KeyboardInterrupt:
        process.kill()
        raise
    if process.wait() != 0:
        why = why or f"exit code {process.returncode}"
        skipped = "No module named" in why
        print(f"{name}: {'skipped' if skipped else 'failed'}: {why}", file=sys.stderr, flush=True)


def table(read: dict[str, dict[str, Any]], machine: dict[str, float] | None) -> list[str]:
    """What is there, row by row."""
    import limits

    head = ["row", "step s", "of (a)", "limit s", "limit is", "tokens/s", "TFLOP/s", "device GiB",
            "pages GiB", "host GiB", "B/param", "update s", "stall s", "hits %", "late %"]
    lines = [head]
    for name, (_, shape, batch, settings) in ROWS.items():
        row = read.get(name)
        if row is None:
            continue
        base = read.get(BASES.get((shape, batch), ""))
        ratio = f"{row['seconds'] / base['seconds']:.3f}" if base else "–"
        limit, what = ("–", "–")
        if machine is not None:
            seconds, what = limits.of_row(row, base, machine, "moments" in settings)
            limit = f"{seconds:.3f}"
        pagoda = "moved" in row
        lines.append([
            name, f"{row['seconds']:.3f}", ratio, limit, what, f"{row['tokens']:.0f}",
            f"{row['tflops']:.0f}", f"{row['device_peak']:.1f}",
            f"{row['pages_peak']:.2f}" if pagoda else "–", f"{row['host_peak']:.1f}",
            f"{row['host_states'] * 2**30 / row['parameters']:.1f}" if pagoda else "–",
            f"{row['exposed_update']:.3f}" if pagoda else "–",
            f"{row['stall']:.3f}" if pagoda else "–",
            f"{100 * row['hit_rate']:.1f}" if pagoda else "–",
            f"{100 * row['late']:.1f}" if pagoda else "–"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) if i else cell.ljust(width)
                      for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
            for line in lines]


def parity(read: dict[str, dict[str, Any]]) -> list[str]:
    """Whether the losses of a run with everything resident are those of a paged one."""
    if any(name not in read for name in PARITY):
        return []
    resident, paged = (read[name]["losses"] for name in PARITY)
    text = f"parity of {' and '.join(PARITY)}: "
    for step, (a, b) in enumerate(zip(resident, paged, strict=True), 1):
        if a != b:
            return [text + f"the loss of step {step} differs: {a!r} and {b!r}"]
    return [text + f"{len(paged)} losses equal bit for bit, {paged[0]:.6f} to {paged[-1]:.6f}"]


def clipping(name: str, row: dict[str, Any], limit: float) -> str:
    """Whether it was, and what became of updates that did not wait for the norm."""
    norms, updates = row["norms"], row["updates"]
    kept = row["holders"]["host"].get("early updates", 0.0)
    return (f"{name}: norms {min(norms):.3f} to {max(norms):.3f}, "
            f"{sum(norm >= limit for norm in norms)} of {len(norms)} steps clipped; of "
            f"{updates['pages']:.0f} updates a step {updates['early']:.0f} begun during backward, "
            f"{updates['rolled_back']:.1f} rolled back; {kept:.1f} GiB of the host for that")


def fine_tuned(name: str, row: dict[str, Any]) -> str:
    """Where everything was, and what was learnt."""
    states = {tier: sum(row["holders"][tier].get(tag, 0.0) for tag in
                        ("parameters", "gradients", "optimizer")) for tier in ("host", "nvme")}
    used = f", {row['device_used']:.2f} with CUDA's own" if "device_used" in row else ""
    activations = row["holders"]["host"].get("activations", 0.0)
    return (f"{name}: loss {row['losses'][0]:.2f} to {row['losses'][-1]:.2f} in "
            f"{len(row['losses'])} steps of text by bytes; device {row['device_total']:.2f} GiB "
            f"({row['device_reserved']:.2f} torch's{used}); states {states['host']:.1f} GiB on the "
            f"host, {states['nvme']:.1f} on disk; activations {activations:.2f} GiB on the host; "
            f"process {row['host_peak'] * 2**30 / 1e9:.1f} GB")


def report(directory: Path) -> str:
    read = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    machine = read.pop("machine", None)
    out = table(read, machine)
    if machine is not None:
        out.append(f"link {machine['to_device'] / 1e9:.1f} GB/s to the device, "
                   f"{machine['to_host'] / 1e9:.1f} to the host; updates at best "
                   f"{machine['update'] / 1e9:.2f} G parameters/s; disk {machine['disk'] / 1e9:.2f} "
                   "GB/s")
        import limits

        out += [limits.of_disk(name, read[name], machine) for name in ROWS
                if "disk" in read.get(name, {})]
    out += [clipping(name, read[name], settings["clip"]) for name, (*_, settings) in ROWS.items()
            if "clip" in settings and "norms" in read.get(name, {})]
    out += parity(read)
    out += [fine_tuned(name, read[name]) for name, (way, *_) in ROWS.items()
            if way == "fine_tune" and name in read]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("ROW", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(["machine", *ALL]))
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), options.tiny)
        return
    unknown = [name for name in options.rows if name not in ALL and name != "machine"]
    if unknown:
        parser.error(f"there is no row {unknown[0]}: there are {', '.join(['machine', *ALL])}")
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.rows or ["machine", *ROWS]:
        run(name, options.results, options.tiny)
    print(report(options.results))


if __name__ == "__main__":
    main()
