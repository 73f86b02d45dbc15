# SPDX-License-Identifier: Apache-2.0
"""What Pagoda raises. TorchBind knows RuntimeError only, so the family travels in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_FAMILY = re.compile(r"^(?:.*?\n)*?.*?pagoda\.(UserError|EngineError): ", re.MULTILINE)
# A Ctrl-C while torch turns arguments into its own types.
_INTERRUPTED = "Python error details: KeyboardInterrupt"
_TORCH_TRAIL = re.compile(r"\nException raised from .*", re.DOTALL)


class Error(RuntimeError):
    """The root of everything Pagoda raises."""


class UserError(Error, ValueError):
    """Invalid argument or unsupported use; the message says what to change.

    >>> import pagoda
    >>> pagoda.Engine(device_bugdet="6GiB")
    Traceback (most recent call last):
        ...
    pagoda.errors.UserError: there is no key 'device_bugdet'; did you mean 'device_budget'?
    """


class EngineError(Error):
    """The engine or the machine under it failed: a disk error, a lost rank."""


def from_runtime_error(error: RuntimeError) -> RuntimeError:
    """The exception that the library threw, if it was one of ours; else the same."""
    text = str(error)
    found = _FAMILY.search(text)
    if found is None:
        return error
    message = _TORCH_TRAIL.sub("", text[found.end():])
    return (UserError if found.group(1) == "UserError" else EngineError)(message)


def sendable(text: str) -> str:
    """A text that the library takes, which is UTF-8. Names of files need not be: Python has a lone
    surrogate in place of a byte that it could not read.

    >>> sendable("a\\udcff")
    'a\\\\udcff'
    """
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def translated() -> Iterator[None]:
    """Around a call of the library: its errors come out as ours."""
    try:
        yield
    except RuntimeError as error:
        if _INTERRUPTED in str(error):
            raise KeyboardInterrupt from None
        ours = from_runtime_error(error)
        if ours is error:
            raise
        raise ours from None
