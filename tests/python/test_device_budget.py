# SPDX-License-Identifier: Apache-2.0
"""`device_budget` alone: a model trains if its largest operator fits, and where that does not, the
error says the smallest budget that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from torch import nn
from zoo import ZOO

import pagoda


def refusal(name: str, budget: int | str) -> tuple[str, parity.Run | None]:
    """What is said against the budget, or how the model trains with it."""
    specimen = ZOO[name]
    try:
        with pagoda.Engine(device="cpu", device_budget=budget) as engine:
            torch.manual_seed(0)
            with engine.build():
                model = specimen.make()
            return "", parity.train_attached(engine, model, specimen.loss)
    except (pagoda.UserError, RuntimeError) as error:
        return str(error), None


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_tied", "mixtral", "lstm", "convolutions", "t5"])
def test_the_smallest_budget_is_said_and_works(name: str) -> None:
    budget: int | str = 1
    run = None
    for _ in range(40):
        said, run = refusal(name, budget)
        if run is not None:
            break
        advice = re.search(r"device_budget to at least ([\d.]+ (?:B|[KM]iB))", said)
        assert advice, said
        budget = advice[1]
    assert run is not None and isinstance(budget, str)
    print(name, budget)
    parity.assert_equal(parity.train_plainly(ZOO[name].make, ZOO[name].loss), run)
    # Two decimals are shown, rounded up.
    assert refusal(name, int(bytes_of(budget) * 0.98))[1] is None


class Layers(nn.Module):
    """A linear model whose one large weight has most of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.large = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.small:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.large(x)
        return out


def test_gradients_larger_than_their_share_leave_one_by_one() -> None:
    def trained(**config: Any) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        with pagoda.Engine(device="cpu", **config) as engine:
            model = Layers()
            engine.attach(model, lr=1e-2)
            for step in range(3):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
                engine.backward(model(x).square().mean())
                engine.step()
            counts = engine.stats()["gradients"]
            engine.release(model)
            return [p.detach() for p in model.parameters()], counts["larger_than_staging"]

    paged, large = trained(device_budget="152KiB")  # the large weight is 128 KiB, and an eighth is 19
    assert large == 3
    resident, none = trained(device_budget="64MiB")
    assert none == 0
    assert all(map(torch.equal, paged, resident))


def test_so_does_a_small_host_budget_with_a_disk(tmp_path: Path) -> None:
    specimen = ZOO["gpt2"]
    run = parity.train_paged(specimen.make, specimen.loss, parity.config_below_a_third(
        specimen.make, host_budget="12MiB", nvme=[tmp_path]))
    parity.assert_equal(parity.train_plainly(specimen.make, specimen.loss), run)


def test_a_budget_of_a_third_of_the_parameters_is_enough() -> None:
    """Small models as people write them, none with an operator that needs more."""
    refused = []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        widths = [int(64 + 64 * torch.randint(0, 2, (1,), generator=generator)) for _ in range(14)]
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU())
                                for a, b in zip(widths, widths[1:], strict=False)))
        sizes = [p.nbytes for p in model.parameters()]
        budget = sum(sizes) // 3
        assert budget * 7 // 8 > max(sizes) + 1024, "its largest operator does not fit"
        try:
            with pagoda.Engine(device="cpu", device_budget=budget) as engine:
                engine.attach(model)
                for _ in range(2):
                    engine.backward(model(torch.ones(2, widths[0])).sum())
                    engine.step()
        except pagoda.Error as error:
            refused.append(f"{seed}: {error}")
    assert refused == []
