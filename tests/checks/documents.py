# SPDX-License-Identifier: Apache-2.0
"""Documents name files that exist.

    documents.py ROOT

Links lead to a file, and a path in code quotes (`pager/page.h`) is the end of one. A bare file name, without
a folder, may be anybody's.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {".git", ".venv", ".cache", "third_party", "node_modules"}
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
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


def main() -> int:
    root = Path(sys.argv[1])
    files = files_of(root)
    found = list(mistakes(root, files))
    print("\n".join(found) if found else f"{sum(n.endswith('.md') for n in files)} documents are right")
    if not any(name.endswith(".md") for name in files):
        print("no documents: is this the root?")
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
