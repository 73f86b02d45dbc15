# SPDX-License-Identifier: Apache-2.0
"""Random training programs, over an engine and over plain tensors.

    run.py --seed 17 -v            one program, which is printed
    run.py --seeds 0:200           many
    run.py --seeds 0:200 --ranks 2
    run.py --seeds 0:5000 --jobs 14 --time 540    by 14 workers, for nine minutes at most
    run.py --seed 17 --minimise    tries to make a failing program smaller
    run.py --program FILE          one that was kept by --minimise
    run.py --kept                  those of kept.py
    run.py --without late_reads,…  leaves habits out (--features lists them)
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "python"))

import chunks
import jobs
import program as programs
import torch


def run_kept(without: set[str], limit: float) -> int:
    """Those of kept.py whose feature is not left out."""
    import kept
    failed = 0
    for name, (program, times, feature) in kept.KEPT.items():
        if feature in without:
            print(f"left out: {name} ({feature})")
            continue
        runner = chunks.Runner(program.ranks, set(), limit, times)
        runner.fixed = program
        failed += bool(runner.run([program.seed] * times, 1).failures)
        print(f"done: {name}", flush=True)
    print(f"{len(kept.KEPT)} programs, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--without", default="", help="features, separated by commas")
    parser.add_argument("--only", default="", help="leaves out all other features")
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("--program", type=Path)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--chunk", type=int, default=10, help="programs in one process")
    parser.add_argument("--limit", type=float, default=120.0,
                        help="seconds after which a program hangs")
    parser.add_argument("--keep-going", type=int, default=10, help="failures until it stops")
    parser.add_argument("--jobs", type=int, default=1, help="workers, which share the seeds")
    parser.add_argument("--time", type=float, default=math.inf, help="seconds in all, with --jobs")
    parser.add_argument("--times", type=int, default=1, help="for what fails now and then")
    parser.add_argument("--wrong", choices=["rate", "crash", "hang"],
                        help="does something wrong, to see that it is found")
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.features:
        for name, meaning in programs.FEATURES.items():
            print(f"{name:24} {meaning}")
        return 0
    without = {name for name in arguments.without.split(",") if name}
    if arguments.only:
        without = set(programs.FEATURES) - set(arguments.only.split(","))
    if unknown := without - set(programs.FEATURES):
        parser.error(f"there is no feature {', '.join(sorted(unknown))}")
    if arguments.kept:
        return run_kept(without, arguments.limit)
    one = arguments.program is not None or arguments.seed is not None
    if arguments.seed is not None:
        seeds = [arguments.seed]
    elif arguments.program is not None:
        seeds = [0]
    else:
        first, end = arguments.seeds.split(":")
        seeds = list(range(int(first), int(end)))
    seeds = [seed for seed in seeds for _ in range(arguments.times)]
    runner = chunks.Runner(arguments.ranks, without, arguments.limit, arguments.chunk)
    runner.wrong = arguments.wrong
    if arguments.program is not None:
        runner.fixed = programs.Program.from_json(arguments.program.read_text())
        runner.ranks = runner.fixed.ranks
    if one and (arguments.verbose or runner.fixed):
        print(runner.program(seeds[0]).text(), flush=True)
    if arguments.jobs > 1 or arguments.time < math.inf:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        result = jobs.Jobs(runner, arguments.jobs, arguments.time).run(seeds, arguments.keep_going)
        if result.done < len(seeds):
            print(f"{len(seeds) - result.done} of {len(seeds)} programs were not run")
    else:
        result = runner.run(seeds, arguments.keep_going, arguments.verbose)
    print(result.text())
    if arguments.minimise and result.failures:
        import minimising
        smaller = minimising.minimise(runner, result.failures[0], arguments.times)
        file = Path(f"/tmp/fuzz-{smaller.seed}-{smaller.ranks}.json")
        file.write_text(smaller.to_json())
        print(f"kept as {file}: run.py --program {file}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
