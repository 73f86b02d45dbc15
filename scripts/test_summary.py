#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums up CTest runs: what passed, what failed with its output, what was skipped and why.

Usage: test_summary.py FOLDER, where FOLDER holds for each preset `PRESET.xml` (CTest's JUnit file),
`PRESET.log` (what CTest printed: only there it says how a test died) and for each label left out
`PRESET.LABEL` (the listing of `ctest -N`, then the reason as the last line). Exits 1 if a test failed
or none ran.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

# Of a failed test. A sanitizer's report is told by its beginning, pytest's by its end.
FIRST_LINES = 60
LAST_LINES = 60
# The thread sanitizer lets a case pass, and the program fail when it ends.
SANITIZER = re.compile(r"Sanitizer|runtime error:")


def skip_reason(output: str) -> str:
    """The text a GoogleTest or pytest case gave when it skipped itself."""
    match = re.search(r": Skipped\n(.*?)\n\n?\[  SKIPPED", output, re.S)
    if match:
        return " ".join(match.group(1).split())
    match = re.search(r"SKIPPED \[\d+\] [^:]+:\d+: (.*)", output)
    return match.group(1).strip() if match else "no reason was given"


def what_failed(output: str) -> str:
    """The output without GoogleTest cases that passed, and at most its first and last lines."""
    kept: list[str] = []
    case: list[str] = []
    for line in output.rstrip().splitlines():
        if line.startswith("[ RUN      ]"):
            kept += case
            case = [line]
        elif line.startswith(("[       OK ]", "[  SKIPPED ]")) and case:
            if any(SANITIZER.search(said) for said in case):
                kept += [*case, line]
            case = []
        elif case:
            case.append(line)
        elif not line.startswith("[-----"):
            kept.append(line)
    kept += case
    if len(kept) > FIRST_LINES + LAST_LINES:
        left_out = len(kept) - FIRST_LINES - LAST_LINES
        kept[FIRST_LINES:-LAST_LINES] = [f"… {left_out} lines: run the test by itself"]
    return "\n".join(kept)


def endings(log: Path) -> dict[str, str]:
    """How each failed test ended: a signal, a timeout, or just "Failed"."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return dict(re.findall(r"^\s+\d+ - (.+) \(([^()]+)\)", text, re.M))


def main() -> int:
    folder = Path(sys.argv[1])
    passed = 0
    failures: list[str] = []
    skipped: Counter[str] = Counter()
    for path in sorted(folder.glob("*.xml")):
        counts = Counter()
        ended = endings(path.with_suffix(".log"))
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            output = case.findtext("system-out") or ""
            status = case.get("status")
            if status == "run":
                counts["passed"] += 1
            elif case.find("skipped") is not None or status == "notrun":
                counts["skipped"] += 1
                skipped[skip_reason(output)] += 1
            else:
                counts["failed"] += 1
                name = case.get("name") or ""
                how = f"{ended.get(name, 'Failed')} after {float(case.get('time') or 0):.1f} s"
                failures.append(f"{path.stem}: {name} ({how})")
                print(f"--- FAILED {failures[-1]}\n{what_failed(output)}\n")
        print(f"{path.stem}: {counts['passed']} passed, {counts['failed']} failed")
        passed += counts["passed"]
    for listing in sorted(folder.iterdir()):
        preset, _, label = listing.name.partition(".")
        if label in ("xml", "log"):
            continue
        lines = listing.read_text().rstrip().splitlines()
        total = next((int(line.split(":")[1]) for line in lines if line.startswith("Total Tests")), 0)
        if total:
            skipped[f"{preset}, labelled {label}: {lines[-1]}"] += total
    for reason, count in skipped.items():
        print(f"skipped {count}: {reason}")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{passed} passed, {len(failures)} failed, {sum(skipped.values())} skipped")
    return 1 if failures or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
