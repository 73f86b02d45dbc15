# SPDX-License-Identifier: Apache-2.0
"""Embeddings that are read where they lie: the same bits, and the page stays off the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pagoda

ROWS, WIDTH = 5000, 48
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Tied(nn.Module):
    """The last gradient to come is that of the first operator's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(self.table(tokens)))
        logits = hidden @ self.table.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def engine(device: str, **more: Any) -> pagoda.Engine:
    return pagoda.Engine(**{"device": device, "device_budget": "4MiB", "gradient_staging": "2MiB",
                            "parameters": "host", "gradients": "host", "optimizer": "host",
                            "prefetch": False, "lookup_in_place": "64KiB", **more})


def batch(device: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS, (2, 100), generator=generator).to(device)


def losses(device: str, dtype: torch.dtype, **more: Any) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    with engine(device, **more) as paged:
        with paged.build():
            model = Tied().to(dtype)
        paged.attach(model, lr=1e-2)
        out = []
        for step in range(5):
            loss = model(batch(device, step))
            paged.backward(loss)
            paged.step()
            out.append(loss.item())
        return out, paged.stats()["pages"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_the_losses_are_those_of_whole_pages(device: str, dtype: torch.dtype) -> None:
    plain, pages = losses(device, dtype, lookup_in_place=0)
    assert pages["lookups"] == 0
    in_place, pages = losses(device, dtype)
    assert pages["lookups"] >= 4  # all but the first, whose page was just made
    assert in_place == plain


def table_off_the_device(paged: pagoda.Engine) -> tuple[nn.Embedding, torch.Tensor]:
    """A table that has just made room for another page, and what it holds."""
    torch.manual_seed(0)
    with paged.build():
        model = nn.ModuleDict({"table": nn.Embedding(ROWS, WIDTH), "other": nn.Linear(600, 600)})
    paged.attach(model)
    table = model["table"]
    assert isinstance(table, nn.Embedding)
    right = table.weight.detach().clone()
    model["other"](torch.ones(1, 600, device=right.device))
    return table, right


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_that_is_only_looked_up_is_never_fetched(device: str) -> None:
    with engine(device) as paged:
        table, right = table_off_the_device(paged)
        before = paged.stats()["moved"]["host_to_device"]
        for step in range(3):
            tokens = batch(device, step)
            assert torch.equal(table(tokens), nn.functional.embedding(tokens, right))
        assert paged.stats()["moved"]["host_to_device"] - before == 3 * 200 * WIDTH * 4
        with pytest.raises(RuntimeError, match="nothing announced"):
            table.weight.data_ptr()


def test_an_index_that_is_too_large_is_torchs_error() -> None:
    with engine("cpu") as paged:
        table, right = table_off_the_device(paged)
        with pytest.raises(IndexError):
            table(torch.tensor([1, ROWS]))
        assert torch.equal(table(torch.tensor([7])), right[7:8])
        assert paged.stats()["pages"]["lookups"] == 2
