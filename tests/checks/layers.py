#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when an #include points against the order of the layers, or torch is included where it may
not be.

Usage: layers.py ROOT. The table below is the architecture: a folder of src/pagoda/ and the folders
its files may include, besides its own.
"""

import re
import sys
from pathlib import Path

from sources import cpp_files

BELOW_ENGINE = [
    "base", "device", "io", "kernels", "plan", "comm", "pager", "prefetch", "optim", "checkpoint",
]
ALLOWED: dict[str, list[str]] = {
    "base": [],
    "device": ["base"],
    "io": ["base"],
    "kernels": ["base"],
    "plan": ["base"],
    "comm": ["base", "device"],
    "pager": ["base", "device", "io", "comm"],
    "prefetch": ["base", "pager"],
    "optim": ["base", "kernels", "pager"],
    "checkpoint": ["base", "io", "pager", "optim"],
    "engine": BELOW_ENGINE,
    "torch": [*BELOW_ENGINE, "engine"],
    "models": ["base", "torch"],
}
TORCH_LAYERS = ("torch", "models")
# Headers that only their own folder includes, and its unit tests: what they guard has one owner.
PRIVATE = {
    "pager": ["bindings", "device_copies", "fetcher", "dead_pages", "holds", "home_reads", "homes",
              "page_record", "page_table", "room", "thread_pins", "touches", "versions"],
    "optim": ["update_record", "update_slot"],
}
# Where torch may be included besides those two layers: code that stands on top of them.
ABOVE_TORCH = ("tests/", "examples/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
# Torch's own headers name their folders like ours do: "pagoda/torch/…" is not one of them.


def private_header(header: str) -> str | None:
    """The folder that keeps this header to itself."""
    parts = header.removesuffix(".h").split("/")
    private = len(parts) == 3 and parts[0] == "pagoda" and parts[2] in PRIVATE.get(parts[1], [])
    return parts[1] if private else None


def problems_of(root: Path, path: Path) -> list[str]:
    name = path.relative_to(root).as_posix()
    parts = name.split("/")
    layer = parts[2] if name.startswith("src/pagoda/") and len(parts) > 3 else None
    found = []
    if layer is not None and layer not in ALLOWED:
        return [f"{name}: src/pagoda/{layer}/ is not a layer of the design"]
    text = path.read_text(encoding="utf-8")
    for match in INCLUDE.finditer(text):
        header = match.group(2)
        place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        if TORCH_HEADER.match(header):
            if layer not in TORCH_LAYERS and not name.startswith(ABOVE_TORCH):
                found.append(f"{place}: only src/pagoda/torch/ and src/pagoda/models/ include torch "
                             f"({header})")
        elif (private := private_header(header)) is not None and not name.startswith(
                (f"src/pagoda/{private}/", f"tests/unit/{private}/")):
            found.append(f"{place}: {header} is private to src/pagoda/{private}/")
        elif layer is not None and header.startswith("pagoda/"):
            target = header.split("/")[1]
            if target != layer and target not in ALLOWED[layer]:
                found.append(f"{place}: {layer}/ may not include {target}/ ({header}); it may "
                             f"include {', '.join(ALLOWED[layer]) or 'nothing'}")
        elif layer is not None and match.group(1) == '"':
            found.append(f'{place}: write "{header}" as a path from src/, "pagoda/…"')
    return found


def main() -> int:
    root = Path(sys.argv[1])
    files = list(cpp_files(root))
    problems = [problem for path in files for problem in problems_of(root, path)]
    print("\n".join(problems) if problems else f"{len(files)} files keep the order of the layers")
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
