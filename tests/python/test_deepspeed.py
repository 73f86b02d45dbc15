# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration is honoured, answered or refused, key by key."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import pagoda
from pagoda.deepspeed_config import _HONOURED, _INSTEAD, Settings
from pagoda.schedules import make_schedule

WIDTH = 64
SMALL = {"device": "cpu", "device_budget": "72KiB", "gradient_staging": "24KiB"}


def stack() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.05,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3,
                                                 "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                          "offload_optimizer": {"device": "cpu"}},
}


def test_trains_as_the_configuration_says(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer, loader, scheduler = pagoda.initialize(
        model=stack, config=path, training_data=torch.zeros(16, 3), **SMALL)
    assert loader.batch_size == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.train_batch_size() == 8
    assert engine.engine.config["parameters"] == "host"
    model = engine.module
    for step in range(4):
        for group in theirs.param_groups:
            group["lr"] = 0.1 * max(0, step - 1) / 3
        assert optimizer.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
        for micro in range(2):
            x = batch(2 * step + micro)
            ((plain(x) - x).square().mean() / 2).backward()
            engine.backward((engine(x) - x).square().mean())
            engine.step()
        norm = clip_grad_norm_(plain.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    assert engine.global_steps == 4
    assert scheduler.last_epoch == 4
    for mine, other in zip(parity.values(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach())


def test_half_precision(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    engine, *_ = pagoda.initialize(model=stack(), config={**config, "fp16": {
        "enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}, **SMALL)
    assert engine.loss_scale == 256
    for step in range(3):
        engine.backward(engine(batch(step).half()).float().square().mean())
        engine.step()
    assert engine.loss_scale == 512
    assert next(engine.parameters()).dtype == torch.float16
    engine, *_ = pagoda.initialize(model=stack(), config={**config, "bf16": {"enabled": True}},
                                   **SMALL)
    assert next(engine.parameters()).dtype == torch.bfloat16


def nested(path: str, value: Any) -> dict[str, Any]:
    *outer, last = path.split(".")
    tree: dict[str, Any] = {last: value}
    for name in reversed(outer):
        tree = {name: tree}
    return tree


@pytest.mark.parametrize("path", _INSTEAD)
def test_what_is_not_honoured_is_named(path: str) -> None:
    assert Settings(nested(path, 7)).ignored == {path: _INSTEAD[path]}
    assert Settings(nested(path, "auto")).ignored == {}


@pytest.mark.parametrize("path", _HONOURED)
def test_what_is_honoured_says_nothing(path: str) -> None:
    assert Settings(nested(path, "auto")).ignored == {}


@pytest.mark.parametrize(("config", "word"), [
    ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage"),
    ({"zero_optimization": {"stag": 3}}, "did you mean 'zero_optimization.stage'"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, r"train_batch_size \(7\).*expected 6"),
    ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is not supported; use one of Adam, "),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, "lrr'; did you mean 'optimizer.params.lr'"),
    ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "did you mean 'optimizer.params.lr'"),
    ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage = '3' is not allowed: expected an"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
     r"zero_optimization\.offload_optimizer\.nvme_path is not set: .*nvme=\[…\]"),
    ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": None}}},
     r"zero_optimization\.offload_param\.nvme_path is not set"),
    ({"scheduler": {"type": "Cosine"}}, "Cosine"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, "warmup"),
    ({"zero_optimization": {"offload_param": {"device": "tape"}}}, "tape"),
])
def test_what_is_wrong_is_an_error(config: dict[str, Any], word: str) -> None:
    with pytest.raises(pagoda.UserError, match=word):
        pagoda.initialize(model=stack(), config={"train_micro_batch_size_per_gpu": 1, **config},
                          **SMALL)


def groups(kind: str, steps: int, **params: Any) -> list[dict[str, Any]]:
    """The first group, as each of so many steps finds it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make_schedule(optimizer, kind, params)
    assert schedule is not None
    out = []
    for _ in range(steps):
        out.append(dict(optimizer.param_groups[0]))
        optimizer.step()
        schedule.step()
    return out


def rates(kind: str, steps: int, **params: Any) -> list[float]:
    return [group["lr"] for group in groups(kind, steps, **params)]


def test_schedules() -> None:
    """What DeepSpeed's classes of these names set, step by step: they begin to count at the second
    step, and a warm-up has two steps at least."""
    linear = {"warmup_type": "linear"}
    assert rates("WarmupLR", 5, warmup_max_lr=0.2, warmup_num_steps=2, **linear) == pytest.approx(
        [0, 0, 0.1, 0.2, 0.2])
    assert rates("WarmupLR", 5, warmup_num_steps=4) == pytest.approx(
        [0, *(0.5 * math.log(i) / math.log(4) for i in range(1, 5))])
    assert rates("WarmupDecayLR", 7, warmup_max_lr=0.2, warmup_num_steps=2, total_num_steps=4,
                 **linear) == pytest.approx([0, 0, 0.1, 0.2, 0.1, 0, 0])
    assert rates("WarmupCosineLR", 7, warmup_num_steps=1, total_num_steps=5, cos_min_ratio=0.1,
                 **linear) == pytest.approx([0, 0, 0.25, 0.3875, 0.1625, 0.05, 0.05])
    assert rates("LRRangeTest", 3, lr_range_test_min_lr=[0.1],
                 lr_range_test_step_size=1) == pytest.approx([0.1, 0.2, 0.3])
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2}
    decay = {"decay_step_size": 1, "decay_lr_rate": 1.0}
    assert rates("OneCycle", 6, **cycle, **decay) == pytest.approx(
        [0.1, 0.2, 0.3, 0.2, 0.1, 0.05])
    assert rates("OneCycle", 6, **cycle, cycle_first_stair_count=1) == pytest.approx(
        [0.1, 0.1, 0.3, 0.1, 0.1, 0.1])
    betas = [group["betas"] for group in groups("OneCycle", 6, **cycle, **decay)]
    assert [first for first, _ in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9])
    assert {second for _, second in betas} == {0.99}
    assert groups("OneCycle", 2, **cycle, cycle_momentum=False)[1]["betas"] == (0.9, 0.999)


def test_names_of_once() -> None:
    settings = Settings({"bfloat16": {"enabled": True}, "zero_optimization": True})
    assert settings.get("bf16.enabled") is True
    assert settings.engine_keywords()["zero"] == 1
    old = Settings({"zero_optimization": {"stage": 3, "cpu_offload_param": True}})
    assert old.engine_keywords()["parameters"] == "host"


ORDINARY: dict[str, Any] = {  # as the documentation of DeepSpeed and its examples have it
    "train_micro_batch_size_per_gpu": 4, "steps_per_print": 2000, "wall_clock_breakdown": True,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}},
    "zero_optimization": {
        "stage": 3, "contiguous_gradients": True, "overlap_comm": True, "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}}}


def test_one_warning_names_all_that_has_no_effect() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pagoda.initialize(model=stack(), config=ORDINARY, **SMALL)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line that called it
    text = str(caught[0].message)
    for path in ("steps_per_print", "zero_optimization.sub_group_size",
                 "zero_optimization.offload_param.pin_memory"):
        assert f"  {path}: {_INSTEAD[path]}" in text
    assert text.count("\n") == 11


def test_an_optimizer_that_nobody_named_is_in_the_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"  optimizer: .*AdamW with lr=0\.001 and weight_decay=0\.01"):
        _, optimizer, *_ = pagoda.initialize(
            model=stack(), config={"train_micro_batch_size_per_gpu": 1}, **SMALL)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    config = {key: value for key, value in AUTO.items() if key not in ("optimizer", "scheduler")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer, *_ = pagoda.initialize(trainers(tmp_path), stack(), config=config, **SMALL)
        pagoda.initialize(model=stack(), config={
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}, **SMALL)
    assert optimizer.param_groups[0]["lr"] == 0.25  # Trainer's arguments name one


@pytest.mark.parametrize(("params", "decay"), [
    ({"lr": 0.1}, 0.0), ({"lr": 0.1, "weight_decay": 0.3}, 0.3), ({"lr": 0.1, "torch_adam": True}, 0.01)])
def test_weight_decay_is_what_the_named_optimizer_has(params: dict[str, Any], decay: float) -> None:
    """That of DeepSpeed's own AdamW is 0 where nobody says another; torch's is 0.01."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": params}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, optimizer, *_ = pagoda.initialize(model=stack(), config=config, **SMALL)
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("amp", [{"enabled": False}, {"enabled": False, "opt_level": "O1"}, {},
                                 {"enabled": "auto", "opt_level": "auto"}])
def test_apex_is_accepted_where_it_is_off(amp: dict[str, Any]) -> None:
    assert Settings({"amp": amp}).ignored == {}
    with pytest.raises(pagoda.UserError, match=r"amp\.enabled is true.*bf16\.enabled or fp16"):
        Settings({"amp": {"enabled": True, "opt_level": "O1"}})


# "auto", as configurations for Hugging Face's Trainer have it.

AUTO: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 8},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
        "total_num_steps": "auto", "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto",
                          "stage3_gather_16bit_weights_on_model_save": "auto"}}


def trainers(tmp_path: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**{
        "output_dir": str(tmp_path), "use_cpu": True, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 0.25, "adam_beta1": 0.8,
        "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.125, "max_grad_norm": 0.5,
        "warmup_steps": 3, "num_train_epochs": 2, "report_to": [], **more})


def test_auto_is_what_trainers_arguments_say(tmp_path: Path) -> None:
    engine, optimizer, loader, scheduler = pagoda.initialize(
        trainers(tmp_path), stack(), training_data=torch.zeros(17, 3), config=AUTO, **SMALL)
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == engine.engine.config["accumulation"] == 2
    assert engine.train_batch_size() == 8
    assert engine.engine.config["clip"] == 0.5
    group = optimizer.param_groups[0]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.125)
    assert engine.engine.config["loss_scale"] == "none"
    assert len(loader) == 5  # so an epoch has three steps, and two epochs six
    seen = []
    for _ in range(8):
        seen.append(group["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0, 0, 0.25 / 3, 0.5 / 3, 0.25, 0.5 / 3, 0.25 / 3, 0])
    assert next(engine.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("by", ["arguments", "model", "both"])
def test_auto_precision(name: str, dtype: torch.dtype, by: str, tmp_path: Path) -> None:
    args = trainers(tmp_path)
    if by != "model":
        setattr(args, name, True)
    engine, *_ = pagoda.initialize(args, stack() if by == "arguments" else stack().to(dtype),
                                   training_data=torch.zeros(17, 3), config=AUTO, **SMALL)
    assert next(engine.parameters()).dtype == dtype
    assert engine.loss_scale == (256 if name == "fp16" else 1)
    # Without arguments, the model alone says it.
    half: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, name: {"enabled": "auto"}}
    engine, *_ = pagoda.initialize(model=stack().to(dtype), config=half, **SMALL)
    assert next(engine.parameters()).dtype == dtype
    assert engine.loss_scale == (65536 if name == "fp16" else 1)
    engine, *_ = pagoda.initialize(model=stack(), config=half, **SMALL)
    assert engine.loss_scale == 1
    assert next(engine.parameters()).dtype == torch.float32
    with pytest.raises(pagoda.UserError, match=f"{name}.enabled"):
        pagoda.initialize(model=stack, config=half, **SMALL)  # it does not exist yet


def test_auto_buckets_follow_the_model(tmp_path: Path) -> None:
    model = stack()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"reduce_bucket_size": "auto"}}
    ours = pagoda.initialize(model=stack(), config=config, **SMALL)[0].engine.config["bucket"]
    model.config = type("Config", (), {"hidden_sizes": [100, 1000]})()  # type: ignore[assignment]
    engine, *_ = pagoda.initialize(model=model, config=config, **SMALL)
    assert ours == pagoda.Engine(**SMALL).config["bucket"]
    assert engine.engine.config["bucket"] == pagoda.Engine(bucket=2_000_000, **SMALL).config["bucket"]


def test_auto_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pagoda.UserError) as caught:
        pagoda.initialize(model=stack(), config=AUTO, **SMALL)
    text = str(caught.value)
    for path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                 "gradient_clipping", "optimizer.params.lr", "optimizer.params.betas",
                 "optimizer.params.eps", "optimizer.params.weight_decay",
                 "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
                 "scheduler.params.total_num_steps"):
        assert path in text
    for path in ("train_batch_size", "enabled", "bucket_size", "warmup_min_lr"):
        assert path not in text
    with pytest.raises(pagoda.UserError, match=r"for scheduler.params.total_num_steps: .*max_steps"):
        pagoda.initialize(trainers(tmp_path), stack(), config=AUTO, **SMALL)  # how much data?
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    pagoda.initialize(trainers(tmp_path), stack(), config={**AUTO, "scheduler": warmup}, **SMALL)
    with pytest.raises(pagoda.UserError, match=r"for scheduler.params.warmup_num_steps: .*max_steps"):
        pagoda.initialize(trainers(tmp_path, warmup_steps=0.1), stack(),
                          config={**AUTO, "scheduler": warmup}, **SMALL)
    pagoda.initialize(trainers(tmp_path, max_steps=7), stack(), config=AUTO, **SMALL)
    for path in ("zero_optimization.stage", "zero_optimization.offload_param.device",
                 "data_types.grad_accum_dtype", "optimizer.params", "seed"):
        with pytest.raises(pagoda.UserError, match=path):
            pagoda.initialize(model=stack(), config={"train_micro_batch_size_per_gpu": 1,
                                                     **nested(path, "auto")}, **SMALL)


def test_what_contradicts_trainers_arguments_is_an_error(tmp_path: Path) -> None:
    config = {**AUTO, "gradient_clipping": 2.0, "gradient_accumulation_steps": 2}
    with pytest.raises(pagoda.UserError, match=r"gradient_clipping \(2\.0, and .* say 0\.5\)"):
        pagoda.initialize(trainers(tmp_path, max_steps=7), stack(), config=config, **SMALL)


@pytest.mark.parametrize("arguments", [
    {"model": None}, {"model": 7}, {"model": lambda: None}, {"config": None}, {"config": 7},
    {"config": "no/such/file.json"}, {"config": [1]}, {"optimizer": torch.optim.SGD},
    {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
    {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)]))},
    {"model_parameters": []}, {"model_parameters": [7]}, {"model_parameters": 7},
    {"mpu": object()}, {"device_budget": object()},
    {"config": {"train_batch_size": "8"}}, {"config": {"train_batch_size": 0}},
    {"config": {"gradient_accumulation_steps": 1.5}}, {"config": {"gradient_clipping": "1"}},
    {"config": {"gradient_clipping": -1.0}}, {"config": {"gradient_clipping": math.nan}},
    {"config": {"optimizer": {"params": []}}}, {"config": {"optimizer": "AdamW"}},
    {"config": {"optimizer": {"type": "AdamW", "params": {"lr": -1}}}},
    {"config": {"optimizer": {"type": "AdamW", "params": {"lr": "1"}}}},
    {"config": {"optimizer": {"type": "AdamW", "params": {"betas": 1}}}},
    {"config": {"fp16": True}}, {"config": {"bfloat16": True}},
    {"config": {"fp16": {"enabled": True, "initial_scale_power": "16"}}},
    {"config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}},
    {"config": {"zero_optimization": {"stage": 4}}}, {"config": {"zero_optimization": "3"}},
    {"config": {"zero_optimization": {"stage": "three"}}},
    {"config": {"zero_optimization": {"reduce_bucket_size": "many"}}},
    {"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "x"}}}},
    {"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "x"}}}},
    {"config": {"scheduler": {"type": "OneCycle", "params": {
        "cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}}}},
    {"config": {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "x"}}}},
])
def test_nonsense_is_an_error(arguments: dict[str, Any]) -> None:
    model = stack()
    with pytest.raises(pagoda.UserError):
        pagoda.initialize(**{"model": model, "config": {"train_micro_batch_size_per_gpu": 1},
                             **SMALL, **arguments})
    model.float()(batch(0)).sum().backward()  # it has not gone with an engine that nobody has


def test_the_familiar_engine_is_told_what_is_wrong(tmp_path: Path) -> None:
    engine, optimizer, *_ = pagoda.initialize(
        model=stack(), config={"train_micro_batch_size_per_gpu": 4}, **SMALL, early_updates=False)
    for wrong in (None, 7, torch.ones(2, requires_grad=True), torch.ones(())):
        with pytest.raises(pagoda.UserError):
            engine.backward(wrong)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(pagoda.UserError, match="save_16bit_model"):
            call(tmp_path)
    with pytest.raises(pagoda.UserError):
        engine.save_16bit_model(None)
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor Sequential has 'no_such_thing'"):
        _ = engine.no_such_thing
    engine.step()  # no gradients, no change
    engine.backward(engine(batch(0)).sum())
    engine.zero_grad()
    assert not engine.engine.has_gradients()
    engine.backward(engine(batch(0)).sum())
    engine.step()
    with pytest.raises(pagoda.UserError, match="save_pretrained"):
        optimizer.state_dict()
    engine.save_16bit_model(tmp_path)


def test_the_familiar_engine_has_what_scripts_ask_for(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
              "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    engine, *_ = pagoda.initialize(model=stack(), config_params=config, mpu=None, dist_init_required=True,
                                   **SMALL)
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
    assert repr(engine) == ("DeepSpeedEngine(Sequential, 4 per micro-batch, accumulation=1, Engine(device='cpu', "
                            "device_budget=72 KiB, rank 0 of 1, 12 parameters))")
    assert (engine.get_loss_scale(), engine.gradient_clipping(), engine.config) == (1.0, 1.0, config)
    with engine.no_sync():
        loss = engine(batch(0).bfloat16()).float().sum()
        engine.backward(loss, retain_graph=True)
    engine.step()
    assert engine.stats()["steps"] == 1
    engine.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors").exists()
    engine.destroy()
    assert repr(engine) == "DeepSpeedEngine(Sequential, 4 per micro-batch, accumulation=1, Engine(closed))"
    with pytest.raises(pagoda.UserError, match="closed"):
        engine.step()


def test_directories_may_be_passed_beside_the_configuration(tmp_path: Path) -> None:
    engine, *_ = pagoda.initialize(
        model=stack(), **{**SMALL, "nvme": [str(tmp_path)]}, nvme_budget="1MiB",
        config={"train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    assert engine.engine.config["nvme"] == [str(tmp_path)]
