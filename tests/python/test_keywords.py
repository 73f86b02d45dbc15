# SPDX-License-Identifier: Apache-2.0
"""The keywords of Engine() and attach(), and their values: one that is not accepted is an error
that names it and says what is, before it has an effect."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from small_net import engine, loss_of, net, raises, trains

import pagoda

# Engine().


@pytest.mark.parametrize("keywords", [
    {"clip": math.nan}, {"clip": -1.0}, {"clip": "one"}, {"loss_scale": "0"}, {"loss_scale": "-1"},
    {"loss_scale": "nan"}, {"loss_scale": math.inf}, {"device": 7}, {"device": "tpu"},
    {"device_budget": object()}, {"device_budget": -1}, {"device_budget": [1]},
    {"zero": "three"}, {"zero": 4}, {"zero": 1.5}, {"accumulation": 0}, {"accumulation": True},
    {"nvme": 7}, {"nvme": [7]}, {"parameters": "tape"}, {"prefetch": "maybe"}, {"group": 7},
    {"gradient_group": 7}, {"timeout": math.nan}, {"seed": "x"}, {"": 1}, {"nvme": {"a": 1}},
])
def test_an_engine_of_nonsense(keywords: dict[str, Any]) -> None:
    raises(lambda: engine(**keywords), ".")


@pytest.mark.parametrize(("keywords", "match"), [
    ({"optimizer": "AdamW"}, r"belongs in attach\(model, optimizer="),
    ({"optimizer": torch.optim.AdamW}, r"belongs in attach\(model, optimizer="),
    ({"optimizer": torch.optim.SGD([torch.ones(1)])}, r"belongs in attach\(model, optimizer="),
    ({"lr": 1e-3}, r"'lr': it belongs in attach\(model, lr=…\)"),
    ({"weight_decay": 0.1}, r"attach\(model, weight_decay=…\)"),
    ({"betas": (0.9, 0.95)}, r"attach\(model, betas=…\)"), ({"stage": 3}, "say zero=3"),
    ({"budget": "6GiB"}, "say device_budget='6GiB'"), ({"memory": "6GiB"}, "say device_budget="),
    ({"max_grad_norm": 1.0}, r"say clip=1\.0"), ({"gradient_clipping": 1.0}, r"say clip=1\.0"),
    ({"device_bugdet": object()}, "did you mean 'device_budget'"),
    ({"offload_param": "cpu"}, "say parameters='host' or 'nvme'"),
    ({"offload_optimizer": {"device": "cpu"}}, "say optimizer_state='host' or 'nvme'"),
    ({"offload": True}, "say parameters=, gradients= and optimizer_state="),
    ({"mixed_precision": "bf16"}, r"model\.bfloat16\(\)"), ({"bf16": True}, r"model\.bfloat16\(\)"),
    ({"fp16": True}, r"model\.half\(\).*loss_scale='dynamic'"), ({"dtype": "bf16"}, "own dtype"),
    ({"config": "x.json"}, r"keywords.*pagoda\.initialize\(config="),
    ({"activations": "host"}, r"engine\.activations\('host'\)"),
    ({"verbose": True}, r"no key 'verbose'; pagoda\.config_keys\(\)"),
])
def test_a_keyword_that_belongs_elsewhere_says_where(keywords: dict[str, Any], match: str) -> None:
    raises(lambda: engine(**keywords), match)


_STAGE, _SIZE = "an integer from 0 to 3", "a byte size such as 8GiB"


@pytest.mark.parametrize(("keyword", "shown", "takes"), [
    ({"zero": 4}, "zero = 4", _STAGE), ({"zero": -1}, "zero = -1", _STAGE),
    ({"zero": 1.5}, "zero = 1.5", _STAGE), ({"zero": [3]}, r"zero = \[3\]", _STAGE),
    ({"zero": "3"}, "zero = '3'", f"it is a string; expected {_STAGE}"),
    ({"seed": -1}, "seed = -1", "an integer from 0"),
    ({"seed": 2**64}, r"seed = 1\.8.*e\+19", "an integer from 0 to 18446744073709551615"),
    ({"accumulation": 2**63 - 1}, "accumulation = 9223372036854775807", "from 1 to 4294967295"),
    ({"loss_scale_window": 2**32}, "loss_scale_window = 4294967296", "from 1 to 4294967295"),
    ({"zero": "\0"}, r'zero = "\\u0000"', f"it has a NUL character in it; expected {_STAGE}"),
    ({"clip": "1\0"}, r'clip = "1\\u0000"', "it has a NUL character in it; expected a number"),
    ({"trace": "\ud800"}, r"trace = '\\ud800'", "it is not valid Unicode; expected a path"),
    ({"nvme": ["\udcff"]}, r"nvme = \['\\udcff'\]", "it is not valid Unicode; expected a list"),
    ({"loss_scale": 1e-40}, "loss_scale = 1e-40", r"a number from 2\^-126 to 2\^126"),
    ({"clip": math.nan}, "clip = nan", "a number ≥ 0, or inf"),
    ({"clip": -0.5}, "clip = -0.5", "a number ≥ 0, or inf"),
    ({"timeout": math.inf}, "timeout = inf", "a number > 0, at most 1000000000"),
    ({"checksums": "yes"}, "checksums = 'yes'", "expected true or false"),
    ({"parameters": "tape"}, "parameters = 'tape'", "auto, device, host or nvme$"),
    ({"parameters": "disk"}, "parameters = 'disk'", "host or nvme; did you mean 'nvme'"),
    ({"optimizer_state": "cpu"}, "optimizer_state = 'cpu'", "did you mean 'host'"),
    ({"gradients": "gpu"}, "gradients = 'gpu'", "did you mean 'device'"),
    ({"device": "gpu"}, "device = 'gpu'", "did you mean 'cuda'"),
    ({"device": 0}, "device = 0", "auto, cpu, cuda, cuda:N or emulated"),
    ({"nvme": 1}, "nvme = 1", "a list of directories"),
    ({"device_budget": "8 gigs"}, "device_budget = '8 gigs'", _SIZE),
    ({"device_budget": -1}, "device_budget = -1", _SIZE),
    ({"device_budget": 0.5}, "device_budget = 0.5", _SIZE),
    ({"device_budget": math.nan}, "device_budget = nan", _SIZE),
    ({"device_budget": object()}, "device_budget = <object object at .*>", _SIZE),
])
def test_a_value_is_shown_as_it_was_given_and_what_the_keyword_takes(keyword: dict[str, Any],
                                                                     shown: str, takes: str) -> None:
    raises(lambda: engine(**keyword), f"^{shown} is not allowed: .*{takes}")


def test_the_old_name_of_optimizer_state_is_told_once() -> None:
    program = "import pagoda\nfor _ in range(2): print(pagoda.Engine(device='cpu', device_budget='1MiB', " \
              "optimizer='host').config['optimizer_state'])"
    done = subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(Path(pagoda.__file__).parents[1])})
    assert done.stdout.split() == ["host", "host"]
    assert done.stderr.count("has become 'optimizer_state'") == 1
    raises(lambda: engine(optimizer="host", optimizer_state="host"), "give one of them")


def test_an_engine_takes_keywords_and_whole_floats() -> None:
    raises(lambda: pagoda.Engine("6GiB"), r"Engine\('6GiB'\): Engine\(\) takes keyword"
           " arguments only")
    with engine(device_budget=1e6, host_budget=float(64 << 20)) as paged:
        assert paged.stats()["tiers"]["host"]["budget"] == 64 << 20


def test_a_trace_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    raises(lambda: engine(trace=str(tmp_path / "none" / "t.json")),
           r"^trace = '.*none/t\.json' cannot be written: No such file or directory")
    raises(lambda: engine(trace=str(tmp_path)), r"^trace = .* cannot be written: Is a directory")
    engine(trace=str(tmp_path / "t.json")).close()
    assert list(tmp_path.iterdir()) == []


def test_help_shows_the_keywords() -> None:
    keywords = inspect.signature(pagoda.Engine).parameters
    assert {key.name for key in pagoda.config_keys()} < set(keywords)
    assert list(inspect.signature(pagoda.Engine.attach).parameters)[:3] == ["self", "model", "optimizer"]
    paged, model = engine(), net()
    assert "rank 0 of 1, no model attached" in repr(paged)
    paged.attach(model)
    assert repr(paged) == ("Engine(device='cpu', device_budget=64 KiB, rank 0 of 1, 6 parameters)")
    paged.close()
    assert repr(paged) == "Engine(closed)"


# attach().

WRONG = [("lr", math.nan), ("lr", math.inf), ("lr", -1.0), ("lr", "much"), ("lr", None),
         ("eps", -1e-8), ("eps", math.nan), ("weight_decay", -0.1), ("weight_decay", math.nan),
         ("weight_decay", math.inf), ("betas", (1.0, 0.9)), ("betas", (0.9, -0.1)),
         ("betas", (math.nan, 0.9)), ("betas", 0.9), ("betas", (0.9,)), ("betas", "ab")]
WRONG_SGD = [("momentum", -0.9), ("momentum", math.nan), ("dampening", math.inf),
             ("nesterov", True)]


@pytest.mark.parametrize(("kind", "name", "value"),
                         [("adamw", *wrong) for wrong in WRONG if wrong[1] is not None]
                         + [("sgd", *wrong) for wrong in WRONG_SGD])
def test_attach_refuses_constants_that_cannot_train(kind: str, name: str, value: Any) -> None:
    paged, model = engine(), net()
    before = [p.data_ptr() for p in model.parameters()]
    raises(lambda: paged.attach(model, optimizer=kind, **{name: value}),
           "beta" if name == "betas" else name)
    raises(lambda: paged.attach(model, optimizer=kind, groups=[
        {"params": model[0].parameters()}, {"params": model[1].parameters(), name: value}]),
        "beta" if name == "betas" else name)
    assert [p.data_ptr() for p in model.parameters()] == before  # no page yet
    paged.attach(model)
    trains(paged, model)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_a_schedule_sets_is_checked_before_it_is_used(name: str, value: Any) -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.1)
    trains(paged, model)
    before = parity.values(model)
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    word = "beta" if name == "betas" else name
    raises(lambda: paged.backward(loss_of(model)), word)
    raises(paged.step, word)
    assert all(torch.equal(value, before[key]) for key, value in parity.values(model).items())
    optimizer.param_groups[0][name] = good
    trains(paged, model)


def test_a_schedule_below_zero_is_an_error() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)
    trains(paged, model, 1)
    schedule.step()
    trains(paged, model, 1)  # a rate of zero trains nothing, and may be asked for
    schedule.step()
    raises(lambda: paged.backward(loss_of(model)), "lr = -0.1 is not allowed")


def test_a_learning_rate_may_be_a_tensor() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=torch.tensor(0.1))  # type: ignore[arg-type]
    trains(paged, model)
    optimizer.param_groups[0]["lr"].fill_(math.nan)
    raises(paged.step, "lr = nan")


@pytest.mark.parametrize("name", ["AdamW", "adamw", "SGD", "Lion"])
def test_an_optimizer_is_named_in_any_case_and_defaults_of_torchs_arguments_are_accepted(name: str) -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, optimizer=name, amsgrad=False, maximize=False, foreach=None, fused=None)
    assert optimizer.param_groups[0]["optimizer"] == name.lower()
    trains(paged, model)


def test_clip_of_one_attach_is_not_the_next_ones() -> None:
    paged, model = engine(), net()
    paged.attach(model, clip=0.5)
    assert paged.config["clip"] == 0.5
    trains(paged, model)
    paged.release(model)
    raises(lambda: paged.attach(model, clip=0.25, lr=-1.0), "lr")
    paged.attach(model)
    assert paged.config["clip"] == 0
    paged.backward(loss_of(model))
    assert paged.step().norm is None
    paged.release(model)
    other = engine(clip=2.0)
    other.attach(model, clip=1.0)
    other.release(model)
    other.attach(model)
    assert other.config["clip"] == 2
