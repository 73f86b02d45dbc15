# SPDX-License-Identifier: Apache-2.0
"""What is refused says what to do instead, and doing that works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from failing import failing
from small_net import WIDTH, engine, loss_of, net, raises, trains
from torch import distributed

import pagoda


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# A model that is converted while it is attached.

@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16,
                                     lambda model: model.to(torch.float16)])
def test_a_model_that_was_converted_is_released_and_attached_again(
        convert: Callable[[torch.nn.Module], Any]) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    before = values(model)
    convert(model)
    dtype = model[0].weight.dtype
    x = torch.ones(1, WIDTH, dtype=dtype)
    with pytest.raises(RuntimeError, match=r"release\(\) the model.*attach\(\) it again"):
        paged.backward(model(x).float().sum())
        paged.step()
    raises(paged.step, r"release\(\) the model.*attach\(\) it again")
    paged.release(model)
    assert paged.stats()["pages"]["device_bytes"] == 0
    assert_equal(values(model), [value.to(dtype) for value in before])
    paged.attach(model)
    paged.backward(model(x).float().sum())
    paged.step()
    assert model[0].weight.dtype == dtype


def test_one_parameter_of_another_type_is_released_with_the_others() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    with torch.no_grad():
        model[0].weight.data = model[0].weight.data.double()
    raises(paged.step, r"'0\.weight'.*release\(\)")
    paged.release(model)
    assert model[0].weight.dtype == torch.float64
    model.float()
    paged.attach(model)
    trains(paged, model)


# Hooks.

@pytest.mark.parametrize("plain", [False, True])
def test_a_gradient_hook_after_attach_is_called_and_nothing_is_lost(plain: bool) -> None:
    def run(hooked: bool) -> tuple[list[torch.Tensor], int]:
        paged, model = engine(), net()
        paged.attach(model, lr=0.1)
        calls = 0

        def count(parameter: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            assert parameter.grad is not None

        for step in range(4):
            if hooked and step == 1:
                handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]
            if hooked and step == 3:
                for handle in handles:
                    handle.remove()
            loss = loss_of(model, step)
            if plain:
                loss.backward()
            else:
                paged.backward(loss)
            paged.step()
        out = values(model)
        paged.release(model)
        return out, calls

    without, _ = run(False)
    with_hooks, calls = run(True)
    assert_equal(with_hooks, without)
    assert calls == 2 * 6


# Learning rates.

def in_the_window(**config: Any) -> tuple[pagoda.Engine, torch.nn.Module]:
    """After the last backward of a step that is not the first."""
    paged, model = engine(**config), net()
    paged.attach(model, lr=0.1)
    trains(paged, model)
    paged.backward(loss_of(model, 2))
    return paged, model


WAYS: list[Callable[[dict[str, Any]], None]] = [
    lambda group: group.__setitem__("lr", 0.5),
    lambda group: group.update(lr=0.5),
    lambda group: group.__ior__({"betas": (0.5, 0.5)}),
]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_learning_rate_in_the_window_raises_where_it_is_set(way: int) -> None:
    paged, model = in_the_window()
    group = paged.optimizer.param_groups[0]
    before = dict(group)
    raises(lambda: WAYS[way](group), r"a change of '(lr|betas)' came between.*after step\(\)")
    assert {**group, "params": None} == {**before, "params": None}
    group["lr"] = 0.1  # the same: nothing changes
    paged.step()
    WAYS[way](group)
    trains(paged, model)
    other, its = in_the_window()
    other.step()
    WAYS[way](other.optimizer.param_groups[0])
    trains(other, its)
    assert_equal(values(model), values(its))


def test_a_scheduler_in_the_window_raises_and_step_completes() -> None:
    paged, model = in_the_window()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(paged.optimizer, gamma=0.5)
    with pytest.raises(pagoda.UserError, match="a change of 'lr'"):
        scheduler.step()
    paged.step()
    assert paged.optimizer.param_groups[0]["lr"] == 0.1
    scheduler.step()
    trains(paged, model)


def test_a_tensor_that_is_changed_in_the_window_is_put_back() -> None:
    """Nobody sees that at once: step() raises, and completes when it is called again."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    paged, model = engine(), net()
    paged.attach(model)
    paged.optimizer.param_groups[0]["lr"] = rate
    trains(paged, model)
    paged.backward(loss_of(model, 2))
    rate.fill_(0.5)
    raises(paged.step, "keeps its previous values")
    assert rate.item() == 0.1
    paged.step()
    rate.fill_(0.5)
    trains(paged, model)


class Doubled(torch.autograd.Function):
    """Writes to the parameter that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight.detach().mul_(2)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def test_a_write_in_the_window_raises_where_a_function_has_the_parameter() -> None:
    paged, model = in_the_window()
    before = values(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*after step\(\)"):
        Doubled.apply(torch.ones(1, WIDTH), model[0].weight)
    assert_equal(values(model), before)
    paged.step()
    other, its = in_the_window()
    other.step()
    assert_equal(values(model), values(its))
    Doubled.apply(torch.ones(1, WIDTH), model[0].weight)
    trains(paged, model)


def test_groups_are_dicts_for_whoever_copies_them() -> None:
    import copy
    import pickle

    paged, model = engine(), net()
    optimizer = paged.attach(model, lr=0.1)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    for copied in (copy.copy(optimizer.param_groups[0]), copy.deepcopy(optimizer.param_groups[0])):
        assert type(copied) is dict
        assert {name: value for name, value in copied.items() if name != "params"} == group
    with pytest.raises(RuntimeError, match="save_pretrained"):  # it reads the parameters' bytes
        pickle.dumps(optimizer.param_groups[0])
    optimizer.load_state_dict(optimizer.state_dict())
    trains(paged, model)
    paged.backward(loss_of(model, 2))
    raises(lambda: optimizer.param_groups[0].update(lr=1.0), "a change of 'lr'")


# Messages.

def test_after_a_backward_that_failed_step_goes_on() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    with pytest.raises(KeyError):
        paged.backward(model[2](failing(model[:2](torch.ones(1, WIDTH)), KeyError)).sum())
    for call in (paged.zero_grad, lambda: paged.backward(loss_of(model))):
        raises(call, r"call step\(\), which completes the step with the gradients that came")
    paged.step()
    trains(paged, model)


@pytest.mark.parametrize("key", ["device_budget", "host_budget", "staging"])
def test_a_size_that_no_machine_has(key: str) -> None:
    for size in (1 << 64, 10 ** 30, -(1 << 64)):
        with pytest.raises(pagoda.UserError, match=f"{key} = .*") as told:
            engine(**{key: size})
        assert "decimals" not in str(told.value), told.value


def test_texts_with_a_nul_character(tmp_path: Any) -> None:
    for config in ({"nvme": [f"{tmp_path}\0x"]}, {"device": "cpu\0"}, {"optimizer_state": "host\0"}):
        with pytest.raises(pagoda.UserError, match="NUL"):
            engine(**config)
    paged, model = engine(), net()
    paged.attach(model)
    raises(lambda: paged.save_pretrained(f"{tmp_path}/a\0b"), "NUL")
    trains(paged, model)


@pytest.fixture
def group() -> Iterator[None]:
    """Of one rank: what shards over ranks has to be given one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wrapped(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    """As a script does it, which imports what it uses when it uses it."""
    if kind == "DistributedDataParallel":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "DataParallel":
        return torch.nn.DataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    if kind == "distribute_module":
        from torch.distributed.tensor import DTensor, distribute_module

        return distribute_module(
            model, mesh, None, lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh),),
            lambda module, outputs, mesh: outputs.to_local())
    if kind == "parallelize_module":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        plan = {"*": ColwiseParallel()} if isinstance(model, torch.nn.Sequential) else ColwiseParallel()
        return parallelize_module(model, mesh, plan, src_data_rank=None)
    return FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=kind.endswith("with names"),
                                    device_id=torch.device("cpu"))


DTENSORS = ["fully_shard", "parallelize_module", "distribute_module"]
WRAPPERS = ["FullyShardedDataParallel", "FullyShardedDataParallel with names", *DTENSORS,
            "DistributedDataParallel", "DataParallel"]


@pytest.mark.filterwarnings("ignore:.*FSDP.*", "ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_attached_model_is_not_wrapped(kind: str, group: None) -> None:
    paged, model = engine(), net()
    paged.attach(model)
    name = kind.split()[0]
    raises(lambda: wrapped(kind, model), f"{name}.* of a model that is attached.*train the model as it is")
    raises(lambda: wrapped(kind, model[1]), f"{name}.* of a model that is attached")
    trains(paged, model)
    paged.release(model)
    assert wrapped(kind, model)(torch.ones(1, WIDTH)).shape == (1, WIDTH)


@pytest.mark.filterwarnings("ignore:.*FSDP.*", "ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_model_is_not_attached(kind: str, group: None) -> None:
    paged, model = engine(), net()
    match = "'0.weight' is a DTensor" if kind in DTENSORS else f"the model is a {kind.split()[0]}"
    raises(lambda: paged.attach(wrapped(kind, model)), f"{match}.*attach the model (without|of plain)")
    inner = net()
    match = r"'0\.weight' is a DTensor" if kind in DTENSORS else f"module '0' is a {kind.split()[0]}"
    raises(lambda: paged.attach(torch.nn.Sequential(wrapped(kind, inner[0]))), match)
    fresh = net()
    paged.attach(fresh)
    trains(paged, fresh)


def test_a_distributed_tensor_is_not_attached(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    paged, model = engine(), net()
    plain = model[1].weight
    model[1].weight = torch.nn.Parameter(distribute_tensor(
        plain.detach(), init_device_mesh("cpu", (1,)), [Replicate()]))
    raises(lambda: paged.attach(model), r"'1\.weight' is a DTensor.*shards parameters .* itself")
    model[1].weight = plain
    paged.attach(model)
    trains(paged, model)


@pytest.mark.parametrize(("config", "advice"), [
    ({"loss_scale": 1e18}, r'set loss_scale to a smaller number, or to \"dynamic\"'),
    ({"loss_scale": "dynamic", "loss_scale_initial": 2.0 ** 100}, "it falls with each of them"),
])
def test_steps_that_are_all_skipped_are_told(config: dict[str, Any], advice: str,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    paged, model = engine(**config), net().half()
    paged.attach(model)
    for _ in range(30):
        paged.backward(model(torch.ones(1, WIDTH, dtype=torch.float16)).sum())
        paged.step()
    said = [line for line in capfd.readouterr().err.splitlines() if "steps are skipped" in line]
    assert len(said) == 1, said
    assert re.search(r"in_a_row=10\b", said[0]) and "loss_scale=" in said[0], said
    assert advice in said[0], said
