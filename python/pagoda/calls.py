# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine that begin and end in calls of the library: what is between them is Python's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pagoda.endings import text_of
from pagoda.errors import EngineError, translated

if TYPE_CHECKING:
    from pagoda.library import Handle


class Calls:
    """Those of one engine; used by whoever calls it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @contextmanager
    def together(self, call: str, name: str, argument: object) -> Iterator[None]:
        """Around a collective call: all ranks are in it, with the same `argument`, called `name`, and
        what one of them raises, all do."""
        before = self._open()
        try:
            with translated():
                self._handle.begin_call(call, name, repr(str(argument)))
            yield
            with translated():
                self._handle.end_call("")
        except EngineError:  # the others hear it from the engine
            if self._has_begun(before):
                with suppress(RuntimeError):
                    self._handle.end_work()
            raise
        except BaseException as error:  # also a Ctrl-C that came as the call began or ended
            if self._has_begun(before):
                with translated():
                    self._handle.end_call(f"{call}(): {text_of(error)}")
            raise

    @contextmanager
    def working(self, call: str) -> Iterator[None]:
        """Around what this rank does by itself, under the name `call`: however long a disk takes, the
        ranks that wait for it do not take it for idle."""
        before = self._open()
        try:
            with translated():
                self._handle.begin_work(call)
            yield
        finally:
            if self._has_begun(before):
                with suppress(RuntimeError):  # it has been closed
                    self._handle.end_work()

    def _open(self) -> int:
        """How many this thread is in."""
        with translated():
            return self._handle.open_calls()

    def _has_begun(self, before: int) -> bool:
        """Whether it is in one more than `before`; of an engine that has been closed it is in none."""
        try:
            return self._open() > before
        except RuntimeError:
            return False
