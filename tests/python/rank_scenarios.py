# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_divergence.py: scripts that diverge, fail or end early on some ranks.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… python rank_scenarios.py PLAN RESULTS

Imports once, then forks a process for each scenario of the plan: an uncaught exception there goes all
the way up, as in a script of its own.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

import rank_sums
import torch
from torch import distributed

import pagoda

RANK = int(os.environ.get("RANK", "0"))
DIRECTORY = Path()
WIDTH = 32
TIMEOUT = 20.0
"""Of engines where nothing shall wait for it: a test that has to wait so long has failed."""

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(call: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[call.__name__] = call
    return call


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def make_engine(**config: Any) -> pagoda.Engine:
    settings: dict[str, Any] = {"device": "cpu", "device_budget": "48KiB", "host_budget": "64MiB",
                                "gradient_staging": "16KiB", "staging": "16KiB",
                                "timeout": TIMEOUT, "heartbeat": 0.25}
    return pagoda.Engine(**{**settings, **config})


def loss_of(model: torch.nn.Module, batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * batch + RANK)
    loss: torch.Tensor = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    return loss


def train(engine: pagoda.Engine, model: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        engine.backward(loss_of(model, step))
        engine.step()


def started(**config: Any) -> tuple[pagoda.Engine, torch.nn.Module]:
    engine = make_engine(**config)
    with engine.build():
        model = make_model()
    engine.attach(model, lr=0.01)
    return engine, model


def values(model: torch.nn.Module) -> str:
    """A text that is the same for the same bits."""
    with torch.no_grad():
        return str([p.double().sum().item() for p in model.parameters()])


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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


# The ends that tell.

def fail_in_training(error: BaseException, *, rank: int = 0) -> None:
    engine, model = started()
    train(engine, model, 2)
    if RANK == rank:
        raise error
    train(engine, model, 3)


@scenario
def uncaught() -> None:
    fail_in_training(ValueError("the data is gone"))


@scenario
def uncaught_in_with() -> None:
    with make_engine() as engine:
        with engine.build():
            model = make_model()
        engine.attach(model)
        train(engine, model, 2)
        if RANK == 0:
            raise ValueError("the data is gone")
        train(engine, model, 3)


@scenario
def uncaught_with_another_hook() -> None:
    """Somebody else's hook takes the place of ours."""
    engine, model = started()
    sys.excepthook = lambda kind, error, trace: print("their hook", error)
    train(engine, model, 2)
    if RANK == 0:
        raise ValueError("the data is gone")
    train(engine, model, 3)


@scenario
def uncaught_in_backward() -> None:
    engine, model = started()
    train(engine, model, 2)

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("the data is gone")

    loss = loss_of(model)
    engine.backward(Breaks.apply(loss) if RANK == 0 else loss)
    engine.step()


@scenario
def graph_outlives_close() -> None:
    """Rank 1 has a graph with saved activations when it closes its engine, and goes on."""
    engine, model = started(timeout=1000)
    train(engine, model, 2)
    with engine.activations("host", least=1):
        loss = loss_of(model)
    kept = loss if RANK == 1 else None
    del loss
    engine.close()
    others = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    others.set(f"closed {RANK}", "")
    others.wait(["closed 0", "closed 1"])  # nobody ends before both have closed
    del kept


def close_gives_back(zero: int) -> None:
    engine, model = started(zero=zero)
    train(engine, model, 3)
    engine.close()
    for p in model.parameters():
        print(p.detach().numpy().tobytes().hex())


def used_by(engine: pagoda.Engine) -> dict[str, int]:
    holders = engine.stats()["tiers"]["host"]["holders"]
    return {name: holder["used"] for name, holder in holders.items() if holder["used"] > 0}


def attach_fails_on_one(zero: int) -> None:
    """Rank 1's budget has no room: on both ranks the model and the engine are as before."""
    engine = make_engine(zero=zero, host_budget="64MiB" if RANK == 0 else "1MiB")
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(30)))
    before = [p.detach().numpy().tobytes() for p in model.parameters()]
    used = used_by(engine)
    assert "host_budget" in error_of(lambda: engine.attach(model))
    assert used_by(engine) == used, (used, used_by(engine))
    assert [p.detach().numpy().tobytes() for p in model.parameters()] == before
    small = make_model()
    engine.attach(small)
    train(engine, small, 2)
    engine.close()


for _zero in (0, 3):
    SCENARIOS[f"attach_fails_on_one_{_zero}"] = functools.partial(attach_fails_on_one, _zero)
for _zero in (0, 2, 3):
    SCENARIOS[f"close_gives_back_{_zero}"] = functools.partial(close_gives_back, _zero)


@scenario
def uncaught_in_training_thread() -> None:
    """The thread that trains dies; the main thread waits for it, and ends well."""
    thread = threading.Thread(target=uncaught)
    thread.start()
    thread.join()
    if RANK == 0:
        time.sleep(3)  # the others do not need the end of the process


@scenario
def uncaught_in_other_thread() -> None:
    """A thread of the user's that has nothing to do with training."""
    engine, model = started()

    def fails() -> None:
        raise ValueError("of no concern")

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    train(engine, model, 2)
    print("values", values(model))
    engine.close()


@scenario
def uncaught_in_a_fork() -> None:
    """A child that fails is not the rank."""
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        child = os.fork()
        if child == 0:
            raise ValueError("of the child alone")
        os.waitpid(child, 0)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def interrupted() -> None:
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    train(engine, model, 3)


@scenario
def interrupted_in_step() -> None:
    """The signal comes while rank 0 waits for rank 1."""
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            loss_of(model)
    train(engine, model, 3)


@scenario
def exits_with_status() -> None:
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        sys.exit(3)
    train(engine, model, 3)


@scenario
def exits_with_status_in_with() -> None:
    with make_engine() as engine:
        with engine.build():
            model = make_model()
        engine.attach(model)
        train(engine, model, 2)
        if RANK == 0:
            sys.exit(3)
        train(engine, model, 3)


@scenario
def exits_at_once() -> None:
    engine, model = started()
    train(engine, model, 2)
    if RANK == 0:
        os._exit(3)
    train(engine, model, 3)


@scenario
def caught() -> None:
    """An exception that the script survives is nobody's concern."""
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        try:
            raise ValueError("caught")
        except ValueError:
            pass
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


@scenario
def interactive() -> None:
    """An exception in a notebook's cell: the interpreter goes on, and so do the ranks."""
    sys.ps1 = ">>> "
    engine, model = started()
    train(engine, model, 1)
    if RANK == 0:
        try:
            raise ValueError("in a cell")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    train(engine, model, 1)
    print("values", values(model))
    engine.close()


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
    meeting = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            meeting.set("port", str(free.getsockname()[1]))
        meeting.set("process", str(os.getpid()))
    os.environ.update(MASTER_PORT=meeting.get("port").decode(), TORCHELASTIC_USE_AGENT_STORE="False")
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
