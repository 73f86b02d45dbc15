# SPDX-License-Identifier: Apache-2.0
"""Parameters of an attached model do not go to other processes: whoever sends them gets an error at
once, before a process is started, and the engine trains on. Copies go."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import WIDTH, engine, net, raises, trains
from torch.utils.data import DataLoader, Dataset

import pagoda

REFUSAL = "parameter '0.weight' cannot be shared with another process.*send a copy.*release"


class Scores(Dataset[torch.Tensor]):
    """A dataset that asks a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(self.model(torch.ones(WIDTH)).sum())


def nothing(*arguments: Any) -> None:
    pass


def loaded(model: torch.nn.Module, method: str = "spawn") -> list[torch.Tensor]:
    return list(DataLoader(Scores(model), num_workers=1, multiprocessing_context=method))


def started(model: torch.nn.Module) -> None:
    process = multiprocessing.get_context("spawn").Process(target=nothing, args=(model,))
    process.start()
    process.join()


def spawned(model: torch.nn.Module) -> None:
    torch.multiprocessing.spawn(nothing, (model,), nprocs=1)  # type: ignore[no-untyped-call]


def pickled(what: Any) -> None:
    ForkingPickler(io.BytesIO()).dump(what)


WAYS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "loader": loaded, "forkserver": lambda model: loaded(model, "forkserver"), "process": started,
    "spawn": spawned, "state_dict": lambda model: pickled(model.state_dict()),
    "view": lambda model: pickled(next(model.parameters()).detach()[1:]),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "moves"])
@pytest.mark.parametrize("way", WAYS)
def test_an_attached_model_is_not_sent(way: str, resident: bool) -> None:
    budget = {"device_budget": "1MiB"} if resident else {
        "device_budget": "4KiB", "gradient_staging": "1KiB"}  # for two layers of three
    paged, model = engine(**budget), net()
    paged.attach(model)
    trains(paged, model)
    children = multiprocessing.active_children()
    raises(lambda: WAYS[way](model), REFUSAL)
    assert multiprocessing.active_children() == children
    trains(paged, model)


@pytest.mark.parametrize("strategy", torch.multiprocessing.get_all_sharing_strategies())
def test_every_sharing_strategy_is_guarded(strategy: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        paged, model = engine(), net()
        paged.attach(model)
        raises(lambda: pickled(model), REFUSAL)
        trains(paged, model)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_what_is_advised_works() -> None:
    paged, model = engine(), net()
    paged.attach(model)
    trains(paged, model)
    copied = copy.deepcopy(model)
    wanted = Scores(copied)[0]
    assert all(torch.equal(each.squeeze(), wanted) for each in loaded(copied))
    trains(paged, model)
    paged.release(model)
    wanted = Scores(model)[0]
    assert all(torch.equal(each.squeeze(), wanted) for each in loaded(model))


def test_a_built_model_is_not_sent_either() -> None:
    paged = engine()
    with paged.build():
        model = net()
    raises(lambda: pickled(model), "cannot be shared with another process")
    pickled(torch.ones(3))


FORKED_BESIDE_AN_OPERATOR = """
import ctypes, fcntl, multiprocessing, os, threading, time
import torch, pagoda
from torch.utils.data import DataLoader

engine = pagoda.Engine(device="cpu", device_budget="1MiB")
model = torch.nn.Linear(8, 8)
engine.attach(model)
model(torch.ones(2, 8))  # this thread has had its first operator

# Another thread stays where the first operator of a thread, and a backward, are for a moment: under the lock
# of torch's list of callbacks. With it torch warns of a callback that it does not know, to a pipe that is full.
reads, writes = os.pipe()
fcntl.fcntl(writes, fcntl.F_SETFL, os.O_NONBLOCK)
for size in (4096, 1):
    try:
        while True:
            os.write(writes, b"x" * size)
    except BlockingIOError:
        pass
fcntl.fcntl(writes, fcntl.F_SETFL, 0)
os.dup2(writes, 2)
libtorch = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
remove_callback = libtorch._ZN2at14removeCallbackEm
remove_callback.argtypes, remove_callback.restype = [ctypes.c_uint64], None
thread = threading.Thread(target=remove_callback, args=(1 << 62,), daemon=True)
thread.start()
while not open(f"/proc/self/task/{thread.native_id}/syscall").read().startswith("1 0x2 "):
    time.sleep(0.01)

batches = DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, timeout=30,
                     multiprocessing_context="fork")
try:
    print([float(batch.sum()) for batch in batches], flush=True)
except RuntimeError as error:
    print(error, flush=True)
for worker in multiprocessing.active_children():
    worker.kill()
os._exit(0)
"""


def test_a_forked_worker_shares_batches_whatever_other_threads_did_at_the_fork() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED_BESIDE_AN_OPERATOR], check=False, text=True,
                          capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(Path(pagoda.__file__).parents[1])})
    assert (done.returncode, done.stdout) == (0, "[6.0, 22.0]\n"), done.stdout + done.stderr
