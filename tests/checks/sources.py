# SPDX-License-Identifier: Apache-2.0
"""The C++ files of the project: what a check looks at."""

from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "cli", "bench", "tests", "examples", "third_party")
SUFFIXES = (".cpp", ".h", ".cu", ".cuh")


def cpp_files(root: Path) -> Iterator[Path]:
    """Every C++ file under the project's own folders, in a fixed order."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path
