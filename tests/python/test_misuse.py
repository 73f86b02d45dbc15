# SPDX-License-Identifier: Apache-2.0
"""What a script may do wrong, call by call: each works or is an error that says what to do, at once
and before it has an effect; then the engine trains on. Nothing is ignored, nothing ends the process."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from small_net import WIDTH, engine, loss_of, net, raises, trains

import pagoda

# What a step reports.


def test_the_norm_is_nan_where_it_is_and_none_where_none_was_taken() -> None:
    for clip, expected in ((None, None), (1.0, math.nan)):
        paged, model = engine(early_updates=False), net()
        paged.attach(model, clip=clip)
        paged.backward(loss_of(model) * math.nan)
        norm = paged.step().norm
        assert norm is expected or (norm is not None and math.isnan(norm))


def test_a_step_without_gradients_changes_nothing() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    before = parity.values(model)
    report = paged.step()
    assert (report.step, report.skipped) == (2, False)
    assert all(torch.equal(value, before[key]) for key, value in parity.values(model).items())


# Groups.


def test_groups_cannot_be_changed_after_attach() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, groups=[{"params": model[0].parameters()}])
    trains(paged, model)
    raises(lambda: optimizer.add_param_group({"params": list(model[1].parameters())}),
           r"release\(\).*attach")
    assert len(optimizer.param_groups) == 1
    trains(paged, model)
    optimizer.param_groups.append({"params": list(model[1].parameters()), "lr": 1.0})
    raises(lambda: paged.backward(loss_of(model)), r"release\(\).*attach")
    optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"].append(model[1].weight)
    raises(lambda: paged.backward(loss_of(model)), r"release\(\).*attach")
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[0]["optimizer"] = "sgd"
    raises(lambda: paged.backward(loss_of(model)), "optimizer")
    optimizer.param_groups[0]["optimizer"] = "adamw"
    trains(paged, model)


# Every call, in every state of an engine.


class Scene:
    """An engine, its model, and others that have nothing to do with it."""

    def __init__(self, state: str) -> None:
        self.paged, self.model, self.other = engine(early_updates=False), net(), net()
        self.optimizer: Any = None
        if state != "fresh":
            self.optimizer = self.paged.attach(self.model)
            trains(self.paged, self.model)
        if state == "backward":
            self.paged.backward(loss_of(self.model))
        if state in ("released", "closed"):
            self.paged.release(self.model)
        if state == "closed":
            self.paged.close()
        if state == "dropped":
            self.paged.close()


STATES = ["fresh", "attached", "backward", "released", "closed", "dropped"]

SENSE: dict[str, Callable[[Scene], Any]] = {
    "attach": lambda s: s.paged.attach(s.model),
    "attach another": lambda s: s.paged.attach(s.other),
    "backward": lambda s: s.paged.backward(torch.ones((), requires_grad=True).exp()),
    "backward of another": lambda s: s.paged.backward(loss_of(s.other)),
    "step": lambda s: s.paged.step(),
    "join": lambda s: s.paged.join(),
    "finish": lambda s: s.paged.finish(),
    "zero_grad": lambda s: s.paged.zero_grad(),
    "grad": lambda s: s.paged.grad(s.model[0].weight),
    "grad_norm": lambda s: s.paged.grad_norm(),
    "has_gradients": lambda s: s.paged.has_gradients(),
    "pin": lambda s: s.paged.pin(s.model).release(),
    "pin nothing": lambda s: s.paged.pin([]).release(),
    "release": lambda s: s.paged.release(),
    "release the model": lambda s: s.paged.release(s.model),
    "serve_framework": lambda s: s.paged.serve_framework(),
    "activations": lambda s: s.paged.activations().__enter__(),
    "stats": lambda s: str(s.paged.stats()),
    "config": lambda s: s.paged.config,
    "device": lambda s: s.paged.device,
    "rank": lambda s: s.paged.rank,
    "world_size": lambda s: s.paged.world_size,
    "loss_scale": lambda s: s.paged.loss_scale,
    "optimizer": lambda s: s.paged.optimizer,
    "close": lambda s: s.paged.close(),
    "leave": lambda s: s.paged.__exit__(None, None, None),
    "optimizer.step": lambda s: s.optimizer and s.optimizer.step(),
    "optimizer.zero_grad": lambda s: s.optimizer and s.optimizer.zero_grad(),
    "optimizer.state_dict": lambda s: s.optimizer and s.optimizer.state_dict(),
}


def build(scene: Scene) -> None:
    with scene.paged.build():
        torch.nn.Linear(2, 2)


def save(scene: Scene, path: Path) -> None:
    scene.paged.save_pretrained(path)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", [*SENSE, "build", "save_pretrained"])
def test_a_call_works_or_says_why_not(call: str, state: str, tmp_path: Path) -> None:
    scene = Scene(state)
    outcome = None
    for _ in range(2):  # twice, too
        try:
            if call == "build":
                build(scene)
            elif call == "save_pretrained":
                save(scene, tmp_path)
            else:
                SENSE[call](scene)
        except pagoda.UserError as error:
            outcome = str(error)
            assert len(outcome) < 400
    if state in ("attached", "backward") and call not in (
            "release", "release the model", "close", "leave"):
        if scene.paged.has_gradients():
            scene.paged.step()
        trains(scene.paged, scene.model)
    elif state == "released" and call not in ("attach", "attach another", "close", "leave"):
        scene.paged.attach(scene.model)
        trains(scene.paged, scene.model)
    if state in ("closed", "dropped") and call not in (
            "device", "close", "leave", "optimizer", "optimizer.step"):
        assert outcome is not None, "a closed engine did something"


WRONG_CALLS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "attach None": (lambda s: s.paged.attach(None), "expects a torch.nn.Module, got None"),
    "attach parameters": (lambda s: s.paged.attach(s.other.parameters()),
                          "got generator: pass the model, not model.parameters"),
    "attach a class": (lambda s: s.paged.attach(torch.nn.Linear), "got type"),
    "attach a tensor": (lambda s: s.paged.attach(torch.ones(2)), "got Tensor"),
    "attach with a number as optimizer": (lambda s: s.paged.attach(s.other, optimizer=7),
                                          r"takes a name \('adamw', .*not int"),
    "attach with torch's optimizer": (
        lambda s: s.paged.attach(s.other, optimizer=torch.optim.AdamW(s.other.parameters())),
        r"takes a name \(.*, not a torch\.optim\.AdamW object: pass its lr"),
    "attach with torch's class": (
        lambda s: s.paged.attach(s.other, optimizer=torch.optim.AdamW), "not the class AdamW"),
    "attach with an optimizer of nobody": (
        lambda s: s.paged.attach(s.other, optimizer="adafactor"), "use one of 'adamw'"),
    "attach with groups that are none": (lambda s: s.paged.attach(s.other, groups=7), "dicts"),
    "attach with parameters as groups": (
        lambda s: s.paged.attach(s.other, groups=list(s.other.parameters())), "dict with 'params'"),
    "attach with no groups": (lambda s: s.paged.attach(s.other, groups=[]), "nothing to train"),
    "attach with empty params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": []}]), "nothing to train"),
    "attach with no params": (lambda s: s.paged.attach(s.other, groups=[{}]), "nothing to train"),
    "attach with numbers as params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [1, 2]}]), "tensors as 'params', got int"),
    "attach with a number as params": (
        lambda s: s.paged.attach(s.other, groups=[{"params": 7}]), "must be tensors, got int"),
    "attach with an unknown constant": (
        lambda s: s.paged.attach(s.other, groups=[{"params": s.other[0].weight, "lrr": 1}]),
        "no 'lrr'; did you mean 'lr'"),
    "attach a parameter twice": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [s.other[0].weight] * 2}]),
        r"parameter '0\.weight' is in group 0 twice"),
    "attach a parameter in two groups": (
        lambda s: s.paged.attach(s.other, groups=[{"params": [s.other[0].weight]}] * 2),
        r"parameter '0\.weight' is in groups 0 and 1"),
    "attach another's parameter": (
        lambda s: s.paged.attach(s.other, groups=[{"params": net()[0].weight}]),
        r"group 0: a tensor of shape \[16, 16\] is not a parameter of the attached"),
    "attach with a negative clip": (lambda s: s.paged.attach(s.other, clip=-1.0), "clip"),
    "attach with clip nan": (lambda s: s.paged.attach(s.other, clip=math.nan), "clip"),
    "attach with clip infinite below zero": (
        lambda s: s.paged.attach(s.other, clip=-math.inf), "clip"),
    "attach with a word as clip": (lambda s: s.paged.attach(s.other, clip="1"), "clip"),
    "attach nothing": (lambda s: s.paged.attach(torch.nn.ReLU()), "the model has no parameters"),
    "attach what is frozen": (
        lambda s: s.paged.attach(net().requires_grad_(False)),
        "to train: none of the model's 6 parameters requires a gradient"),
    "attach with another's name of an optimizer": (
        lambda s: s.paged.attach(s.other, optimizer="AdamW8bit"), "did you mean 'adamw'"),
    "attach with an optimizer beside the model": (
        lambda s: s.paged.attach(s.other, torch.optim.SGD(s.other.parameters())),
        r"attach\(model, optimizer='adamw', lr=…\)"),
    "attach with a word beside the model": (
        lambda s: s.paged.attach(s.other, "lion"), r"attach\(model, optimizer='lion'"),
    "attach with a number beside the model": (lambda s: s.paged.attach(s.other, 7),
                                              "one positional argument, the model; pass"),
    "attach with a rate beside the model": (
        lambda s: s.paged.attach(s.other, 0.001), "pass lr=0.001 as a keyword"),
    "attach with learning_rate": (
        lambda s: s.paged.attach(s.other, learning_rate=1.0), "'learning_rate': say lr=…"),
    "attach with max_grad_norm": (
        lambda s: s.paged.attach(s.other, max_grad_norm=1.0), "'max_grad_norm': say clip=…"),
    "attach with amsgrad": (
        lambda s: s.paged.attach(s.other, amsgrad=True), "'amsgrad': it is not supported"),
    "attach with a keyword of the engine": (
        lambda s: s.paged.attach(s.other, accumulation=2), r"belongs in Engine\(accumulation=2\)"),
    "attach with a stage": (
        lambda s: s.paged.attach(s.other, stage=2), r"belongs in Engine\(zero=2\)"),
    "attach with a misspelt constant": (
        lambda s: s.paged.attach(s.other, weigth_decay=1), "did you mean 'weight_decay'"),
    "attach with nonsense": (lambda s: s.paged.attach(s.other, xyz=1), "'xyz'; it has lr, betas"),
    "release None of nothing": (lambda s: s.paged.release("model"), "torch.nn.Module"),
    "release another": (lambda s: s.paged.release(s.other), "no parameter of this model"),
    "release nothing": (lambda s: s.paged.release(torch.nn.ReLU()), "no parameter of this model"),
    "save to None": (lambda s: s.paged.save_pretrained(None, s.model), "path"),
    "save to a number": (lambda s: s.paged.save_pretrained(7, s.model), "path"),
    "save a word": (lambda s: s.paged.save_pretrained("x", "model"), "torch.nn.Module"),
    "save in shards of nothing": (
        lambda s: s.paged.save_pretrained("x", s.model, max_shard_bytes=0), "max_shard_bytes"),
    "save in shards of words": (
        lambda s: s.paged.save_pretrained("x", s.model, max_shard_size="much"), "max_shard_size"),
    "pin None": (lambda s: s.paged.pin(None), "expects a module, a tensor .*got None"),
    "pin a number": (lambda s: s.paged.pin(7), "iterable of tensors, got int"),
    "pin numbers": (lambda s: s.paged.pin([7]), "iterable of tensors, got int"),
    "pin a word": (lambda s: s.paged.pin("weight"), "iterable of tensors, got str"),
    "pin another's": (lambda s: s.paged.pin(s.other), "not a parameter of this engine"),
    "pin a tensor of one's own": (lambda s: s.paged.pin(torch.ones(2)), "not a parameter of this"),
    "pin a sparse one": (lambda s: s.paged.pin(torch.ones(2).to_sparse()), "not a parameter of this"),
    "pin one on meta": (lambda s: s.paged.pin(torch.ones(2, device="meta")), "not a parameter of"),
    "activations somewhere": (lambda s: s.paged.activations("device"), "'host' or 'nvme'"),
    "activations on nvme": (lambda s: s.paged.activations("nvme"), "nvme"),
    "activations nowhere": (lambda s: s.paged.activations(None), "'host' or 'nvme'"),
    "activations from much": (lambda s: s.paged.activations(least="much"), "much"),
    "activations from None": (lambda s: s.paged.activations(least=None), "None"),
    "activations below zero": (lambda s: s.paged.activations(in_flight=-1), "-1"),
    "pickle": (lambda s: pickle.dumps(s.paged), "copied or pickled"),
    "copy": (lambda s: copy.copy(s.paged), "copied or pickled"),
    "deepcopy": (lambda s: copy.deepcopy(s.paged), "copied or pickled"),
}

WRONG_OF_ATTACHED: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "backward of None": (lambda s: s.paged.backward(None), "expects a tensor, got None"),
    "backward of a number": (lambda s: s.paged.backward(1.0), "expects a tensor, got float"),
    "backward of many": (lambda s: s.paged.backward(s.model(torch.ones(2, WIDTH))), r"\[2, 16\]"),
    "backward of nothing": (
        lambda s: s.paged.backward(s.model(torch.ones(0, WIDTH))), r"\[0, 16\]"),
    "backward of a constant": (lambda s: s.paged.backward(torch.ones(())), "does not require a gradient"),
    "backward of what is detached": (
        lambda s: s.paged.backward(loss_of(s.model).detach()), "does not require a gradient"),
    "backward with a word as last": (
        lambda s: s.paged.backward(loss_of(s.model), "yes"), "True, False or None"),
    "grad of None": (lambda s: s.paged.grad(None), "expects a tensor, got None"),
    "grad of a word": (lambda s: s.paged.grad("0.weight"), "expects a tensor, got str"),
    "grad of another's": (lambda s: s.paged.grad(s.other[0].weight), "not a parameter of this engine"),
    "grad of a sparse one": (
        lambda s: s.paged.grad(torch.ones(2).to_sparse()), "not a parameter of this engine"),
    "release a part": (lambda s: s.paged.release(s.model[0]), "whole model"),
    "step with a number": (lambda s: s.optimizer.step(7), "function"),
    "optimizer.state": (lambda s: s.optimizer.state[s.model[0].weight], "cannot be read or changed"),
    "optimizer.state changed": (lambda s: s.optimizer.state.clear(), "cannot be read or changed"),
    "state_dict": (lambda s: s.optimizer.state_dict(), r"after 2 steps.*save_pretrained"),
    "torch.save": (lambda s: torch.save(s.optimizer.state_dict(), "x"), "save_pretrained"),
    "load_state_dict": (lambda s: s.optimizer.load_state_dict({}), "after 2 steps"),
    "pickle": (lambda s: pickle.dumps(s.optimizer), "copied or pickled"),
    "copy": (lambda s: copy.copy(s.optimizer), "copied or pickled"),
    "deepcopy": (lambda s: copy.deepcopy(s.optimizer), "copied or pickled"),
    "add_param_group": (lambda s: s.optimizer.add_param_group({}), "attach"),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
@pytest.mark.parametrize("state", ["fresh", "released"])
def test_a_wrong_call_has_no_effect(call: str, state: str) -> None:
    scene = Scene(state)
    wrong, match = WRONG_CALLS[call]
    raises(lambda: wrong(scene), match)
    scene.paged.attach(scene.model)  # nothing of it is left
    assert scene.paged.config["clip"] == 0
    trains(scene.paged, scene.model)
    for parameter in scene.other.parameters():
        parameter.detach().numpy()  # plain, as it was


@pytest.mark.parametrize("call", WRONG_OF_ATTACHED)
def test_a_wrong_call_leaves_a_training_as_it_was(call: str) -> None:
    scene, undisturbed = Scene("attached"), Scene("attached")
    wrong, match = WRONG_OF_ATTACHED[call]
    raises(lambda: wrong(scene), match)
    for each in (scene, undisturbed):
        trains(each.paged, each.model)
        each.paged.release(each.model)
    for mine, theirs in zip(scene.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# Engines and their scopes.


def test_after_close_every_call_says_so(tmp_path: Path) -> None:
    scene = Scene("dropped")
    for name, call in SENSE.items():
        if name not in ("device", "close", "leave"):
            raises(lambda call=call: call(scene), "the engine has been closed")  # type: ignore[misc]
    raises(lambda: build(scene), "the engine has been closed")
    raises(lambda: save(scene, tmp_path), "the engine has been closed")
    raises(scene.paged.__enter__, "the engine has been closed")


def test_scopes_of_building_may_be_mixed_up() -> None:
    paged, other = engine(), engine()
    with paged.build():
        first = net()
        paged.attach(first)  # before it is over
        trains(paged, first)
        with other.build():
            second = net()
        third = net()
    other.attach(second)
    trains(other, second)
    trains(paged, first)
    paged.release(first)
    paged.attach(third)
    trains(paged, third)
    with pytest.raises(KeyError), paged.build():
        raise KeyError("mine")
    with paged.build():
        fourth = net()
        paged.close()
    another = engine()
    another.attach(fourth)  # it has its weights
    trains(another, fourth)
    with pytest.raises(pagoda.UserError, match="closed"), paged.build():
        pass
    trains(other, second)


def test_release_gives_back_what_the_model_has_replaced() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    old = model[1]
    model[1] = torch.nn.Linear(WIDTH, WIDTH)
    paged.release(model)
    old.weight.detach().numpy()
    paged.attach(model)
    trains(paged, model)


def test_the_optimizer_of_a_released_model_is_retired() -> None:
    paged, model = engine(), net()
    old = paged.attach(model)
    schedule = torch.optim.lr_scheduler.StepLR(old, 1)
    trains(paged, model)
    paged.release(model)
    new = paged.attach(model, lr=0.5)
    for call in (old.step, old.zero_grad, old.state_dict, old.send):
        raises(call, r"released: attach\(\) returns a new one")
    schedule.step()
    trains(paged, model)
    assert new.param_groups[0]["lr"] == 0.5


def test_before_the_first_step_the_optimizer_has_no_state_to_lose() -> None:
    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.5)
    state = optimizer.state_dict()
    assert state["state"] == {}
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    plain = torch.optim.AdamW(net().parameters())
    raises(lambda: optimizer.load_state_dict(plain.state_dict()), "from a torch.optim optimizer")
    raises(lambda: optimizer.load_state_dict({**state, "state": {0: {"step": 1}}}), "with moments")
    raises(lambda: optimizer.load_state_dict(7), "state_dict")  # type: ignore[arg-type]
    raises(lambda: optimizer.load_state_dict({"param_groups": [{}]}), "only one from engine.optimizer")
    raises(lambda: optimizer.load_state_dict({"param_groups": [{"optimizer": "sgd"}]}),
           r"of the optimizers \['sgd'\], and")
    state["param_groups"][0]["lr"] = math.nan
    raises(lambda: optimizer.load_state_dict(state), "lr = nan")
    state["param_groups"][0]["params"].pop()
    raises(lambda: optimizer.load_state_dict(state), "load_state_dict")
    assert optimizer.param_groups[0]["lr"] == 0.25
    trains(paged, model)


def test_torchs_own_checkpoints_make_no_step() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    paged, model = engine(), net()
    optimizer = paged.attach(model)
    trains(paged, model)
    with pytest.raises(pagoda.UserError, match="save_pretrained"):
        get_optimizer_state_dict(model, optimizer)
    assert paged.stats()["steps"] == 2


def test_a_graph_can_be_retained() -> None:
    paged, model = engine(accumulation=2), net()
    paged.attach(model)
    loss = loss_of(model)
    paged.backward(loss, retain_graph=True)
    first = paged.grad(model[0].weight)
    paged.backward(loss)
    assert torch.equal(paged.grad(model[0].weight), first + first)
    paged.step()


# What trains nothing, and where a warning points.


def test_a_loss_that_reaches_no_attached_parameter_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    assert not recwarn.list
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="no gradient for any attached parameter") as told:
        paged.backward(loss_of(copied))
    assert told[0].filename == __file__  # of the script, not of Pagoda
    paged.step()
    paged.backward(loss_of(copied))
    paged.step()
    assert not recwarn.list
    trains(paged, model)


def test_the_norm_of_every_step_without_clipping() -> None:
    """clip=inf: updates begin as early and are the same bits as without clip."""
    plain, watched = (engine(host_budget="128MiB"), net()), (engine(host_budget="128MiB"), net())
    plain[0].attach(plain[1], lr=0.1)
    watched[0].attach(watched[1], lr=0.1, clip=math.inf)
    norms = []
    for step in range(4):
        for paged, model in (plain, watched):
            paged.backward(loss_of(model, step) * 1e3)
            report = paged.step()
            if paged is watched[0]:
                norms.append(report.norm)
    assert all(norm is not None and norm > 100 for norm in norms)
    for paged, _ in (plain, watched):
        assert paged.stats()["updates"]["early"] > 0
    paged, model = watched
    paged.backward(loss_of(model))
    raises(paged.grad_norm, r"read step\(\)\.norm, which attach\(…, clip=inf\) computes at every step")
    plain[0].backward(loss_of(plain[1]))
    plain[0].step()
    copied = copy.deepcopy(model)
    loss_of(copied).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in copied.parameters()]).item()
    assert paged.step().norm == pytest.approx(norm, rel=1e-5)
    for mine, theirs in zip(model.parameters(), plain[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with engine(clip=math.inf) as of_config:
        assert of_config.config["clip"] == math.inf
        of_config.attach(net())
    with engine(clip="inf") as of_json:
        assert of_json.config["clip"] == math.inf
