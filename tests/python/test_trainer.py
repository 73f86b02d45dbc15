# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer trains through an engine, without a subclass, to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from transformers import Trainer, TrainingArguments
from zoo import ZOO, tokens

import pagoda
import pagoda.trainer


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = tokens(index)[0]
        return {"input_ids": row, "labels": row}


def arguments(path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(**{
        "output_dir": str(path), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 1, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "seed": 3, "disable_tqdm": True, **more})


def paged_trainer(name: str, args: TrainingArguments) -> tuple[pagoda.Engine, Any, Trainer]:
    engine = pagoda.Engine(**parity.config_below_a_third(ZOO[name].make))
    torch.manual_seed(0)
    with engine.build():
        model: Any = ZOO[name].make()
    trainer = Trainer(model=model, args=args, train_dataset=Texts(), eval_dataset=Texts(),
                      **pagoda.trainer.arguments(engine, model, args))
    return engine, model, trainer


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_trains_as_ever(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = ZOO[name].make()
    theirs = Trainer(model=plain, args=arguments(tmp_path / "plain"), train_dataset=Texts())
    expected = theirs.train()

    engine, model, trainer = paged_trainer(name, arguments(tmp_path / "paged"))
    result = trainer.train()
    assert engine.stats()["steps"] == 4
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    before = parity.values(plain)
    for key, value in parity.values(model).items():
        torch.testing.assert_close(value, before[key], rtol=1e-4, atol=1e-6)
    norms = [[entry["grad_norm"] for entry in each.state.log_history if "grad_norm" in entry]
             for each in (theirs, trainer)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    rates = [[entry["learning_rate"] for entry in each.state.log_history
              if "learning_rate" in entry] for each in (theirs, trainer)]
    assert rates[0] == rates[1]
    assert trainer.evaluate()["eval_loss"] > 0


def test_checkpoints_are_written_page_by_page(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    engine, model, trainer = paged_trainer("gpt2", args)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    again = type(model).from_pretrained(tmp_path / "final")
    expected = parity.values(model)
    assert all(torch.equal(value, expected[key]) for key, value in parity.values(again).items())
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    engine.release(model)
    assert "save_pretrained" not in vars(model)
    assert "_is_accelerate_prepared" not in vars(model)
    assert model not in pagoda.trainer._attached


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    engine = pagoda.Engine(device="cpu", device_budget="8MiB")
    model = ZOO["gpt2"].make()
    with pytest.raises(pagoda.UserError, match="adafactor"):
        pagoda.trainer.arguments(engine, model, arguments(tmp_path, optim="adafactor"))
