# SPDX-License-Identifier: Apache-2.0
"""What it costs to have Pagoda attached when everything is resident: a step of GPT-2 (124 M) on the
CPU, plain and through an engine, in turns in one process. The limit is the plain step.

    python bench/python_overhead.py [--tokens 512] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pagoda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="in a batch of two rows")
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick look")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    flags = parser.parse_args()

    config = GPT2Config(n_layer=flags.layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    batch = torch.randint(0, config.vocab_size, (2, flags.tokens // 2))

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    parameters = sum(p.numel() for p in plain.parameters())

    def plain_step() -> None:
        loss_of(plain).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    engine = pagoda.Engine(device="cpu", parameters="device", device_budget=parameters * 4 * 2,
                           gradient_staging=parameters * 4 * 3 // 4)
    with engine.build():
        paged = GPT2LMHeadModel(config).train()
    engine.attach(paged, lr=1e-4)

    def paged_step() -> None:
        engine.backward(loss_of(paged))
        engine.step()

    kinds: dict[str, Callable[[], None]] = {"plain": plain_step, "paged": paged_step}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for round_number in range(flags.rounds + 2):
        for name, step in kinds.items():
            started = time.perf_counter()
            step()
            if name == "paged":
                engine.finish()  # pending updates are not left to the other's time
            if round_number >= 2:
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    ratio = best["paged"] / best["plain"]  # others' work on the machine only ever adds
    if flags.json:
        print(json.dumps({"parameters": parameters, **best, "ratio": ratio, "times": times}))
        return
    print(f"GPT-2, {parameters / 1e6:.0f} M parameters, {flags.tokens} tokens a step, "
          f"{torch.get_num_threads()} threads")
    for name in kinds:
        print(f"  {name:<6} best {best[name] * 1e3:9.1f} ms, median {medians[name] * 1e3:9.1f} ms")
    print(f"  best paged / best plain  {ratio:.3f}")
    print(engine.stats())


main()
