# SPDX-License-Identifier: Apache-2.0
"""One rank of test_failures.py, started by torchrun: releases its model after backward passes without
their step, of which ranks have different numbers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch

import pagoda

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
for early in (False, True):
    with pagoda.Engine(device="cpu", device_budget="64KiB", gradient_staging="24KiB",
                       parameters="host", early_updates=early, accumulation=2, zero=int(sys.argv[1]),
                       timeout=30) as engine:
        for attached in range(2):
            engine.attach(model)
            for step in range(3):
                engine.backward(model(torch.full((2, 64), float(step + engine.rank))).sum())
                engine.backward(model(torch.ones(2, 64)).sum())
                engine.step()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for _ in range(engine.rank + 1):
                engine.backward(model(torch.ones(2, 64)).sum())
            engine.release(model)
            assert all(map(torch.equal, before, model.parameters()))
