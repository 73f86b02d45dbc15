# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor that autograd can save, and modules and functions known to save them in odd
ways. Each is a program for saved_trial.py."""

from __future__ import annotations

import saved_aliases
import saved_autograd
import saved_case
import saved_functions
import saved_kinds

PARTS = (saved_aliases, saved_functions, saved_kinds, saved_autograd)
CASES = saved_case.CASES
