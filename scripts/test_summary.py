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


def skip_reason(output: str) -> str:
    """The text a GoogleTest or pytest case gave when it skipped itself."""
    match = re.search(r": Skipped\n(.*?)\n\n?\[  SKIPPED", output, re.S)
    if match:
        return " ".join(match.group(1).split())
    match = re.search(r"SKIPPED \[\d+\] [^:]+:\d+: (.*)", output)
    return match.group(1).strip() if match else "no reason was given"


def endings(log: Path) -> dict[str, str]:
    """How each failed test ended: a signal, a timeout, or just "Failed"."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return dict(re.findall(r"^\s+\d+ - (.+) \(([^()]+)\)", text, re.M))


def main() -> int:
    folder = Path(sys.argv[1])
    passed = failed = 0
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
                print(f"--- FAILED {path.stem}: {name} ({how})\n{output.rstrip()}\n")
        print(f"{path.stem}: {counts['passed']} passed, {counts['failed']} failed")
        passed += counts["passed"]
        failed += counts["failed"]
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
    print(f"{passed} passed, {failed} failed, {sum(skipped.values())} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
