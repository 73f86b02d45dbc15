# SPDX-License-Identifier: Apache-2.0
"""An uncaught exception on one rank is told to the others before the process ends: they raise it
with its cause at once, instead of waiting for a rank that never comes.

Only what ends the process, or the thread that trains, is told. In an interactive interpreter an
exception ends a cell, not the process: nothing is told there, the engine lives, and so do the
others, for as long as `timeout` lets them wait. A child of multiprocessing, as torch's spawn starts
them, calls no hook of these when its function raises, but what is to be done at its end.
`os._exit` and signals that kill run no Python: the others see the connection break.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pagoda import interruptions
from pagoda.errors import sendable

if TYPE_CHECKING:
    from pagoda.library import Handle

_LONGEST = 1000


def text_of(error: BaseException) -> str:
    """As the last line of a traceback has it, and not much longer."""
    try:
        text = sendable(str(error))
    except Exception:  # of a __str__ of the user's: the others wait for some text
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def is_failure(error: BaseException | None) -> bool:
    """Whether whoever ends with `error` has failed: `sys.exit(0)` is a good end."""
    if isinstance(error, SystemExit):
        return error.code is not None and error.code != 0
    return error is not None and not isinstance(error, GeneratorExit)


def is_interactive() -> bool:
    """Whether an uncaught exception leaves the process where it is."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or bool(
        os.environ.get("PYTHONINSPECT"))


class Told:
    """One engine, for as long as it is open, and the thread that trains with it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._alone = handle.world_size() == 1
        self.thread = threading.get_ident()
        self.closing = False

    def fail(self, error: BaseException) -> None:
        """The other ranks raise this error. After the first one it does nothing, nor where there are
        none: another thread may train on."""
        if not self._alone:
            self._handle.fail(text_of(error))

    def end(self) -> None:
        """The process ends here: returns when the others have heard of it."""
        self._handle.close(False)

    def waits(self) -> bool:
        """Whether this rank waits for others."""
        return self._handle.waited_for_ranks() > 0


_open: weakref.WeakSet[Told] = weakref.WeakSet()
_installed = False
_child: int | None = None
_exiting = False


class Ending:
    """How one engine ends: what is told of weights that it takes along, and what is undone
    (`on_release`). Holds no engine."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._process = os.getpid()
        self._saved_at: int | None = None
        self.on_release: list[Callable[[], Any]] = []

    def undo(self) -> None:
        """The model is released, or goes with its engine."""
        while True:
            try:
                call = self.on_release.pop()
            except IndexError:  # another thread that is in close() may have taken the last one
                return
            call()

    def _steps(self) -> int | None:
        try:
            return self._handle.stats()["steps"]
        except RuntimeError:
            return None

    def saved(self) -> None:
        """The weights of the attached model are in files, up to date until the next step."""
        self._saved_at = self._steps()

    def end(self) -> None:
        """Parameters that are still pages become plain tensors if they fit into memory; if not, and
        they were not saved either, a warning names them. An interpreter that exits needs neither."""
        self.undo()
        if _exiting or os.getpid() != self._process:  # a fork's locks are as they were
            self._handle.close(False)
            return
        steps = self._steps()
        lost = self._handle.close(True)
        if lost and (self._saved_at is None or self._saved_at != steps):
            warnings.warn(lost, RuntimeWarning, stacklevel=3)  # whoever calls close(), or drops the engine


def listen_for_interrupts() -> None:
    """From now on Ctrl-C ends waits for other ranks."""
    interruptions.listen(lambda: any(told.waits() for told in list(_open)), _interrupt)


def _interrupt() -> None:
    for told in list(_open):
        if told.waits():
            told.fail(KeyboardInterrupt())


def watch(handle: Handle) -> Told:
    """From now on the other ranks hear of what ends this one, while the result is kept."""
    global _child
    _install()
    if multiprocessing.parent_process() is not None and _child != os.getpid():
        _child = os.getpid()  # a fork has forgotten what its parent has registered
        multiprocessing.util.Finalize(None, _child_ends, (id(sys.exc_info()[1]),), exitpriority=0)
    told = Told(handle)
    _open.add(told)
    return told


def _child_ends(before: int) -> None:
    """multiprocessing calls it while what the child's function has raised is on its way out; torch's
    spawn writes that to a file, and exits. `before`: the id of what was handled when it was
    registered, in which the child may have been forked."""
    error = sys.exc_info()[1]
    if id(error) == before:
        return
    if isinstance(error, SystemExit) and is_failure(error) and error.__context__ is not None:
        error = error.__context__
    if error is not None and is_failure(error):
        for told in list(_open):
            told.fail(error)
            told.end()  # a forked child runs nothing else


def _tell(error: BaseException | None, thread: int | None = None) -> None:
    if error is None or not is_failure(error) or is_interactive():
        return
    for told in list(_open):
        # Once another thread has called close(), what ends this one is mostly that.
        if thread is None or (told.thread == thread and not told.closing):
            told.fail(error)


def _install() -> None:
    """Hooks that tell, then do what the ones before them did."""
    global _installed
    if _installed:
        return
    _installed = True
    before: Callable[..., Any] = sys.excepthook
    before_in_threads: Callable[..., Any] = threading.excepthook

    def excepthook(kind: type[BaseException], error: BaseException,
                   trace: TracebackType | None) -> None:
        _tell(error)
        before(kind, error, trace)

    def thread_excepthook(args: threading.ExceptHookArgs) -> None:
        # Another thread that dies does not end the training.
        if args.thread is not None:
            _tell(args.exc_value, args.thread.ident)
        before_in_threads(args)

    sys.excepthook = excepthook
    threading.excepthook = thread_excepthook
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Where somebody has put a hook in place of ours: the interpreter remembers what ended it."""
    global _exiting
    _exiting = True
    _tell(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
    _wait_for_threads_not_joined()


def _wait_for_threads_not_joined(limit: float = 5) -> None:
    """Python 3.11 and 3.12 take a thread for ended once Ctrl-C has interrupted its join(), and do not
    wait for it at exit. If that thread is in torch or in an engine then, it comes back to an
    interpreter that is gone, and the process aborts. It has got its error from close(): it ends soon."""
    until = time.monotonic() + limit

    def runs() -> bool:
        others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
        return any(thread.ident is not None and not thread.daemon and not thread.is_alive()
                   for thread in others)

    while runs() and time.monotonic() < until:
        time.sleep(0.001)
