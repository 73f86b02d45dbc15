# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_divergence.py: scripts that diverge, fail or end early on some ranks.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… python rank_scenarios.py PLAN RESULTS

Imports once, then forks a process for each scenario of the plan: an uncaught exception there goes all
the way up, as in a script of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import rank_differences
import rank_endings
import rank_interrupts
import rank_joins
import rank_sums
import torch
from rank_scenario import (
    RANK,
    SCENARIOS,
    WIDTH,
    error_of,
    loss_of,
    make_engine,
    make_model,
    move_store_to_rank_0,
    scenario,
    started,
    train,
    values,
)

__all__ = ["SCENARIOS", "rank_differences", "rank_endings", "rank_interrupts", "rank_joins"]

DIRECTORY = Path()


# Calls.

@scenario
def release_often() -> None:
    for turn in range(30):
        engine, model = started(zero=1 + turn % 3)
        train(engine, model, 1)
        engine.release(model)
        print("values", values(model))
        engine.close()


@scenario
def clip_on_one_rank() -> None:
    engine = make_engine()
    with engine.build():
        model = make_model()
    clip = 1.0 if RANK == 0 else 0.0
    print("error", error_of(lambda: engine.attach(model, clip=clip)))
    engine.attach(model, clip=0.5)  # it can be mended
    train(engine, model, 2)
    print("values", values(model))
    engine.close()


@scenario
def save_beside_step() -> None:
    engine, model = started()
    train(engine, model, 4 if RANK == 0 else 5)
    engine.save_pretrained(DIRECTORY / "never")


@scenario
def zero_grad_beside_step() -> None:
    engine, model = started(early_updates=False)
    engine.backward(loss_of(model))
    if RANK == 0:
        engine.zero_grad()
    engine.step()


@scenario
def other_learning_rate() -> None:
    engine, model = started()
    engine.optimizer.param_groups[0]["lr"] = 0.01 * (RANK + 1)
    train(engine, model, 1)


@scenario
def join_with_schedule() -> None:
    """Rank 1 runs out of batches, while rank 0 goes on with zero_grad() and a schedule."""
    engine, model = started()
    schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    for step in range(5 if RANK == 0 else 2):
        engine.optimizer.zero_grad()
        engine.backward(loss_of(model, step))
        engine.step()
        schedule.step()
    engine.join()
    print("values", values(model))
    engine.close()


@scenario
def save_fails() -> None:
    engine, model = started()
    train(engine, model, 1)
    file = DIRECTORY / "a file"
    file.write_text("in the way")
    print("error", error_of(lambda: engine.save_pretrained(file)))
    train(engine, model, 1)
    engine.save_pretrained(DIRECTORY / "model")
    print("values", values(model))
    engine.close()


@scenario
def attach_fits_on_one_rank() -> None:
    engine = make_engine(host_budget="370KiB" if RANK == 0 else "64MiB", update_chunk="4KiB",
                         bucket="8KiB", fetch_threads=1)  # rank 0 has the pages that are not cut
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(14)))
    print("error", error_of(lambda: engine.attach(model)))
    del model
    small = torch.nn.Linear(4, 4)
    engine.attach(small)  # the engines live
    engine.backward(small(torch.ones(1, 4)).sum())
    engine.step()
    engine.release(small)
    engine.close()


@scenario
def engine_fails_on_one_rank() -> None:
    make_engine(**({"zero": 7} if RANK == 1 else {}))


# Waiting.

@scenario
def idle() -> None:
    engine, model = started(timeout=2)
    train(engine, model, 2)
    if RANK == 1:
        time.sleep(8)
    engine.backward(loss_of(model))
    engine.step()


@scenario
def slow() -> None:
    """Longer than timeout: in a user's code that computes, then in a forward."""
    engine, model = started(timeout=1)
    for how in range(2):
        began = time.monotonic()
        while RANK == 1 and time.monotonic() - began < 3:
            if how == 1:
                loss_of(model)
                time.sleep(0.1)
        engine.backward(loss_of(model))
        engine.step()
    print("values", values(model))
    engine.close()


@scenario
def ends_early_and_serves() -> None:
    engine, model = started(timeout=2)
    train(engine, model, 1)
    began = time.monotonic()
    while RANK == 1 and time.monotonic() - began < 5:
        loss_of(model)
        time.sleep(0.05)
    print("values", values(model))


# Values.

class Normed(torch.nn.Module):
    """Unseeded weights, of which some are frozen, and a buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.layers[0].requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH, WIDTH).t() > 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) * self.scale
        return out


@scenario
def unseeded() -> None:
    for zero in range(4):
        engine = make_engine(zero=zero, nvme=[str(DIRECTORY)] if zero == 3 else [],
                             nvme_budget="8MiB" if zero == 3 else 0, update_chunk="64KiB",
                             parameters="nvme" if zero == 3 else "host")
        with engine.build():
            model = Normed()
        before = model.layers[1].weight._version
        engine.attach(model)
        assert (model.layers[1].weight._version > before) == (RANK == 1)
        train(engine, model, 2)
        print("values", values(model), model.scale.sum().item(), model.mask.sum().item())
        engine.release(model)
        print("values", values(model))
        engine.close()


@scenario
def holder_of_the_store_is_stopped() -> None:
    """Rank 0 has the store and answers nobody, but its connections are good."""
    meeting = move_store_to_rank_0()
    if RANK == 0:
        meeting.set("process", str(os.getpid()))
    engine, model = started(timeout=4)
    train(engine, model, 2)
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    print(error_of(lambda: train(engine, model, 2)))
    engine.close()
    os.kill(int(meeting.get("process")), signal.SIGKILL)


@scenario
def bad_argument_of_one_rank() -> None:
    engine, model = started()
    train(engine, model, 1)
    for bad in ({"max_shard_bytes": 0 if RANK == 1 else 1000}, {"model": None if RANK == 0 else 5}):
        said = error_of(lambda bad=bad: engine.save_pretrained(DIRECTORY / "out", **bad))  # type: ignore
        assert "UserError" in said and "save_pretrained" in said or RANK == 1, said
        assert said != "nothing"
    said = error_of(lambda: engine.save_pretrained(DIRECTORY / "out" if RANK == 0 else ""))
    assert "the ranks differ in the directory of save_pretrained()" in said, said
    train(engine, model, 1)
    engine.save_pretrained(DIRECTORY / "out")
    engine.close()


@scenario
def other_folders_on_other_ranks() -> None:
    engine, model = started()
    train(engine, model, 1)
    said = error_of(lambda: engine.save_pretrained(DIRECTORY / f"of rank {RANK}"))
    assert "it is '" in said and "of rank 0' on rank 0 and '" in said and "on rank 1" in said, said
    assert not any(DIRECTORY.iterdir())
    train(engine, model, 1)
    engine.save_pretrained(DIRECTORY / "out")
    engine.close()


@scenario
def unseeded_and_checked() -> None:
    engine = make_engine(initial="check")
    with engine.build():
        model = Normed()
    print("error", error_of(lambda: engine.attach(model)))
    engine.close()


# What is added up, and written.

def add_up(how: str, checkpointed: bool, fails_at: int | None) -> None:
    engine, model = started(early_updates=False)
    rank_sums.run_micro_batches(engine, model, RANK, how, checkpointed and RANK == 0, fails_at)
    expected = rank_sums.expected(make_model(), fails_at)
    for p, total in zip(model.parameters(), expected, strict=True):
        print("values", torch.equal(engine.grad(p), total))
    engine.zero_grad()
    engine.close()


@scenario
def backward_fails_on_one_rank() -> None:
    """A pass that fails is a micro-batch of its own: what came of it is not added to the next one's,
    so the ranks' micro-batches stay together."""
    add_up("engine", False, fails_at=4)  # where no gradient came yet
    add_up("plain", False, fails_at=2)


@scenario
def checkpoint_on_one_rank() -> None:
    """The backward of a reentrant checkpoint is no micro-batch by itself, whoever begins it."""
    for how in ("engine", "plain"):
        add_up(how, True, None)


@scenario
def numpy_writes_after_step() -> None:
    """Where others still have to read this rank's part of a page, a pin waits for them."""
    for zero in (1, 2):
        engine = make_engine(zero=zero, parameters="device", device_budget="16MiB",
                             gradient_staging="1MiB")
        rank_sums.write_by_numpy(engine, RANK)
        engine.close()


@scenario
def write_on_one_rank() -> None:
    """It is an error on all ranks, which the same write on the other one mends; put back, none."""
    for zero in range(4):
        engine, model = started(zero=zero)
        train(engine, model, 3)  # from now on updates begin early
        weight = next(model.children()).weight.detach()  # type: ignore[operator]
        if RANK == 0:
            weight.mul_(0.5)
        engine.backward(loss_of(model, 1))
        print("error", error_of(engine.step))
        if RANK == 1:
            weight.mul_(0.5)
        engine.step()
        print("values", values(model))
        if RANK == 1:
            kept = weight.clone()
            weight.zero_()
            weight.copy_(kept)
        train(engine, model, 2)
        print("values", values(model))
        engine.close()


@scenario
def save_after_a_write_on_one_rank() -> None:
    """Neither a file nor a plain model has what one rank alone has written."""
    engine, model = started()
    train(engine, model, 2)
    weight = next(model.children()).weight.detach()  # type: ignore[operator]
    if RANK == 1:
        weight.mul_(0.5)
    folder = DIRECTORY / "saved"
    print("error", error_of(lambda: engine.save_pretrained(folder)))
    print("error", error_of(lambda: engine.release(model)))
    print("saved", folder.exists())
    if RANK == 0:
        weight.mul_(0.5)
    engine.save_pretrained(folder)
    train(engine, model, 1)
    engine.release(model)
    print("values", values(model))
    engine.close()


@scenario
def other_values_on_one_rank() -> None:
    """All ranks write, and not the same; with pages on the device, evicted, and in 16 bits."""
    for config, dtype in (({}, torch.float32), ({"device_budget": "8MiB"}, torch.float32),
                          ({}, torch.bfloat16)):
        engine = make_engine(**config)
        with engine.build():
            model = make_model().to(dtype)
        engine.attach(model, lr=0.01)
        x = torch.ones(1, WIDTH, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
            model[1].weight.add_(RANK)  # type: ignore[index]
        print("error", error_of(engine.step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
            model[1].weight.fill_(0.05)  # type: ignore[index]
        for _ in range(3):  # from then on updates begin early
            engine.backward(model(x).square().sum())
            engine.step()
        with torch.no_grad():
            model[1].weight.mul_(RANK)  # type: ignore[index]
        engine.backward(model(x).square().sum())
        print("error", error_of(engine.step))
        with torch.no_grad():
            model[1].weight.fill_(0.05)  # type: ignore[index]
        engine.step()
        print("values", values(model))
        engine.close()


@scenario
def never_starts() -> None:
    """One rank: the other waits as long as join_timeout says, and says so after timeout."""
    if RANK == 0:
        return
    began = time.monotonic()
    print("error", error_of(lambda: make_engine(timeout=1, join_timeout=2.5)))
    print("waited", round(time.monotonic() - began))


def run(name: str, port: int, limit: float, results: Path) -> None:
    """In a process of its own; never returns there."""
    drivers = torch.distributed.TCPStore("127.0.0.1", port)
    drivers.add("drivers", 1)
    while drivers.add("drivers", 0) < int(os.environ["WORLD_SIZE"]):  # nobody's limit begins before
        time.sleep(0.01)
    del drivers
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        output = os.open(results / f"{name}.{RANK}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["MASTER_PORT"] = str(port)
        SCENARIOS[name]()
        sys.exit(0)
    status = 0
    done = 0
    while done == 0:
        done, status = os.waitpid(child, os.WNOHANG)
        if done == 0 and time.monotonic() - began > limit:
            os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0)
        time.sleep(0.01)
    (results / f"{name}.{RANK}.json").write_text(json.dumps(
        {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    DIRECTORY = Path(plan["directory"])
    torch.optim.SGD([torch.zeros(1)])  # what torch imports for its first optimizer is imported once
    for scenario_name, store in zip(plan["names"], plan["ports"], strict=True):
        run(scenario_name, store, plan["limit"], Path(sys.argv[2]))
