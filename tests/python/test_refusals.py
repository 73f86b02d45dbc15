# SPDX-License-Identifier: Apache-2.0
"""Every configuration key with values that make no sense: what is refused says which key it was, how
much that has and how much it needs, and doing what it says helps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pagoda

KEYS = {key.name: key.takes for key in pagoda.config_keys()}
# What users do not know: names of our sources' things, comparisons, places in files.
INTERNAL = re.compile(r"check failed|arena|\.cpp|\bvs\b|JSON|bad_alloc|std::|0x[0-9a-f]{6}")
SIZES = [0, 1, -1, 1.5, "", "4KiB", "100KiB", "16MiB", "1TiB", "1024PiB", "8192PiB", "-4KiB", "abc",
         "4KiBB", "99999999999999999999", True, [1]]
OTHERS = [0, 1, -1, 0.5, 1e308, "", "abc", "0", "nan", "-inf", True, [], {}, [1], 2**64, "/no/such",
          "cuda:200", "cuda:300"]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))


def train(config: dict[str, Any], built: bool = True) -> None:
    with pagoda.Engine(**{"device": "cpu", **config}) as engine:
        if built:
            with engine.build():
                net = model()
        else:
            net = model()
        engine.attach(net)
        for _ in range(2):
            engine.backward(net(torch.ones(2, 64)).sum())
            engine.step()
        engine.finish()


def refusal(config: dict[str, Any], built: bool = True) -> str:
    """What is said against it; empty where nothing is."""
    try:
        train(config, built)
    except pagoda.UserError as error:
        return str(error)
    except RuntimeError as error:  # of an operator, in the words of the engine
        assert not isinstance(error, pagoda.Error), error
        return re.sub(r" \(src/.*$", "", str(error))
    return ""


@pytest.mark.parametrize("key", KEYS)
def test_every_key_says_what_is_wrong_with_it(key: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `trace` writes files
    bases: list[dict[str, Any]] = [{}]
    values: list[Any] = OTHERS
    if KEYS[key].startswith("a byte size"):
        bases.append(on_disk(tmp_path))
        values = SIZES
    for base in bases:
        for value in values:
            said = refusal({**base, key: value})
            if not said:
                continue
            print(f"{key}={value!r}: {said}")
            assert key in said, (value, said)
            assert not INTERNAL.search(said), (value, said)
            assert len(said) < 500, (value, said)
            # What is allowed, or what would work, or what to do.
            assert re.search(r"expected|at least|lower|needs? director|leave|set |cannot be (used|written)",
                             said), (value, said)


def on_disk(directory: Path) -> dict[str, Any]:
    return {"nvme": [directory], "nvme_budget": "16MiB", "parameters": "nvme", "gradients": "nvme",
            "optimizer_state": "nvme", "device_budget": "1MiB", "update_chunk": "16KiB",
            "staging": "16KiB"}


SMALL = {"device_budget": "1MiB", "staging": "16KiB", "update_chunk": "16KiB"}


@pytest.mark.parametrize("built", [True, False], ids=["built", "attached"])
@pytest.mark.parametrize(("key", "where"), [
    ("device_budget", "host"), ("device_budget", "device"), ("device_budget", "nvme"),
    ("host_budget", "host"), ("host_budget", "nvme"),
    ("host_budget", "auto"), ("nvme_budget", "nvme"), ("nvme_budget", "auto")])
def test_what_is_advised_is_the_smallest_that_works(key: str, where: str, built: bool,
                                                    tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, "parameters": where, "gradients": where, "optimizer_state": where}
    if where == "nvme" or (where == "auto" and key == "nvme_budget"):
        config = {**on_disk(tmp_path), **config}
    if where == "auto":
        config["device_budget"] = "128KiB"
        config["host_budget"] = "9MiB" if key == "nvme_budget" else 0
    config[key] = 1
    tried: list[str] = []
    for _ in range(8):
        said = refusal(config, built)
        if not said:
            break
        advice = re.search(rf"{key} to at least ([\d.]+ (?:B|[KMGT]iB))", said)
        assert advice, said
        tried.append(advice[1])
        config[key] = advice[1]
    assert tried, "one byte was enough"
    assert not said, (tried, said)
    print(tried)
    # Two decimals are shown, rounded up: 2 % less is too little.
    config[key] = int(bytes_of(tried[-1]) * 0.98)
    assert refusal(config, built), tried


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


def free_bytes(directory: Path) -> int:
    """What the file system has, once it has taken back what a file before had: some take a second."""
    free = -1
    for _ in range(60):
        before, free = free, shutil.disk_usage(directory).free
        if free == pytest.approx(before, rel=0.01):
            break
        time.sleep(0.5)
    return free


LIMITED = """
import resource, sys
import torch, pagoda
from pathlib import Path

name, line, room = sys.argv[1:]
status = Path("/proc/self/status").read_text().splitlines()
used = int(next(l for l in status if l.startswith(line)).split()[1]) << 10
kind = getattr(resource, name)
resource.setrlimit(kind, (used + (int(room) << 20), resource.RLIM_INFINITY))
for budget in ({"device_budget": "64GiB"}, {}):
    try:
        engine = pagoda.Engine(device="cpu", staging="16KiB", update_chunk="16KiB", update_threads=1, **budget)
    except pagoda.UserError as error:
        print(error)
    else:
        model = torch.nn.Linear(8, 8)
        engine.attach(model)
        engine.backward(model(torch.ones(1, 8)).sum())
        engine.step()
        print("trained")
"""


@pytest.mark.parametrize(("name", "line", "flag"), [("RLIMIT_AS", "VmSize:", "-v"),
                                                    ("RLIMIT_DATA", "VmData:", "-d")])
def test_a_limit_of_the_process_is_named(name: str, line: str, flag: str) -> None:
    """The machine has the memory, and free memory says nothing."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python"),
                   "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

    def said(room: int) -> list[str]:
        done = subprocess.run([sys.executable, "-c", LIMITED, name, line, str(room)], check=False,
                              capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    limit = rf"{name} \(ulimit {flag}\) allows this process [0-9.]+ [GM]iB, of which [0-9.]+ [GM]iB"
    given, default = said(1024)
    assert re.match(rf"device_budget = 64 GiB cannot be reserved: {limit} are in use; raise the limit, or "
                    r"set device_budget to less than the [0-9.]+ [GM]iB that are left$", given), given
    assert default == "trained"
    given, default = said(-1)
    assert re.match(rf"device_budget = 64 GiB cannot be reserved: {limit} are in use; raise the limit$",
                    given), given
    assert re.match(f"there is no room for device_budget: {limit} are in use; raise the limit$",
                    default), default


def test_directories_of_one_file_system_share_what_is_free(tmp_path: Path) -> None:
    """With the default nvme_budget, however many there are and whatever they are called."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "a")
    for names in (["a"], ["a", "b"], ["a", "alias"], ["a", "b", "alias"]):
        free = free_bytes(tmp_path)
        with pagoda.Engine(device="cpu", device_budget="1MiB",
                           nvme=[tmp_path / name for name in names]) as engine:
            budget = engine.stats()["tiers"]["nvme"]["budget"]
        assert budget == pytest.approx(free / 2, rel=0.2), names  # others write to this disk, too
