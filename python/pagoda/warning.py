# SPDX-License-Identifier: Apache-2.0
"""Warnings are attributed to the line of the user's script that led to them."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_INSIDE = tuple(os.path.join(os.path.dirname(os.path.abspath(path)), "")
                for path in (__file__, torch.__file__))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """At the first frame that is neither Pagoda's nor torch's."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)
