# SPDX-License-Identifier: Apache-2.0
"""Runs programs in processes of their own, a chunk of them in each, with an eye on the clock: a
crash or a hang is the program's that was running, and the rest goes on."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import drawing
import safetensors.torch  # noqa: F401  this and the next two are used later: once, before the forks
import torch._dynamo  # noqa: F401  by torch.optim
import transformers.core_model_loading  # noqa: F401  by save_pretrained
import trial
from program import Program
from torch import distributed


@dataclass
class Failure:
    seed: int
    program: Program
    what: str


@dataclass
class Result:
    failures: list[Failure] = field(default_factory=list)
    invalid: list[Failure] = field(default_factory=list)
    done: int = 0
    seconds: float = 0

    def text(self) -> str:
        """The last line; failures are told as they come."""
        seeds = ", ".join(str(one.seed) for one in self.failures)
        return (f"{self.done} programs, {len(self.failures)} failed"
                + (f" ({seeds})" if seeds else "")
                + (f", {len(self.invalid)} were none" if self.invalid else "")
                + f", {self.seconds:.1f} s, {self.done / max(self.seconds, 1e-3):.1f} a second")


class Runner:
    """How programs are run."""

    def __init__(self, ranks: int, without: set[str], limit: float, chunk: int) -> None:
        self.ranks = ranks
        self.without = without
        self.limit = limit
        self.chunk = chunk
        self.fixed: Program | None = None
        self.quiet = False
        self.wrong: str | None = None

    def program(self, seed: int) -> Program:
        if self.fixed is not None:
            return self.fixed
        return drawing.draw(seed, self.ranks, self.without)

    def command(self) -> str:
        out = "python tests/python/fuzz/run.py"
        if self.ranks > 1:
            out += f" --ranks {self.ranks}"
        if self.without:
            out += f" --without {','.join(sorted(self.without))}"
        return out

    def tell(self, kind: str, failure: Failure) -> None:
        print("\n".join(["", "=" * 78, f"{kind}: seed {failure.seed}", failure.program.text(),
                         "-" * 78, failure.what.rstrip(), "-" * 78,
                         f"again: {self.command()} --seed {failure.seed} -v"]), flush=True)

    def run(self, seeds: list[int], most_failures: int = 10, verbose: bool = False) -> Result:
        result = Result()
        started = time.monotonic()
        left = list(seeds)
        while left and len(result.failures) < most_failures:
            chunk, left = left[:self.chunk], left[self.chunk:]
            while chunk and len(result.failures) < most_failures:
                chunk = self.run_chunk(chunk, result, verbose)
        result.seconds = time.monotonic() - started
        return result

    def run_chunk(self, seeds: list[int], result: Result, verbose: bool) -> list[int]:
        """Returns what is left when a program has ended its process."""
        with tempfile.TemporaryDirectory(prefix="pagoda fuzz ") as directory:
            folder = Path(directory)
            sys.stdout.flush()
            children = []
            for rank in range(self.ranks):
                child = os.fork()
                if child == 0:
                    self.be_child(rank, seeds, folder)
                children.append(child)
            statuses = self.watch(children)
            return self.collect(seeds, folder, statuses, result, verbose)

    def watch(self, children: list[int]) -> list[int]:
        """Waits for all; when one has crashed the others get little time."""
        statuses: dict[int, int] = {}
        deadline: float | None = None
        while len(statuses) < len(children):
            for child in children:
                if child in statuses:
                    continue
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    statuses[child] = os.waitstatus_to_exitcode(status)
                    if statuses[child] != 0:
                        deadline = deadline or time.monotonic() + self.limit
            if deadline is not None and time.monotonic() > deadline:
                for child in children:
                    if child not in statuses:
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        return [statuses[child] for child in children]

    def be_child(self, rank: int, seeds: list[int], folder: Path) -> None:
        code = 1
        try:
            log = (folder / f"log {rank}").open("w")
            stacks = (folder / f"stacks {rank}").open("w")
            os.dup2(stacks.fileno(), 2)
            faulthandler.enable(stacks)
            gather = self.meet(rank, folder) if self.ranks > 1 else None
            for position, seed in enumerate(seeds):
                print(json.dumps({"at": position}), file=log, flush=True)
                faulthandler.dump_traceback_later(self.limit, exit=True, file=stacks)
                kind, what = "", ""
                try:
                    wrong = self.wrong if self.wrong == "rate" or seed == 2 else None
                    what = trial.run(self.program(seed), rank, gather, wrong)
                    kind = "failed" if what else ""
                except trial.Invalid as error:
                    kind, what = "invalid", str(error)
                except Exception:
                    kind, what = "failed", traceback.format_exc()
                print(json.dumps({"at": position, "kind": kind, "what": what}), file=log,
                      flush=True)
                # After a failure the ranks may have parted.
                parted = gather is not None and "failed" in gather(kind)
                faulthandler.cancel_dump_traceback_later()
                if parted:
                    break
            code = 0
        except BaseException:
            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def meet(self, rank: int, folder: Path) -> Any:
        """torch.distributed over Gloo, for the engines and to gather what came out."""
        store = distributed.FileStore(str(folder / "store"), self.ranks)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=self.ranks,
                                       timeout=datetime.timedelta(seconds=2 * self.limit))

        def gather(value: Any) -> list[Any]:
            out: list[Any] = [None] * self.ranks
            distributed.all_gather_object(out, value)
            return out

        return gather

    def collect(self, seeds: list[int], folder: Path, statuses: list[int], result: Result,
                verbose: bool) -> list[int]:
        said: list[dict[int, dict[str, Any]]] = []
        begun: list[set[int]] = []
        for rank in range(self.ranks):
            file = folder / f"log {rank}"
            lines = [json.loads(line) for line in file.read_text().splitlines()
                     ] if file.exists() else []
            said.append({line["at"]: line for line in lines if "kind" in line})
            begun.append({line["at"] for line in lines})
        for at, seed in enumerate(seeds):
            if not any(at in one for one in begun):
                return seeds[at:]  # not begun: once more
            kinds = {one[at]["kind"] for one in said if at in one}
            texts = [f"rank {rank}:\n{one[at]['what']}" if self.ranks > 1 else one[at]["what"]
                     for rank, one in enumerate(said) if at in one and one[at]["kind"]]
            for rank in range(self.ranks):
                if at not in said[rank]:
                    stacks = folder / f"stacks {rank}"
                    found = stacks.read_text() if stacks.exists() else ""
                    texts.append(f"rank {rank} ended with {statuses[rank]} "
                                 f"(1: a hang, negative: a signal)\n{found[-6000:]}")
                    kinds.add("failed")
            result.done += 1
            if verbose:
                print(f"seed {seed}: {', '.join(sorted(kinds - {''})) or 'ok'}", flush=True)
            failure = Failure(seed, self.program(seed), "\n".join(texts))
            if "failed" in kinds:
                result.failures.append(failure)
                if not self.quiet:
                    self.tell("FAILED", failure)
                if self.ranks > 1:
                    return seeds[at + 1:]
            elif "invalid" in kinds:
                result.invalid.append(failure)
                if not self.quiet:
                    self.tell("INVALID", failure)
        return []
