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


STORAGE_THAT_PYTHON_OWNS = """
import gc, sys, threading, time, torch, pagoda
engine = pagoda.Engine(device="cpu", device_budget="1MiB")
with engine.build():
    gone, large = (torch.nn.Linear(256, width, bias=False) for width in (256, 880))
    pinned = torch.nn.Linear(8, 8, bias=False)
@torch.jit.script
def work(x, large, times: int):  # without Python's lock, for a while, and then in need of room
    for i in range(times):
        x = torch.cos(x)
    return x.sum() + (large * 1).sum()
for _ in range(3):
    work(torch.ones(10), torch.ones(10), 3)
storage = gone.weight.untyped_storage()
gone.weight * 1
del gone
gc.collect()
pin, x, weight = engine.pin(pinned), torch.ones(1000000), large.weight.detach()
sys.setswitchinterval(3)
thread = threading.Thread(target=work, args=(x, weight, 50))
thread.start()
time.sleep(0.01)
until = time.monotonic() + 1.5
while time.monotonic() < until:
    pass
del pin
thread.join()
print("the end")
"""


def test_a_pin_goes_while_a_storage_that_only_python_has_is_evicted(tmp_path: Path) -> None:
    """Torch takes Python's lock to look at such a storage, under the pager's lock."""
    script = tmp_path / "script.py"  # TorchScript reads it
    script.write_text(STORAGE_THAT_PYTHON_OWNS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60,
                          check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")})
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
