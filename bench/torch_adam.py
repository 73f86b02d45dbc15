#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Torch's fused CPU AdamW on the size of `pagoda bench adam`, to be run in the same minute.

    bench/torch_adam.py                              torch alone
    bench/torch_adam.py --pagoda build/bin/pagoda    both, side by side
    bench/torch_adam.py --json                       rows in the format of `pagoda bench … --json`
"""
import argparse
import json
import statistics
import subprocess
import time

import torch

# Each row of torch, and the row of `pagoda bench adam` that does the same work.
ROWS = {
    "torch fused adamw fp32": "adamw fp32",
    "torch fused adamw fp32, then bf16 copy": "adamw fp32 → bf16",
}


def measure(params: int, threads: int, rounds: int) -> list[dict]:
    """Median G parameters/s of the step alone, and of the step and a cast of the parameters."""
    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.empty(params).uniform_(-0.04, 0.04))
    weight.grad = torch.empty(params).uniform_(-1e-3, 1e-3)
    copy = torch.empty(params, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01, fused=True)
    optimizer.step()  # makes the state
    optimizer.step()
    step_times, both_times = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        copy.copy_(weight.detach())
        copied = time.perf_counter()
        step_times.append(stepped - start)
        both_times.append(copied - start)
    suffix = f", {threads} thread{'' if threads == 1 else 's'}"
    return [
        {"name": name + suffix, "value": params / statistics.median(times) * 1e-9,
         "unit": "G params/s", "limit": None, "limit_name": "", "ratio": None}
        for name, times in zip(ROWS, (step_times, both_times))
    ]


def pagoda_rows(binary: str, params: int, threads: int, rounds: int) -> dict[str, dict]:
    command = [binary, "bench", "adam", "--json", "--params", str(params), "--only", "adamw fp32",
               "--threads", str(threads), "--rounds", str(rounds)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["name"]: row for row in json.loads(out)["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, action="append",
                        help="may be given several times; default: 1 and all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pagoda", metavar="BINARY", help="also run its bench, and compare")
    args = parser.parse_args()

    rows = []
    for threads in args.threads or sorted({1, torch.get_num_threads()}):
        ours = pagoda_rows(args.pagoda, args.params, threads, args.rounds) if args.pagoda else {}
        for row in measure(args.params, threads, args.rounds):
            name, _, suffix = row["name"].rpartition(", ")
            match = ours.get(f"{ROWS[name]}, {suffix}")
            if match:
                row |= {"value": match["value"], "limit": row["value"],
                        "name": match["name"], "limit_name": name,
                        "ratio": match["value"] / row["value"]}
            rows.append(row)
    if args.json:
        print(json.dumps({"rows": rows}, ensure_ascii=False))
        return
    for row in rows:
        text = f"  {row['name']:<50} {row['value']:6.3f} {row['unit']}"
        if row["limit"]:
            text += f"  {row['limit_name']} {row['limit']:6.3f}  ratio {row['ratio']:.2f}"
        print(text)
    print(f"  {args.params} parameters, torch {torch.__version__}, median of {args.rounds} rounds")


if __name__ == "__main__":
    main()
