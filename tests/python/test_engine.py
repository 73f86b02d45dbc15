# SPDX-License-Identifier: Apache-2.0
"""What a training script does to an engine, and what it is told when that cannot be."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from failing import failing
from small_stack import WIDTH, engine, loss_of, stack, steps
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from zoo import ZOO, tokens

import pagoda


# Errors.


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(pagoda.UserError, match="no key 'zeor'; did you mean 'zero'"):
        pagoda.Engine(zeor=3)
    with pytest.raises(ValueError, match="device_budget"):
        pagoda.Engine(device_budget="many")


def test_keywords_are_the_keys_of_the_configuration() -> None:
    config = engine(clip=0.5).config
    assert list(config) == [key.name for key in pagoda.config_keys()]
    assert config["clip"] == 0.5
    assert config["device"] == "cpu"


def test_what_cannot_be_attached_is_said() -> None:
    paged = engine()
    model = stack()
    with pytest.raises(pagoda.UserError, match="no optimizer 'adagrad'"):
        paged.attach(model, optimizer="adagrad")
    with pytest.raises(pagoda.UserError, match="optimizer 'sgd' has no 'betas'"):
        paged.attach(model, optimizer="sgd", betas=(0.9, 0.99))
    with pytest.raises(pagoda.UserError, match="nothing to train"):
        paged.attach(torch.nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(pagoda.UserError, match="not a parameter of the attached model"):
        paged.attach(model, groups=[{"params": [torch.nn.Parameter(torch.ones(2))]}])
    with pytest.raises(pagoda.UserError, match=r"'0' has sparse gradients"):
        paged.attach(torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True)))
    with pytest.raises(pagoda.UserError, match="attach"):
        _ = paged.optimizer
    paged.attach(model)
    with pytest.raises(pagoda.UserError, match="attached already"):
        paged.attach(model)


def test_an_operator_too_large_for_the_device_says_so_itself() -> None:
    paged = engine()
    with pytest.raises(RuntimeError, match=r"Linear\.weight.*raise device_budget to"), paged.build():
        torch.nn.Linear(200, 200)
    model = stack()  # the engine goes on (test_failures.py)
    paged.attach(model)
    steps(paged, model, 1)


def test_a_plan_that_cannot_fit_fails_before_the_first_step(tmp_path: Path) -> None:
    paged = engine(nvme=[tmp_path], nvme_budget="100KiB", optimizer_state="nvme")
    with pytest.raises(pagoda.UserError, match="nvme_budget"):
        paged.attach(stack())


def test_a_python_exception_in_backward_is_the_users_own() -> None:
    paged = engine()
    model = stack()
    paged.attach(model)
    with pytest.raises(KeyError, match="mine"):
        paged.backward(failing(model(torch.ones(1, WIDTH)), KeyError).sum())
    paged.zero_grad()
    steps(paged, model, 2)


def test_no_step_is_half_made_after_a_backward_that_failed() -> None:
    def half(model: torch.nn.Sequential) -> torch.Tensor:
        return model[3:](failing(model[:3](torch.ones(1, WIDTH)), KeyError)).sum()

    paged = engine()
    model = stack()
    paged.attach(model)
    steps(paged, model, 2)
    early = paged.stats()["updates"]["early"]
    with pytest.raises(KeyError, match="mine"):
        paged.backward(half(model))
    while paged.stats()["updates"]["early"] == early:
        time.sleep(0.001)
    with pytest.raises(pagoda.UserError, match="after a failure of, the last backward.*early_updates"):
        paged.zero_grad()

    paged, other = engine(early_updates=False), engine()
    models = stack(), stack()
    for each, its in zip((paged, other), models, strict=True):
        each.attach(its)
        steps(each, its, 2)
    with pytest.raises(KeyError, match="mine"):
        paged.backward(half(models[0]))
    paged.zero_grad()  # as if it had not been
    for each, its in zip((paged, other), models, strict=True):
        steps(each, its, 2)
        each.release(its)
    for mine, theirs in zip(*(its.parameters() for its in models), strict=True):
        assert torch.equal(mine, theirs)


# Gradients.


def test_gradients_are_the_engines() -> None:
    plain = stack()
    loss_of(plain).backward()
    paged = engine(early_updates=False)
    model = stack()
    paged.attach(model)
    paged.backward(loss_of(model))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is None
        assert theirs.grad is not None
        assert torch.equal(paged.grad(mine), theirs.grad)
    norm = clip_grad_norm_(plain.parameters(), 1e9)
    assert paged.grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    paged.zero_grad()
    assert paged.grad_norm() == 0


def test_the_norm_is_that_of_all_micro_batches_so_far() -> None:
    """Also where nothing clips, and nobody else needs it."""
    paged = engine(accumulation=3)
    model = stack()
    paged.attach(model)
    norms = []
    for step in range(3):
        paged.backward(loss_of(model, step), last=False)
        norms.append(paged.grad_norm())
    squares = sum(float(paged.grad(p).double().square().sum()) for p in model.parameters())
    assert norms[0] != norms[1] != norms[2]
    assert norms[2] == pytest.approx(squares ** 0.5, rel=1e-6)
    paged.step()


@pytest.mark.parametrize(("clip", "way"), [
    (clip_grad_norm_, r"engine.attach\(model, clip="), (clip_grad_value_, r"p\.register_hook\(")])
def test_clipping_by_torch_is_an_error_that_names_the_way(clip: Any, way: str) -> None:
    plain = stack()
    paged = engine()
    model = stack()
    paged.attach(model)
    with pytest.raises(pagoda.UserError, match=way):
        clip(model.parameters(), 1.0)
    loss_of(plain).backward()
    clip(plain.parameters(), 1e-3)  # others' parameters are clipped as ever
    assert max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None) <= 1e-3
    paged.release(model)
    loss_of(model).backward()
    clip(model.parameters(), 1.0)


def test_clip_is_torchs() -> None:
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    paged = engine()
    model = stack()
    paged.attach(model, optimizer="sgd", lr=0.1, clip=0.01)
    for step in range(3):
        theirs.zero_grad()
        loss_of(plain, step).backward()
        norm = clip_grad_norm_(plain.parameters(), 0.01)
        theirs.step()
        paged.backward(loss_of(model, step))
        report = paged.step()
        assert report.norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, other in zip(parity.values(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize("name", ["gpt2", "qwen3_tied"])
@pytest.mark.parametrize("short", [False, True])
def test_clipping_ahead_is_clipping(name: str, short: bool) -> None:
    specimen = ZOO[name]
    parity.check_clipping_ahead(specimen.make, specimen.loss, short)


# Parameters seen by user code.


def test_raw_pointers_need_a_pin() -> None:
    paged = engine()
    with paged.build():
        model = stack()
    paged.attach(model)
    steps(paged, model, 1)
    with pytest.raises(RuntimeError, match=r"page '\d\.weight'.*engine\.pin"):
        for layer in model:
            layer.weight.detach().numpy()
    with paged.pin(model[0]):
        array = model[0].weight.detach().numpy()
        assert array.shape == (WIDTH, WIDTH)
        model[1](torch.ones(1, WIDTH))
    pin = paged.pin([model[0].weight, model[1].weight])
    pin.release()
    pin.release()


def test_what_is_written_under_a_pin_outlives_a_pin_inside_it() -> None:
    paged, model = engine(), stack()
    paged.attach(model)
    with paged.pin(model[0]):
        model[0].weight.detach().numpy()[0, 0] = 5
        with paged.pin(model[0].weight):
            pass
    for layer in model[1:]:  # there is room for two: it is evicted
        layer(torch.ones(1, WIDTH))
    assert model[0].weight[0, 0].item() == 5


def test_looking_at_a_model_brings_nothing_in() -> None:
    paged = engine()
    with paged.build():
        model = stack()
    paged.attach(model)
    steps(paged, model, 1)
    paged.finish()
    before = paged.stats()["pages"]["touches"]
    assert len(model.state_dict()) == 12
    assert sum(p.numel() for p in model.parameters()) == 6 * (WIDTH * WIDTH + WIDTH)
    assert "Linear" in repr(model)
    assert [p.detach().t().view_as(p.t()).shape for p in model.parameters()]
    assert paged.stats()["pages"]["touches"] == before


def test_in_place_edits_and_initialisers_are_kept() -> None:
    plain, model = stack(), stack()
    paged = engine()
    paged.attach(model)
    for each in (plain, model):
        torch.manual_seed(5)
        torch.nn.init.xavier_uniform_(each[2].weight)
        with torch.no_grad():
            each[3].weight.mul_(2).add_(1)
    model(torch.ones(1, WIDTH))
    assert all(torch.equal(a, b) for a, b in zip(parity.values(model).values(),
                                                 parity.values(plain).values(), strict=True))


def test_writes_before_the_first_step_are_kept() -> None:
    """Also in what was built by the engine and stays on the device, with masters beside it."""
    paged = engine(device_budget="1MiB", gradient_staging="256KiB", parameters="auto")
    with paged.build():
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    paged.attach(model, optimizer="sgd", lr=0.0)
    with torch.no_grad():
        model.weight.fill_(0.5)
    paged.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    paged.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.5))


def test_saving_by_torch_names_the_way(tmp_path: Path) -> None:
    paged = engine()
    model = stack()
    paged.attach(model)
    steps(paged, model, 1)
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    with pytest.raises(RuntimeError, match=r"engine\.save_pretrained"):
        torch.save(state, tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["gpt2", "qwen3_tied", "mixtral", "t5"])
@pytest.mark.parametrize("shard", [10**9, 100_000])
def test_save_pretrained_writes_what_transformers_reads(name: str, shard: int,
                                                        tmp_path: Path) -> None:
    paged = pagoda.Engine(**parity.config_below_a_third(ZOO[name].make))
    with paged.build():
        model: Any = ZOO[name].make()
    paged.attach(model)
    paged.backward(ZOO[name].loss(model, 0))
    paged.step()
    with pytest.raises(RuntimeError, match=r"engine\.save_pretrained"):
        model.save_pretrained(tmp_path / "theirs")
    paged.save_pretrained(tmp_path / "out", max_shard_bytes=shard)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard < 10**9)
    again, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    expected = parity.values(model)
    assert all(torch.equal(value, expected[key]) for key, value in parity.values(again).items())
    # The names in the files are those that transformers itself writes.
    again.save_pretrained(tmp_path / "theirs")

    def names(directory: Path) -> set[str]:
        from safetensors import safe_open

        return {key for file in directory.glob("*.safetensors")
                for key in safe_open(file, "pt").keys()}

    assert names(tmp_path / "out") == names(tmp_path / "theirs")


def test_save_pretrained_writes_the_adapters_of_peft(tmp_path: Path) -> None:
    import peft

    paged = pagoda.Engine(**parity.config_below_a_third(ZOO["lora"].make))
    torch.manual_seed(0)
    with paged.build():
        model = ZOO["lora"].make()
    paged.attach(model, lr=0.1)
    paged.backward(ZOO["lora"].loss(model, 0))
    paged.step()
    paged.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(ZOO["llama"].make(), tmp_path)
    expected = parity.values(model)
    assert all(torch.equal(value, expected[key]) for key, value in parity.values(again).items())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000


def test_release_gives_plain_tensors_back() -> None:
    paged = engine()
    model = stack()
    paged.attach(model)
    steps(paged, model, 2)
    expected = parity.values(model)
    paged.release(model)
    paged.close()
    assert all(torch.equal(torch.from_numpy(p.detach().numpy()), expected[name])
               for name, p in model.named_parameters())
    loss_of(model).backward()
    assert model[0].weight.grad is not None


def test_release_of_parameters_that_never_needed_a_gradient() -> None:
    paged = engine()
    model = torch.nn.Linear(4, 4)
    model.base = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    paged.attach(model)
    paged.release(model)
    assert model.base.tolist() == [1, 1, 1]


def test_stats_are_a_dict_and_a_table() -> None:
    paged = engine()
    model = stack()
    paged.attach(model)
    steps(paged, model, 2)
    stats = paged.stats()
    assert stats["steps"] == 2
    assert stats["tiers"]["device"]["peak"] <= 72 * 1024
    assert "prefetch hits" in str(stats)
    assert stats["tiers"]["host"]["budget"] > 64 << 20  # what was available
    assert "<td" in stats._repr_html_()


# Processes and lives.


def test_two_engines_side_by_side() -> None:
    first, second = engine(), engine()
    models = [stack(), stack()]
    first.attach(models[0])
    second.attach(models[1])
    for step in range(2):
        for paged, model in zip((first, second), models, strict=True):
            paged.backward(loss_of(model, step))
            paged.step()
    assert all(torch.equal(a, b) for a, b in zip(parity.values(models[0]).values(),
                                                 parity.values(models[1]).values(), strict=True))
    third = engine()
    with pytest.raises(pagoda.UserError, match="belongs to another engine"):
        third.attach(models[0])


def test_a_dropped_engine_is_gone_and_can_be_made_again(tmp_path: Path) -> None:
    """As when a notebook's cell runs again."""
    for _ in range(3):
        paged = engine(parameters="nvme", nvme=[tmp_path])
        with paged.build():
            model = stack()
        paged.attach(model)
        steps(paged, model, 1)
    old = model
    del paged, model
    gc.collect()
    assert old(torch.ones(1, WIDTH)).isfinite().all()  # it has its weights (test_closing.py)
    with engine() as paged:
        paged.attach(stack())
    with pytest.raises(pagoda.UserError, match="closed"):
        paged.stats()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) * 1.0


def test_forked_data_loaders_work_beside_an_engine() -> None:
    paged = engine()
    with paged.build():
        model = stack()
    paged.attach(model)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2,
                                         multiprocessing_context="fork")
    for _ in range(2):
        for batch in loader:
            paged.backward((model(batch) - batch).square().mean())
            paged.step()
    assert paged.stats()["steps"] == 6


def test_every_call_in_a_fork_raises_or_takes_no_lock() -> None:
    """A lock may be held by a thread that the child does not have: there it would never be free."""
    paged = engine()
    with paged.build():
        model = stack()
    paged.attach(model)
    activations = paged.activations("host", least=0)
    with activations:
        loss = loss_of(model)
    paged.backward(loss_of(model))
    weight = next(model.parameters())
    pinned = paged.pin(weight)
    saved = loss.grad_fn  # with what it keeps

    def build() -> None:
        with paged.build():
            torch.nn.Linear(2, 2)

    def save() -> None:
        with activations:
            (torch.ones(64, 64, requires_grad=True) * 2).exp()

    refused: dict[str, Any] = {
        "stats": paged.stats, "has_gradients": paged.has_gradients,
        "loss_scale": lambda: paged.loss_scale,
        "build": build, "attach": lambda: paged._handle.attach([], [], [], [], [], [], [], 0.0, ""),
        "release": paged.release,
        "backward": lambda: paged.backward(torch.ones((), requires_grad=True) * 2), "step": paged.step,
        "join": paged.join, "finish": paged.finish, "grad": lambda: paged.grad(weight),
        "grad_norm": paged.grad_norm, "zero_grad": paged.zero_grad, "pin": lambda: paged.pin(model),
        "activations": lambda: paged.activations("host"),
        "save_pretrained": lambda: paged.save_pretrained("x"),
        "a tensor saved": save, "set_clip": lambda: paged._handle.set_clip(1.0),
        "set_loss_is_scaled": lambda: paged._handle.set_loss_is_scaled(True),
        "barrier": paged._handle.barrier,
        "lr": lambda: paged._handle.set_optimizer(0, "adamw", {"lr": 1.0}),
        "require_changeable": lambda: paged._handle.require_changeable("lr"),
    }
    works: dict[str, Any] = {
        "rank": lambda: paged.rank, "world_size": lambda: paged.world_size, "config": lambda: paged.config,
        "device": lambda: paged.device, "repr": lambda: repr(paged), "unpin": pinned.release,
        "fail": lambda: paged._handle.fail("why"), "waits": paged._handle.waited_for_ranks,
        "close": paged.close,
    }
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        for name, call in (refused | works).items():
            os.write(send, f"{name}: ".encode())
            try:
                call()
                text = "works"
            except RuntimeError as error:  # pagoda.EngineError is one
                text = "refused" if "forked process" in str(error) else str(error)
            except BaseException as error:
                text = repr(error)
            os.write(send, text.encode() + b"\n")
        del saved, loss, pinned, activations
        gc.collect()
        os.write(send, b"dropped")
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as lines:
        told = lines.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0, told[-1]
    assert told == [*(f"{name}: refused" for name in refused), *(f"{name}: works" for name in works),
                    "dropped"]
    paged.step()
    del loss, saved
    assert paged.stats()["steps"] == 1


OVERFLOWING = """
import sys, torch, pagoda
with pagoda.Engine(device="cpu", device_budget="64MiB", host_budget=9577576, nvme_budget="64MiB",
                   nvme=[sys.argv[1]], parameters="host", gradients="device", staging="100KiB",
                   update_chunk="64KiB", update_buffers=3, update_threads=1, moments="bf16",
                   master="split", gradient_staging="2MiB") as engine:
    with engine.build():
        model = torch.nn.Sequential(*(torch.nn.Linear(96, 96, dtype=torch.bfloat16)
                                      for _ in range(5)))
    engine.attach(model)
    print(engine.stats()["tiers"]["nvme"]["holders"].get("parameters", {}).get("used", 0))
"""


def test_what_went_to_nvme_for_want_of_host_memory_is_logged(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OVERFLOWING, str(tmp_path)], capture_output=True, text=True, check=True,
        env={**os.environ, "PAGODA_LOG": "info",
             "PYTHONPATH": str(Path(pagoda.__file__).parents[1])})
    assert int(ended.stdout) > 0
    assert ended.stderr.count("host_budget is full") == 1, ended.stderr


INTERRUPTED = """
import sys, threading, signal, os, time
sys.path.insert(0, os.environ["PAGODA_PYTHON"])
import torch, pagoda
engine = pagoda.Engine(device="cpu", device_budget="72KiB", gradient_staging="24KiB",
                       parameters="nvme", optimizer_state="nvme", gradients="nvme", nvme=[sys.argv[1]])
with engine.build():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
engine.attach(model)
print("ready", flush=True)
while True:
    engine.backward(model(torch.ones(4, 64)).square().mean())
    engine.step()
"""


def test_an_interrupt_leaves_nothing_on_disk(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    environment = {**os.environ, "PAGODA_PYTHON": str(Path(pagoda.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(swap)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert process.returncode in (1, -signal.SIGINT, 130)
    assert list(swap.iterdir()) == []


def test_generating_and_evaluating_between_steps_change_nothing() -> None:
    paged = pagoda.Engine(**parity.config_below_a_third(ZOO["llama"].make))
    torch.manual_seed(0)
    with paged.build():
        model: Any = ZOO["llama"].make()
    paged.attach(model)
    before = parity.values(model)
    model.eval()
    written = model.generate(tokens(0, 4), max_new_tokens=6, do_sample=False, pad_token_id=0)
    torch.manual_seed(0)
    plain: Any = ZOO["llama"].make().eval()
    expected = plain.generate(tokens(0, 4), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(written, expected)
    assert all(torch.equal(value, before[name]) for name, value in parity.values(model).items())


@pytest.mark.parametrize("steps", [0, 1])
def test_parameters_replaced_while_building(steps: int) -> None:
    """Their storages die among births, and the engine forgets them, whatever it does then."""
    with pagoda.Engine(device="cpu", device_budget="1MiB", gradient_staging="64KiB",
                       parameters="host") as engine:
        with engine.build():
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            model[0].weight = model[3].weight
        engine.attach(model)
        for _ in range(steps):
            engine.backward(model(torch.ones(1, 64)).sum())
            engine.step()
            assert engine.stats()["tiers"]["host"]["holders"]["parameters"]["used"] == sum(
                p.nbytes for p in model.parameters())
