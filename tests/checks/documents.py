# SPDX-License-Identifier: Apache-2.0
"""Documents name files that exist, and the locks that there are.

    documents.py ROOT

Links lead to a file, and a path in code quotes (`pager/page.h`) is the end of one. A bare file name, without
a folder, may be anybody's. The table of locks in threads.md has the ranks of lock_rank.h in their order.
"""

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

LEFT_OUT = {".git", ".venv", ".cache", "third_party", "node_modules"}
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
LOCKS = "src/pagoda/base/lock_rank.h"
TABLE = "docs/notes/threads.md"
NAMED = re.compile(r"`(?!\./)([\w.-]+(?:/[\w.-]+)+\.(?:cpp|h|py|md|sh|cmake|txt|json))`")


def files_of(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*")
            if path.is_file() and not any(part in LEFT_OUT or part.startswith("build")
                                          for part in path.relative_to(root).parts[:-1])]


def mistakes(root: Path, files: list[str]) -> Iterator[str]:
    ends = {"/" + name for name in files}
    for name in sorted(name for name in files if name.endswith(".md")):
        for number, line in enumerate((root / name).read_text().splitlines(), 1):
            for link in LINK.findall(line):
                if not ((root / name).parent / link).exists():
                    yield f"{name}:{number}: the link leads nowhere: {link}"
            for path in NAMED.findall(line):
                if not any(end.endswith("/" + path) for end in ends):
                    yield f"{name}:{number}: there is no file {path}"


def ranks(header: str) -> list[str]:
    body = re.search(r"enum class LockRank[^{]*\{(.*?)kCount", header, re.DOTALL)
    return re.findall(r"^\s*(\w+),", body.group(1), re.MULTILINE) if body else []


def rows(document: str) -> list[tuple[int, str]]:
    """The locks that the table names, each with its line."""
    found, in_table = [], False
    for number, line in enumerate(document.splitlines(), 1):
        if line.startswith("## "):
            in_table = line.startswith("## Locks")
        elif in_table and line.startswith("| `"):
            found += [(number, lock) for lock in re.findall(r"`(\w+)`", line.split("|")[1])]
    return found


def wrong_locks(root: Path) -> Iterator[str]:
    header, document = root / LOCKS, root / TABLE
    if not header.exists():
        return
    table = rows(document.read_text()) if document.exists() else []
    there = ranks(header.read_text())
    named = [lock for _, lock in table]
    yield from (f"{TABLE}: the table of locks has no row for {lock}" for lock in there if lock not in named)
    yield from (f"{TABLE}:{number}: {LOCKS} has no lock {lock}" for number, lock in table if lock not in there)
    known = [(number, there.index(lock)) for number, lock in table if lock in there]
    for (_, before), (number, place) in pairwise(known):
        if place <= before:
            yield f"{TABLE}:{number}: {LOCKS} has {there[place]} before {there[before]}"


def main() -> int:
    root = Path(sys.argv[1])
    files = files_of(root)
    found = [*mistakes(root, files), *wrong_locks(root)]
    print("\n".join(found) if found else f"{sum(n.endswith('.md') for n in files)} documents are right")
    if not any(name.endswith(".md") for name in files):
        print("no documents: is this the root?")
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
