# SPDX-License-Identifier: Apache-2.0
"""What a person sees of the example."""

import os
import pty
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


def run(build: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([build / "bin" / "tiny_gpt", *arguments], check=False, text=True,
                          capture_output=True, timeout=120, env=ONE_THREAD)


def test_the_same_seed_writes_the_same(build: Path, text: Path) -> None:
    flags = ["--steps", "2", "--text", str(text), *SMALL]
    result = run(build, *flags)
    assert result.returncode == 0, result.stderr
    assert "step 2/2  loss " in result.stdout
    assert "\x1b" not in result.stdout
    last = result.stdout.split("left\n")[-1]
    assert run(build, *flags).stdout.split("left\n")[-1] == last


@pytest.mark.parametrize(("arguments", "word"), [
    (["--dir", "/no/such/directory"], "/no/such/directory"),
    (["--text", "SHORT"], "too short"),
    (["--stps", "3"], "--stps"),
])
def test_a_mistake_gets_one_clear_line_and_code_2(build: Path, tmp_path: Path,
                                                  arguments: list[str], word: str) -> None:
    (tmp_path / "short").write_text("ab")
    result = run(build, *(str(tmp_path / "short") if a == "SHORT" else a for a in arguments))
    assert result.returncode == 2
    assert not result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
    assert word in result.stderr


def test_an_interrupt_ends_training_and_gives_the_cursor_back(build: Path, text: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([build / "bin" / "tiny_gpt", "--text", str(text), *SMALL], stdout=theirs,
                          stderr=subprocess.PIPE, env=ONE_THREAD) as process:
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
