# SPDX-License-Identifier: Apache-2.0
"""Many workers over one range of seeds, and one report of what they have found."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from chunks import Failure, Result, Runner
from program import Program

# How long workers may be at their last chunk after the time has run out.
GRACE = 20.0


class Jobs:
    """Workers take chunks of seeds until none are left, too many have failed, or time is up."""

    def __init__(self, runner: Runner, count: int, seconds: float) -> None:
        self.runner = runner
        self.count = count
        self.seconds = seconds

    def run(self, seeds: list[int], most_failures: int) -> Result:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pagoda fuzz ") as directory:
            folder = Path(directory)
            (folder / "next").write_text("0")
            sys.stdout.flush()
            workers = []
            for number in range(self.count):
                worker = os.fork()
                if worker == 0:
                    self.be_worker(number, seeds, folder, started)
                workers.append(worker)
            result = self.watch(workers, folder, len(seeds), most_failures, started)
        result.seconds = time.monotonic() - started
        return result

    def take(self, folder: Path, seeds: list[int]) -> list[int]:
        """The next chunk."""
        with (folder / "next").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            at = int(file.read())
            chunk = seeds[at:at + self.runner.chunk]
            file.seek(0)
            file.write(str(at + len(chunk)))
        return chunk

    def be_worker(self, number: int, seeds: list[int], folder: Path, started: float) -> None:
        code = 1
        try:
            os.setpgid(0, 0)  # its children end with it
            self.runner.quiet = True
            with (folder / f"found {number}").open("w") as out:
                while time.monotonic() - started < self.seconds and not (folder / "stop").exists():
                    chunk = self.take(folder, seeds)
                    if not chunk:
                        break
                    found = self.runner.run(chunk, len(chunk) + 1)
                    print(json.dumps(dataclasses.asdict(found)), file=out, flush=True)
            code = 0
        finally:
            os._exit(code)

    def watch(self, workers: list[int], folder: Path, total: int, most_failures: int,
              started: float) -> Result:
        alive = set(workers)
        result = Result()
        read = [0] * len(workers)  # characters of each one's findings
        said = started
        while alive:
            for worker in list(alive):
                if os.waitpid(worker, os.WNOHANG)[0]:
                    alive.discard(worker)
            for number in range(len(workers)):
                read[number] = self.collect(folder / f"found {number}", read[number], result)
            if len(result.failures) >= most_failures:
                (folder / "stop").touch()
            now = time.monotonic()
            if now - started > self.seconds + GRACE:
                for worker in alive:
                    os.killpg(worker, signal.SIGKILL)
            if now - said > 30:
                said = now
                print(f"{result.done} of {total} programs, {len(result.failures)} failed, "
                      f"{result.done / (now - started):.1f} a second", flush=True)
            time.sleep(0.1)
        return result

    def collect(self, file: Path, start: int, result: Result) -> int:
        """What a worker has found since; returns where its next line begins."""
        text = file.read_text()[start:] if file.exists() else ""
        whole = text[:text.rfind("\n") + 1]
        for line in whole.splitlines():
            found = json.loads(line)
            result.done += found["done"]
            for kind, there, word in (("failures", result.failures, "FAILED"),
                                      ("invalid", result.invalid, "INVALID")):
                for one in found[kind]:
                    program = Program.from_json(json.dumps(one["program"]))
                    there.append(Failure(one["seed"], program, one["what"]))
                    self.runner.tell(word, there[-1])
        return start + len(whole)
