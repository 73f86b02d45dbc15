# SPDX-License-Identifier: Apache-2.0
"""What user code may not put under an attached parameter: it is refused before a step."""

from __future__ import annotations

import pytest
import torch
from small_layers import loss_of, make_model
from torch import nn

import pagoda

torch.set_num_threads(1)  # small work: threads would only wait


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
def test_a_storage_of_another_engine_is_refused(resident: bool) -> None:
    budget = "64MiB" if resident else "96KiB"
    engines, models = [], []
    for _ in range(2):
        engine = pagoda.Engine(device="cpu", device_budget=budget, host_budget="64MiB",
                               gradient_staging="20KiB")
        models.append(make_model())
        engine.attach(models[-1], lr=1e-2)
        engines.append(engine)
    mine, theirs = (model[0].weight for model in models)
    own = mine.data
    mine.data = theirs.data
    loss = loss_of(models[0], 0)
    with pytest.raises(pagoda.UserError, match="'0.weight' was given the storage of a parameter of another engine"):
        engines[0].backward(loss)
    mine.data = own
    finals = []
    for engine, model in zip(engines, models, strict=True):
        for step in range(2):
            engine.backward(loss_of(model, step))
            engine.step()
        engine.close()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


@pytest.mark.parametrize("how", ["half", "view"])
def test_another_type_of_the_same_size_is_refused(how: str) -> None:
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    model = make_model().bfloat16()
    engine.attach(model, lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    if how == "half":
        model.half()
    else:
        for p in model.parameters():
            p.data = p.data.view(torch.float16)
    for call in (lambda: engine.backward(sum(p.sum() for p in model.parameters())), engine.step):
        with pytest.raises(pagoda.UserError, match="another size, type or device after attach"):
            call()
    engine.release(model)
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value.half() if how == "half" else value.view(torch.float16))
    engine.close()


def test_another_storage_for_one_of_two_that_share_theirs_is_refused() -> None:
    both = torch.arange(8.0)
    model = nn.Module()
    model.one, model.other = nn.Parameter(both[:4]), nn.Parameter(both[4:])
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    engine.attach(model, lr=1e-2)
    model.one.data = model.one.data.clone()
    with pytest.raises(pagoda.UserError, match="'one'.*has shared one with 1 other since.*p.data.copy_"):
        engine.backward((model.one * model.other).sum())
    engine.close()


def test_channels_last_is_for_before_the_first_step() -> None:
    model = nn.Conv2d(3, 8, 3)
    engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    engine.attach(model, lr=1e-2)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    engine.backward(model(torch.ones(1, 3, 6, 6)).sum())
    engine.step()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with pytest.raises(pagoda.UserError, match="another memory layout"):
        engine.backward(model(torch.ones(1, 3, 6, 6)).sum())
    engine.close()


def test_mutation_of_saved_tensors_is_refused_while_a_model_is_attached() -> None:
    engine, model = pagoda.Engine(device="cpu", device_budget="1MiB"), make_model()
    engine.attach(model)
    with (pytest.raises(pagoda.UserError, match="by address"),
          torch.autograd.graph.allow_mutation_on_saved_tensors()):
        pass
    engine.close()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        pass
