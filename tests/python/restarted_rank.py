# SPDX-License-Identifier: Apache-2.0
"""One rank of test_ranks.py that torchrun restarts: the first attempt loses rank 1."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import torch

import pagoda

RANK = int(os.environ["RANK"])

engine = pagoda.Engine(device="cpu", device_budget="1MiB", timeout=10)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
engine.attach(model, lr=1e-2)
for step in range(4):
    engine.backward(model(torch.full((2, 16), float(step))).square().mean())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
engine.close()
Path(sys.argv[1], f"rank{RANK}").write_text(model.weight.detach().numpy().tobytes().hex())
