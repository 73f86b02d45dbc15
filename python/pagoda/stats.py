# SPDX-License-Identifier: Apache-2.0
"""What an engine has done and holds."""

from __future__ import annotations

import html
from typing import Any


def byte_size(size: int) -> str:
    """As the library writes it: in the largest binary unit, with two decimals where it is not whole.

    >>> byte_size(1000), byte_size(64 * 1024), byte_size(1536 * 1024**2)
    ('1000 B', '64 KiB', '1.50 GiB')
    """
    prefix = min(max(size.bit_length() - 1, 0) // 10, 5)
    if prefix == 0:
        return f"{size} B"
    unit = 1024**prefix
    number = str(size // unit) if size % unit == 0 else f"{size / unit:.2f}"
    return f"{number} {'KMGTP'[prefix - 1]}iB"


def _tree(flat: dict[str, int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = out
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return out


def _rows(tree: dict[str, Any], depth: int = 0) -> str:
    rows = ""
    for name, value in tree.items():
        label = html.escape(name.replace("_", " "))
        pad = f"padding-left:{1 + depth}em;text-align:left"
        if isinstance(value, dict):
            rows += f'<tr><th style="{pad}" colspan="2">{label}</th></tr>' + _rows(value, depth + 1)
        else:
            rows += f'<tr><td style="{pad}">{label}</td><td>{value:,}</td></tr>'
    return rows


class Stats(dict[str, Any]):
    """A dict of dicts of whole numbers (bytes, counts, nanoseconds); a table where it is shown.

    >>> import pagoda
    >>> stats = pagoda.Engine(device="cpu", device_budget="1MiB").stats()
    >>> stats["steps"], stats["tiers"]["device"]["budget"]
    (0, 1048576)
    """

    def __init__(self, flat: dict[str, int], table: str) -> None:
        super().__init__(_tree(flat))
        for tier in self["tiers"].values():
            tier.setdefault("holders", {})
        self._table = table

    def __str__(self) -> str:
        return self._table

    def _repr_html_(self) -> str:
        return f"<table>{_rows(self)}</table>"
