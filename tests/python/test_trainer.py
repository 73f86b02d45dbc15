# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer trains through an engine, without a subclass, to the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
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


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def test_callbacks_beside_the_engines(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    engine = pagoda.Engine(**parity.config_below_a_third(ZOO["llama"].make))
    model: Any = ZOO["llama"].make()
    with pytest.raises(pagoda.UserError, match="callbacks must be a list"):
        pagoda.trainer.arguments(engine, model, args, callbacks=Counting())  # type: ignore[arg-type]
    mine = Counting()
    trainer = Trainer(model=model, args=args, train_dataset=Texts(),
                      **pagoda.trainer.arguments(engine, model, args, callbacks=[mine]))
    trainer.train()
    assert mine.steps == engine.stats()["steps"] == 4


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


def test_arguments_attach_and_a_plain_trainer_is_told_of_them(tmp_path: Path) -> None:
    engine = pagoda.Engine(**parity.config_below_a_third(ZOO["gpt2"].make))
    model: Any = ZOO["gpt2"].make()
    engine.attach(model)
    with pytest.raises(pagoda.UserError, match=r"arguments\(\) attaches it itself: leave attach\(\)"):
        pagoda.trainer.arguments(engine, model, arguments(tmp_path))
    for norm in (0.5, 0.0):  # the clipping, and without it the step
        plain = Trainer(model=model, args=arguments(tmp_path, max_grad_norm=norm), train_dataset=Texts())
        with pytest.raises(pagoda.UserError, match=r"Trainer takes \*\*pagoda\.trainer\.arguments\("):
            plain.train()
        if engine.has_gradients():
            engine.step()


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    engine = pagoda.Engine(device="cpu", device_budget="8MiB")
    model = ZOO["gpt2"].make()
    with pytest.raises(pagoda.UserError, match="adafactor"):
        pagoda.trainer.arguments(engine, model, arguments(tmp_path, optim="adafactor"))
    sharded = arguments(tmp_path)
    sharded.deepspeed = "ds_config.json"
    wrong: list[tuple[Any, Any, Any]] = [
        (None, model, arguments(tmp_path)), (engine, None, arguments(tmp_path)),
        (engine, model, None), (engine, model, sharded), (engine, model, {"learning_rate": 1})]
    for each in wrong:
        with pytest.raises(pagoda.UserError):
            pagoda.trainer.arguments(*each)


def test_sgd_takes_its_optim_args(tmp_path: Path) -> None:
    engine = pagoda.Engine(device="cpu", device_budget="8MiB")
    model = ZOO["gpt2"].make()
    pagoda.trainer.arguments(engine, model, arguments(
        tmp_path, optim="sgd", optim_args="momentum=0.9,nesterov=True"))
    for group in engine.optimizer.param_groups:
        assert group["momentum"] == 0.9 and group["nesterov"] == 1


@pytest.mark.parametrize(("named", "given", "message"), [
    ("sgd", "maximize=True", "'maximize' is not supported with optim='sgd'; SGD has momentum"),
    ("sgd", "momentum=much", "optim_args: 'momentum=much' is not allowed: expected a number"),
    ("adamw_torch", "amsgrad=True", "'amsgrad' is not supported with optim='adamw_torch'")])
def test_optim_args_that_would_change_nothing_are_refused(named: str, given: str, message: str,
                                                          tmp_path: Path) -> None:
    engine = pagoda.Engine(device="cpu", device_budget="8MiB")
    with pytest.raises(pagoda.UserError, match=message):
        pagoda.trainer.arguments(engine, ZOO["gpt2"].make(),
                                 arguments(tmp_path, optim=named, optim_args=given))


# What Trainer and Accelerate would lose without a word: there are no checkpoints of an engine yet.


def test_checkpoints_are_weights_and_that_is_said(tmp_path: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps",
                     eval_steps=2, load_best_model_at_end=True)
    assert not args.save_only_model
    with caplog.at_level("WARNING", logger="pagoda"):
        engine, model, trainer = paged_trainer("gpt2", args)
        trainer.train()
    said = [record.message for record in caplog.records if record.name == "pagoda"]
    assert len(said) == 1 and "save_only_model" in said[0]
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        names = {path.name for path in (tmp_path / checkpoint).iterdir()}
        assert "model.safetensors" in names
        assert not names & {"optimizer.pt", "scheduler.pt"}
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint)
    expected = parity.values(best)
    assert all(torch.equal(value, expected[key]) for key, value in parity.values(model).items())
    with pytest.raises(pagoda.UserError, match=r"resume_from_checkpoint.*from_pretrained"):
        trainer.train(resume_from_checkpoint=True)


def test_resuming_in_another_process_is_an_error(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    torch.manual_seed(0)
    plain = Trainer(model=ZOO["gpt2"].make(), args=args, train_dataset=Texts())
    plain.train()  # with an optimizer's state in its checkpoints
    _, _, trainer = paged_trainer("gpt2", arguments(tmp_path, max_steps=8))
    with pytest.raises(pagoda.UserError, match=r"save_pretrained|from_pretrained"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.raises(pagoda.UserError, match="from_pretrained"):
        paged_trainer("gpt2", arguments(tmp_path, resume_from_checkpoint=str(tmp_path)))


def test_another_args_than_trainers_own_saves_weights_too(tmp_path: Path) -> None:
    engine = pagoda.Engine(**parity.config_below_a_third(ZOO["gpt2"].make))
    with engine.build():
        model: Any = ZOO["gpt2"].make()
    keywords = pagoda.trainer.arguments(engine, model, arguments(tmp_path))
    trainer = Trainer(model=model, train_dataset=Texts(), **keywords,
                      args=arguments(tmp_path, save_strategy="steps", save_steps=2))
    trainer.train()
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()


def test_training_goes_on_in_a_second_call_and_a_second_trainer(tmp_path: Path) -> None:
    engine, model, trainer = paged_trainer("gpt2", arguments(tmp_path))
    trainer.train()
    trainer.train()
    other = Trainer(model=model, args=arguments(tmp_path), train_dataset=Texts(),
                    optimizers=(engine.optimizer, None))
    other.train()
    assert engine.stats()["steps"] == 12


def test_the_loss_scale_is_the_engines_under_trainer(tmp_path: Path) -> None:
    def run(scale: str) -> list[torch.Tensor]:
        engine = pagoda.Engine(loss_scale=scale, **parity.config_below_a_third(ZOO["gpt2"].make))
        torch.manual_seed(0)
        with engine.build():
            model: Any = ZOO["gpt2"].make()
        args = arguments(tmp_path)
        trainer = Trainer(model=model, args=args, train_dataset=Texts(),
                          **pagoda.trainer.arguments(engine, model, args))
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return [torch.tensor(norms), *parity.values(model).values()]

    for mine, theirs in zip(run("128"), run("none"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_another_clip_than_the_engines_is_an_error(tmp_path: Path) -> None:
    engine, _, trainer = paged_trainer("gpt2", arguments(tmp_path))
    trainer.args.max_grad_norm = 0.25
    with pytest.raises(pagoda.UserError, match=r"0\.25 and the engine clips the 2-norm at 0\.5"):
        trainer.train()


def test_a_copy_of_the_model_saves_itself(tmp_path: Path) -> None:
    _, model, trainer = paged_trainer("gpt2", arguments(tmp_path))
    early = copy.deepcopy(model)
    before = parity.values(early)
    trainer.train()
    early.save_pretrained(tmp_path / "early")
    model.save_pretrained(tmp_path / "late")
    for name, expected in (("early", before), ("late", parity.values(model))):
        again = parity.values(type(model).from_pretrained(tmp_path / name))
        assert all(torch.equal(value, expected[key]) for key, value in again.items())


def test_accelerate_saves_no_state_without_moments(tmp_path: Path) -> None:
    from accelerate import Accelerator

    engine = pagoda.Engine(device="cpu", device_budget="4MiB", host_budget="512MiB")
    model = torch.nn.Linear(8, 8)
    accelerator = Accelerator(cpu=True)
    ours = engine.attach(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    prepared, optimizer, schedule = accelerator.prepare(model, ours, schedule)
    accelerator.save_state(str(tmp_path / "fresh"))  # there is nothing yet that could be lost
    accelerator.load_state(str(tmp_path / "fresh"))
    for _ in range(2):
        accelerator.backward(prepared(torch.ones(1, 8)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert ours.param_groups[0]["lr"] == 0.025
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(pagoda.UserError, match=(
                rf"accelerator\.{call.__name__}\(\) after 2 steps: checkpoints of the engine's optimizer "
                r".*not supported yet\. engine\.save_pretrained")):
            call(str(tmp_path / "fresh"))
    engine.release(model)
