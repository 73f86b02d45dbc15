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
from pagoda.deepspeed import _HONOURED, _INSTEAD, Settings
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
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": "auto"}},
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
    with pytest.warns(UserWarning, match=f"'{path}' has no effect: "):
        Settings(nested(path, 7))


@pytest.mark.parametrize("path", _HONOURED)
def test_what_is_honoured_says_nothing(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings(nested(path, "auto"))


@pytest.mark.parametrize(("config", "word"), [
    ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage"),
    ({"zero_optimization": {"stag": 3}}, "did you mean 'zero_optimization.stage'"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size"),
    ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
    ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, "lrr"),
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
