# SPDX-License-Identifier: Apache-2.0
"""How programs end in which there is an engine: exit status, and what they print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def ended(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", script], capture_output=True, text=True,
                          timeout=120, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")})


CTRL_C = """
import os, signal, sys, threading, time
import torch, pagoda
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
large = torch.ones(3000, 3000)
def train():
    try:
        while True:
            engine.backward(model(torch.ones(4, 64)).sum())
            engine.step()
    finally:
        # afterwards
        pass
try:
    with pagoda.Engine(device="cpu", device_budget="1MiB", host_budget="64MiB") as engine:
        engine.attach(model, lr=1e-3)
        thread = threading.Thread(target=train)
        thread.start()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        thread.join()
finally:
    print(model(torch.ones(4, 64)).shape)
"""


@pytest.mark.parametrize("afterwards", ["", "large @ large"], ids=["", "and_is_still_in_torch_at_exit"])
def test_ctrl_c_ends_a_program_that_trains_on_another_thread(afterwards: str) -> None:
    script = CTRL_C.replace("# afterwards", afterwards)
    done = ended(script, "-W", "error")
    assert done.returncode == -signal.SIGINT, (done.returncode, done.stderr)
    assert done.stdout == "torch.Size([4, 64])\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr, done.stderr
    assert "RuntimeWarning" not in done.stderr, done.stderr


TRAINS_ON = """
import threading, torch, pagoda
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
engine = pagoda.Engine(device="cpu", device_budget="1MiB", host_budget="64MiB")
engine.attach(model, lr=1e-3)
failed = threading.Event()
def train():
    failed.wait()
    for _ in range(3):
        engine.backward(model(torch.ones(4, 16)).sum())
        engine.step()
    print("trained", engine.stats()["steps"])
threading.Thread(target=train).start()
def raises(kind, error, trace, before=__import__("sys").excepthook):
    before(kind, error, trace)
    failed.set()
__import__("sys").excepthook = raises
raise ValueError("plotting failed")
"""


def test_a_thread_trains_on_after_an_error_of_the_main_thread() -> None:
    """The interpreter waits for it, and on one rank there is nobody to tell."""
    done = ended(TRAINS_ON)
    assert done.stdout == "trained 3\n", done.stderr
    assert done.returncode == 1
    assert "plotting failed" in done.stderr


AT_EXIT = """
import threading, time
import pagoda
engine = pagoda.Engine(device="cpu", device_budget="1MiB")
threading.Thread(target=engine.stats).start()
time.sleep = lambda seconds: print("waits")
"""


def test_nobody_is_waited_for_at_exit_without_such_a_thread() -> None:
    """Python takes the main thread, too, for ended by then."""
    done = ended(AT_EXIT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


OPEN_BUILD = """
import torch, pagoda
engine = pagoda.Engine(device="cpu", device_budget="1MiB")
def models():
    with engine.build():
        yield torch.nn.Linear(2, 2)
generator = models()
model = next(generator)
"""


def test_the_interpreter_may_end_inside_a_build() -> None:
    done = ended(OPEN_BUILD)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_of_the_interpreter_is_silent() -> None:
    script = ("import sys, torch, pagoda\n"
              "engine = pagoda.Engine(device='cpu', device_budget='1MiB')\n"
              "model = torch.nn.Linear(8, 8)\n"
              "engine.attach(model)\n"
              "engine.backward(model(torch.ones(1, 8)).sum())\n"
              "engine.step()\n")
    done = ended(script, "-W", "error")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_saved_tensors_may_outlive_their_engine_and_the_interpreter() -> None:
    script = ("import torch, pagoda\n"
              "for _ in range(2):\n"
              "    engine = pagoda.Engine(device='cpu', device_budget='8MiB', host_budget='256MiB')\n"
              "    with engine.build():\n"
              "        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(20)))\n"
              "    engine.attach(model)\n"
              "    with engine.activations('host'):\n"
              "        loss = model(torch.ones(128, 512)).square().mean()\n"
              "    engine.close()\n"
              "print('the end')\n")
    for _ in range(2):
        done = ended(script)
        assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
