# SPDX-License-Identifier: Apache-2.0
"""Three layers, for tests of what user code does to their parameters."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64


def make_model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


def loss_of(model: nn.ModuleList, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(4, WIDTH)
    for layer in model:
        x = layer(x).tanh()
    return x.square().sum()
