# SPDX-License-Identifier: Apache-2.0
"""What a person sees of the example."""

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

SMALL = ["--batch", "1", "--sequence", "16", "--sample", "4"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # small work: threads would only wait


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return path


def run(build: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([build / "bin" / "tiny_gpt", *arguments], check=False, text=True,
                          capture_output=True, timeout=120, env=ONE_THREAD, cwd=cwd)


def test_training_from_disk_gives_the_bits_of_training_in_memory(build: Path, text: Path,
                                                                 tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    flags = ["--steps", "3", "--repeat", "2", "--text", str(text), "--dir", str(swap), *SMALL]
    result = run(build, *flags)
    assert result.returncode == 0, result.stderr
    assert "step 3/3  loss " in result.stdout
    assert result.stdout.count(" equal\n") == 2
    assert "DIFFERENT" not in result.stdout
    assert "\x1b" not in result.stdout
    assert all(len(line) <= 120 for line in result.stdout.splitlines())
    # All of it on disk: a parameter, its gradient and two moments.
    assert re.search(r"nvme +16\d\.\d\d MiB +16\.\d\d\n", result.stdout), result.stdout
    assert list(swap.iterdir()) == []


def test_the_same_seed_writes_the_same(build: Path, text: Path, tmp_path: Path) -> None:
    flags = ["--steps", "2", "--repeat", "0", "--text", str(text), "--dir", str(tmp_path), *SMALL]
    written = [run(build, *flags).stdout.split("What it writes")[1] for _ in range(2)]
    assert written[0] == written[1]


@pytest.mark.parametrize(("arguments", "word"), [
    (["--dir", "/no/such/directory"], "/no/such/directory"),
    (["--text", "SHORT"], "too short"),
    (["--stps", "3"], "--stps"),
    (["--device-budget", "1MiB"], "raise device_budget"),
    (["--device-budget", "9000"], "raise device_budget"),
    (["--host-budget", "1MiB"], "host"),
    (["--disk-budget", "100MiB"], "raise nvme_budget"),
    (["--disk-budget", "4000TiB"], "TMP"),
    (["--device", "abacus"], "abacus"),
])
def test_a_mistake_gets_one_clear_line_and_code_2(build: Path, tmp_path: Path,
                                                  arguments: list[str], word: str) -> None:
    (tmp_path / "short").write_text("ab")
    result = run(build, *(str(tmp_path / "short") if a == "SHORT" else a for a in arguments),
                 cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert not result.stdout
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("tiny_gpt: ")
    assert (word if word != "TMP" else "PiB") in result.stderr


def test_an_interrupt_ends_training_and_gives_the_cursor_back(build: Path, text: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([build / "bin" / "tiny_gpt", "--text", str(text), *SMALL], stdout=theirs,
                          stderr=subprocess.PIPE, env=ONE_THREAD, cwd=text.parent) as process:
        os.close(theirs)
        seen = b""
        while b"step 1" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        try:
            while data := os.read(ours, 4096):
                seen += data
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert seen.endswith(b"\x1b[?25h"), seen[-200:]
    assert b"\x1b[?25l" in seen


def test_the_demo_sets_up_and_trains(build: Path, text: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    assert build.samefile(root / "build"), "demo.sh builds there"
    flags = ["--steps", "1", "--text", str(text), "--dir", str(tmp_path), *SMALL]
    result = subprocess.run([root / "demo.sh", *flags], check=False, text=True,
                            capture_output=True, timeout=300, env=ONE_THREAD)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "== building tiny_gpt" in result.stdout and "step 1/1  loss " in result.stdout
