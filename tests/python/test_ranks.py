# SPDX-License-Identifier: Apache-2.0
"""Under torchrun, stage 3 gives the bits of a plain loop with the same reduction: gradients of the
ranks are added up in their order in fp32, then divided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import parity
import pytest
import test_trainer
import torch
from transformers import Trainer
from zoo import ZOO

NAMES = ["gpt2", "llama", "qwen3_tied", "mixtral", "t5", "branching"]
MICRO = 10


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(ranks), str(Path(__file__).with_name("ranks.py")), *arguments]
    result = subprocess.run(command, check=False, text=True, capture_output=True, timeout=280,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr


def plain(name: str, ranks: int) -> dict[str, torch.Tensor]:
    """One process does what all ranks do."""
    specimen = ZOO[name]
    torch.manual_seed(0)
    model = specimen.make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = parity.PlainAdamW(parameters)
    for step in range(parity.STEPS):
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for rank in range(ranks):
            torch.manual_seed(1000 * step + rank)
            specimen.loss(model, MICRO * step + rank).backward()
            for i, p in enumerate(parameters):
                before = sums[i]
                if p.grad is not None:
                    sums[i] = p.grad.float() if before is None else before + p.grad.float()
                p.grad = None
        for p, total in zip(parameters, sums, strict=True):
            p.grad = None if total is None else total * torch.tensor(1 / ranks)
        optimizer.step()
    return parity.values(model)


def test_trainer_under_torchrun(tmp_path: Path) -> None:
    """Two ranks with half the micro-batches each, as one Trainer with all of them."""
    torchrun(2, str(tmp_path), "trainer", "llama")
    torch.manual_seed(0)
    plain_model = ZOO["llama"].make()
    args = test_trainer.arguments(tmp_path / "plain", gradient_accumulation_steps=4)
    Trainer(model=plain_model, args=args, train_dataset=test_trainer.Texts()).train()
    expected = parity.values(plain_model)
    saved = parity.values(type(plain_model).from_pretrained(tmp_path / "llama"))
    for rank in range(2):
        got = torch.load(tmp_path / f"llama.{rank}.pt")
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(got[key], saved[key])
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


@pytest.mark.parametrize(("ranks", "how"), [
    (2, "group"), (2, "env"), pytest.param(4, "group", marks=pytest.mark.slow)])
def test_parity(ranks: int, how: str, tmp_path: Path) -> None:
    names = NAMES if how == "group" else NAMES[:1]
    torchrun(ranks, str(tmp_path), how, *names)
    for name in names:
        expected = plain(name, ranks)
        for rank in range(ranks):
            got = torch.load(tmp_path / f"{name}.{rank}.pt")
            different = [key for key, value in expected.items() if not torch.equal(value, got[key])]
            assert different == [], f"{name}, rank {rank} of {ranks}"


def test_ranks_that_torchrun_restarts_find_each_other(tmp_path: Path) -> None:
    """Its store has outlived the attempt before, with the addresses of ranks that are gone."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "1", str(Path(__file__).with_name("restarted_rank.py")), str(tmp_path)],
        check=False, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text() != ""
