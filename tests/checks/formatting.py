#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when a C++ file is not as clang-format would write it, or lacks its licence line.

Usage: formatting.py ROOT [--fix]. The style is ROOT/.clang-format.
"""

import subprocess
import sys
from pathlib import Path

from sources import cpp_files

LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"


def clang_format() -> str:
    """The pinned one beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "clang-format"
    return str(beside) if beside.exists() else "clang-format"


def main() -> int:
    root = Path(sys.argv[1])
    files = list(cpp_files(root))
    unlicensed = [path for path in files if not path.read_text(encoding="utf-8").startswith(LICENCE)]
    for path in unlicensed:
        print(f"{path.relative_to(root)}:1: the first line is not {LICENCE.strip()!r}")
    mode = ["-i"] if "--fix" in sys.argv[2:] else ["--dry-run", "--Werror", "--ferror-limit=3"]
    formatted = subprocess.run([clang_format(), "--style=file", *mode, *map(str, files)], check=False)
    if formatted.returncode != 0:
        print("run 'tests/checks/formatting.py . --fix' with the Python of .venv")
    elif not unlicensed:
        print(f"{len(files)} files are formatted")
    return 1 if formatted.returncode != 0 or unlicensed or not files else 0


if __name__ == "__main__":
    sys.exit(main())
