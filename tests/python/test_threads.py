# SPDX-License-Identifier: Apache-2.0
"""Threads of a training script that wait for each other's pages, with Python's lock among what they
need. A program that does so may hang for good, so each is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
import torch, pagoda

class Waiting(torch.autograd.Function):
    '''Has its page until it is told to go on.'''

    @staticmethod
    def forward(ctx, weight):
        inside.set()
        assert go_on.wait(60)
        return weight.sum()

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

inside, go_on = threading.Event(), threading.Event()
# Room for one of the two pages.
engine = pagoda.Engine(device="cpu", device_budget="28KiB", gradient_staging="12KiB", prefetch=False)
model = torch.nn.ParameterList(torch.full((48, 64), float(i)) for i in (1, 2))
engine.attach(model, lr=1e-3)
sums = {}

def run(function, index):
    try:
        with torch.set_grad_enabled(sys.argv[1] == "grad"):
            sums[index] = function.apply(model[index].reshape(-1)).item()
    except RuntimeError as error:
        sums[index] = str(error)

threads = [threading.Thread(target=run, args=job) for job in ((Waiting, 0), (Sum, 1))]
threads[0].start()
assert inside.wait(60)
threads[1].start()  # there is no room for its page until the first function has returned
time.sleep(0.3)
go_on.set()
for thread in threads:
    thread.join()
print(sums[0], sums[1])
engine.close()
"""

READERS = """
import copy, sys, threading
import torch, pagoda

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, second):
        return x @ first @ second

# Does `work` while two threads read all parameters again and again.
def beside(read, work):
    stop = threading.Event()
    def run():
        while not stop.is_set():
            for p in model.parameters():
                read(p)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    stop.set()
    for thread in threads:
        thread.join()

def products():
    with torch.no_grad():
        for i in range(100):
            Product.apply(torch.ones(3, 64), model[i % 4].weight, model[(i + 1) % 4].weight)

for _ in range(1 if sys.argv[1] == "tolist" else 20):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    engine = pagoda.Engine(device="cpu", device_budget="64KiB", gradient_staging="16KiB",
                           parameters="host")
    engine.attach(model, lr=1e-3)
    if sys.argv[1] == "tolist":
        beside(torch.Tensor.tolist, products)
    else:
        beside(lambda p: copy.deepcopy(p.detach()), lambda: engine.release(model))
    engine.close()
"""


def run(program: str, argument: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program, argument], check=False, text=True, capture_output=True,
        timeout=100, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")})
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split()


@pytest.mark.parametrize("grad", ["grad", "no_grad"])
def test_a_function_that_waits_for_room_lets_go_of_pythons_lock(grad: str) -> None:
    assert run(PROGRAM, grad) == ["3072.0", "6144.0"]


@pytest.mark.parametrize("how", ["tolist", "deepcopy"])
def test_so_does_a_read_that_python_announces(how: str) -> None:
    """tolist() and a copy of a storage run operators with that lock held."""
    assert run(READERS, how) == []
