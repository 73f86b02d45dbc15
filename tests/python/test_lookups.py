# SPDX-License-Identifier: Apache-2.0
"""Embeddings that are read where they lie: the same bits, and the page stays off the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
                            "parameters": "host", "gradients": "host", "optimizer_state": "host",
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
        with pytest.raises(RuntimeError, match="raw pointer"):
            table.weight.data_ptr()


class Watching(TorchDispatchMode):
    """Looks at all of a table whenever it is looked up."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.total = args[0].sum().item()
        return func(*args, **(kwargs or {}))


def test_modes_and_transforms_see_the_whole_table() -> None:
    with engine("cpu") as paged:
        table, right = table_off_the_device(paged)
        tokens = batch("cpu", 0)
        with Watching() as watching:
            assert torch.equal(table(tokens), nn.functional.embedding(tokens, right))
        assert watching.total == right.sum().item()
        scale = torch.ones(())
        slope = torch.func.grad(lambda x: (table(tokens).detach() * x).sum())(scale)
        assert torch.equal(slope, nn.functional.embedding(tokens, right).sum())
        assert paged.stats()["pages"]["lookups"] == 0


def test_an_index_that_is_too_large_is_torchs_error() -> None:
    with engine("cpu") as paged:
        table, right = table_off_the_device(paged)
        with pytest.raises(IndexError):
            table(torch.tensor([1, ROWS]))
        assert torch.equal(table(torch.tensor([7])), right[7:8])
        assert paged.stats()["pages"]["lookups"] == 2


OUT_OF_RANGE = """
import conftest
import torch
from test_lookups import engine, table_off_the_device
with engine("cuda") as paged:
    table, _ = table_off_the_device(paged)
    try:
        table(torch.tensor([1, 10**6], device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("torch says:", error)
"""


def test_the_same_on_a_gpu_does_not_end_the_process() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")
    run = subprocess.run([sys.executable, "-c", OUT_OF_RANGE], text=True, capture_output=True,
                         cwd=Path(__file__).parent, check=False)
    assert "torch says: CUDA error: device-side assert" in run.stdout, run.stderr
    assert run.returncode >= 0, f"ended by signal {-run.returncode}: {run.stderr}"
