#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All states off the GPU beside everything on it: one table.

    bench/gpu/run.py [--results DIR] [ROW…]

Runs each row in a process of its own, those named or all, and writes DIR/ROW.json when it is over. A
row whose file is there is not run again: a table can be made in several goes. Then prints the table.
libpagoda.so and the pagoda program are looked for in PAGODA_BUILD, or build/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("PAGODA_BUILD", HERE.parents[1] / "build"))

# name: way, shape, batch, settings. The rows of a shape and batch are compared with its `a`.
ROWS: dict[str, tuple[str, str, int, dict[str, Any]]] = {}
for _batch in (4, 16):
    ROWS[f"a{_batch}"] = ("resident", "3B", _batch, {})
    ROWS[f"b{_batch}"] = ("fsdp", "3B", _batch, {})
    ROWS[f"c{_batch}"] = ("pagoda", "3B", _batch, {})
    ROWS[f"c{_batch}-clip"] = ("pagoda", "3B", _batch, {"clip": 1.0})
    ROWS[f"c{_batch}-bf16"] = ("pagoda", "3B", _batch, {"moments": "bf16", "master": "split"})
    ROWS[f"e{_batch}"] = ("deepspeed", "3B", _batch, {})
ROWS["d-a4"] = ("resident", "1B", 4, {})
ROWS["d-b4"] = ("fsdp", "1B", 4, {})
_NVME = {"optimizer": "nvme", "disk": True, "host_budget": "8GiB", "nvme_budget": "32GiB",
         "device_budget": "3GiB", "steps": 5}
ROWS["d-nvme"] = ("pagoda", "1B", 4, _NVME)
ROWS["d-nvme-bf16"] = ("pagoda", "1B", 4, {**_NVME, "moments": "bf16", "master": "split"})
ROWS["d-auto"] = ("pagoda", "1B", 4, {"parameters": "auto", "gradients": "auto",
                                      "optimizer": "auto", "disk": True, "host_budget": "50GiB",
                                      "nvme_budget": "32GiB"})


def child(name: str, path: Path) -> None:
    """One row, in this process."""
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]
    if name == "machine":
        import limits

        out: dict[str, Any] = limits.measure(str(BUILD / "bin" / "pagoda"))
    else:
        import ways

        way, shape, batch, settings = ROWS[name]
        out = getattr(ways, way)(shape, batch, **settings)
    path.write_text(json.dumps(out))


def run(name: str, directory: Path) -> None:
    path = directory / f"{name}.json"
    if path.exists():
        return
    print(f"running {name}", file=sys.stderr, flush=True)
    result = subprocess.run([sys.executable, __file__, "--child", name, str(path)], check=False,
                            text=True, capture_output=True)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        why = lines[-1] if lines else f"exit code {result.returncode}"
        skipped = "No module named" in why
        print(f"{name}: {'skipped' if skipped else 'failed'}: {why}", file=sys.stderr, flush=True)


def table(directory: Path) -> str:
    """What is there, row by row."""
    read = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    machine = read.pop("machine", None)
    head = ["row", "step s", "of (a)", "limit s", "limit is", "tokens/s", "TFLOP/s", "device GiB",
            "pages GiB", "host GiB", "B/param", "update s", "stall s", "hits %", "late %"]
    lines = [head]
    for name, (_, shape, batch, settings) in ROWS.items():
        row = read.get(name)
        if row is None:
            continue
        base = read.get("d-a4" if shape == "1B" else f"a{batch}")
        ratio = f"{row['seconds'] / base['seconds']:.3f}" if base else "–"
        limit, what = ("–", "–")
        if machine is not None:
            sys.path.insert(0, str(HERE))
            import limits

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
    out = ["  ".join(cell.rjust(width) if i else cell.ljust(width)
                     for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
           for line in lines]
    if machine is not None:
        out.append(f"link {machine['to_device'] / 1e9:.1f} GB/s to the device, "
                   f"{machine['to_host'] / 1e9:.1f} to the host; updates at best "
                   f"{machine['update'] / 1e9:.2f} G parameters/s; disk {machine['disk'] / 1e9:.2f} GB/s")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("ROW", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(["machine", *ROWS]))
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    unknown = [name for name in options.rows if name not in ROWS and name != "machine"]
    if unknown:
        parser.error(f"there is no row {unknown[0]}: there are {', '.join(['machine', *ROWS])}")
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.rows or ["machine", *ROWS]:
        run(name, options.results)
    print(table(options.results))


if __name__ == "__main__":
    main()
