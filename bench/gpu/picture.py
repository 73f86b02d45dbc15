#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One training step as a picture.

    bench/gpu/picture.py TRACE.json[.gz] OUT.svg

TRACE is what the engine's `trace` writes, or a row `c16-trace` of run.py, which has the device's kernels
and copies, too. Shown is the last whole step, from the end of one step() to the end of the next: a
step's updates run during its own backward and the next one's forward. A bar is as high as the share of
its time (a pixel's, or more) in which something ran.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, LANE, GAP, TOP = 1200, 190, 20, 34, 12, 58
COLUMNS = WIDTH - LEFT - RIGHT

# Lane, kind, colour. The kinds of a lane lie upon each other, the first at the bottom.
KINDS = [
    ("GPU", "matrix products", "#1b6e3c"), ("GPU", "attention", "#74b06f"),
    ("GPU", "other kernels", "#b8b04f"),
    ("copies to the device", "pages and activations in", "#2f6db3"),
    ("copies to the host", "gradients and activations out", "#7a4fa3"),
    ("launching threads", "operators, forward", "#5f6b7a"),
    ("launching threads", "operators, backward's thread", "#a9b4c2"),
    ("launching threads", "waiting for a page", "#d1495b"),
    ("launching threads", "waiting for an update", "#e58a2b"),
    ("gradients on the host", "added up", "#a0694b"),
    ("updates on the host", "optimizer", "#c2412d"),
    ("disk", "hashing and checking", "#3a9aa0"),
]
COLOUR = {kind: colour for _, kind, colour in KINDS}
_PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "xmma")
_ATTENTION = ("flash", "fmha", "attention", "sdpa")

Span = tuple[float, float]


def kind_of(event: dict[str, Any], main: int) -> str | None:
    """What a slice is in the picture; None: it is not shown. `main`: the thread of step()."""
    category, name = event.get("cat"), event["name"].lower()
    if category == "operator":
        return "operators, forward" if event["tid"] == main else "operators, backward's thread"
    if category == "kernel":
        if any(word in name for word in _ATTENTION):
            return "attention"
        return "matrix products" if any(word in name for word in _PRODUCTS) else "other kernels"
    if category == "gpu_memcpy":
        return {"htod": "pages and activations in", "dtoh": "gradients and activations out"}.get(
            next((way for way in ("htod", "dtoh") if way in name), ""))
    if category == "pager":
        return {"wait for page": "waiting for a page", "wait for copy": "waiting for a page",
                "wait for update": "waiting for an update"}.get(name)
    if category == "device":  # where the engine can tell when its copies ran
        track = event.get("track", "")
        return ("pages and activations in" if track.startswith("pages in") else
                "gradients and activations out" if track.endswith("out") else None)
    return {"gradients": "added up", "optim": "optimizer",
            "io": "hashing and checking"}.get(category or "")


def read(path: Path) -> list[dict[str, Any]]:
    """The slices, each with the name of its track."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] == "thread_name"}
    return [{**e, "track": names.get((e["pid"], e["tid"]), "")} for e in events if e["ph"] == "X"]


def last_step(events: list[dict[str, Any]]) -> Span:
    """From the end of one step() to the end of the next, in microseconds."""
    ends = sorted(e["ts"] + e["dur"] for e in events if e.get("cat") == "engine"
                  and e["name"] == "step")
    if not ends:
        sys.exit("the trace holds no whole step")
    return (ends[-2] if len(ends) > 1 else 0.0), ends[-1]


def union(spans: Iterable[Span]) -> list[Span]:
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def shares(spans: list[Span], step: Span) -> list[float]:
    """Of each column's time, how much the spans cover."""
    out = [0.0] * COLUMNS
    wide = (step[1] - step[0]) / COLUMNS
    for begin, end in spans:
        begin, end = (begin - step[0]) / wide, (end - step[0]) / wide
        for column in range(max(0, int(begin)), min(COLUMNS, int(end) + 1)):
            out[column] += max(0.0, min(end, column + 1) - max(begin, column))
    return out


def bars(by_kind: dict[str, list[float]], top: float) -> list[str]:
    """A lane's kinds upon each other; neighbours of one height are one bar."""
    out = []
    height = [[0.0] * COLUMNS for _ in by_kind]
    for column in range(COLUMNS):
        values = [values[column] for values in by_kind.values()]
        scale = 1 / max(1.0, sum(values))  # several threads at once
        for row, value in enumerate(values):
            height[row][column] = round(value * scale * LANE)
    below = [0.0] * COLUMNS
    for heights, kind in zip(height, by_kind, strict=True):
        path, begin = "", 0
        for column in range(1, COLUMNS + 1):
            same = column < COLUMNS and (heights[column], below[column]) == (heights[begin],
                                                                            below[begin])
            if same:
                continue
            if heights[begin]:
                y, wide = top + LANE - below[begin], column - begin
                path += f"M{LEFT + begin} {y:g}h{wide}v{-heights[begin]:g}h{-wide}z"
            begin = column
        out.append(f'<path fill="{COLOUR[kind]}" d="{path}"/>')
        below = [a + b for a, b in zip(below, heights, strict=True)]
    return out


def tick(milliseconds: float) -> float:
    """A round distance between the marks of the axis: eight to twenty of them."""
    unit = 10.0 ** -3
    while True:
        for factor in (1, 2, 5):
            if milliseconds / (unit * factor) <= 20:
                return unit * factor
        unit *= 10


def draw(events: list[dict[str, Any]]) -> str:
    step = last_step(events)
    main = next(e["tid"] for e in events if e.get("cat") == "engine" and e["name"] == "step")
    spans: dict[str, list[Span]] = {}
    for event in events:
        begin, end = max(event["ts"], step[0]), min(event["ts"] + event["dur"], step[1])
        kind = kind_of(event, main)
        if kind is not None and begin < end:
            spans.setdefault(kind, []).append((begin, end))
    lanes: dict[str, dict[str, list[Span]]] = {}
    for lane, kind, _ in KINDS:
        if kind in spans:
            lanes.setdefault(lane, {})[kind] = union(spans[kind])
    length = (step[1] - step[0]) / 1e3
    bottom = TOP + len(lanes) * (LANE + GAP)
    out = []
    distance = tick(length)
    for number in range(int(length / distance) + 1):
        x = LEFT + number * distance / length * COLUMNS
        out.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
                   f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
                   f'{number * distance:g}</text>')
    out.append(f'<text x="{LEFT - 12}" y="{bottom + 16}" text-anchor="end">ms</text>')
    for number, (lane, kinds) in enumerate(lanes.items()):
        top = TOP + number * (LANE + GAP)
        busy = sum(end - begin for begin, end in union(s for all in kinds.values() for s in all))
        share = busy / (step[1] - step[0]) * 100
        out.append(f'<rect x="{LEFT}" y="{top}" width="{COLUMNS}" height="{LANE}" fill="#f4f4f4"/>'
                   f'<text x="{LEFT - 12}" y="{top + 15}" text-anchor="end">{escape(lane)}</text>'
                   f'<text x="{LEFT - 12}" y="{top + 29}" text-anchor="end" fill="#666">'
                   f'{share:.{0 if share >= 1 else 1}f} % of the time</text>')
        out += bars({kind: shares(covered, step) for kind, covered in kinds.items()}, top)
    x, y = float(LEFT), 18
    for kind in (kind for kinds in lanes.values() for kind in kinds):
        wide = 28 + 7.2 * len(kind)
        if x + wide > WIDTH - RIGHT:
            x, y = float(LEFT), y + 18
        out.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" fill="{COLOUR[kind]}"/>'
                   f'<text x="{x + 16:.0f}" y="{y}">{escape(kind)}</text>')
        x += wide
    high = bottom + 26
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" '
            f'height="{high}" font-family="sans-serif" font-size="12" fill="#222">\n'
            f'<rect width="{WIDTH}" height="{high}" fill="#fff"/>\n' + "\n".join(out) + "\n</svg>\n")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(draw(read(Path(sys.argv[1]))), encoding="utf-8")


if __name__ == "__main__":
    main()
