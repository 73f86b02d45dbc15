# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a wait for another rank.

Python runs the handler of a signal between two of its own instructions. A main thread that waits inside
the library, for a rank that may never come, reaches none: Ctrl-C would be heard when the wait is over. So a
thread looks on. Python's own handler in C writes the number of each signal to its socket
(`signal.set_wakeup_fd`). If the main thread is still at the same instruction GRACE seconds after a SIGINT, and
an engine waits for other ranks, that engine fails: the wait ends, the other ranks hear why, and Python
raises KeyboardInterrupt. A call that ends by itself before that leaves the engine as it was.

Only where SIGINT has Python's own handler, which is known to raise. Nothing is done where somebody else
(asyncio) has the wakeup descriptor, or takes it later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch

GRACE = 2.0
_LOOK = 0.05

_socket: socket.socket | None = None  # what the handler writes to; it must not be collected


def listen(waits: Callable[[], bool], fail: Callable[[], None]) -> None:
    """From now on a Ctrl-C that the main thread does not hear calls `fail`, on another thread, if
    `waits()`: for engines that are open, and for this process's wait for other ranks to connect.
    Does nothing but once, and on the main thread."""
    global _socket
    if _socket is not None or threading.current_thread() is not threading.main_thread():
        return
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody else's
        signal.set_wakeup_fd(before)
        return
    _socket = writes
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_run, args=(reads, waits, fail), name="pagoda/interrupts",
                     daemon=True).start()


def _forget() -> None:
    """A child's signals are not the parent's, and the thread is not there."""
    global _socket
    _socket = None
    with contextlib.suppress(ValueError):  # its only thread is not the main one
        signal.set_wakeup_fd(-1)


def _place(thread: int) -> tuple[FrameType | None, int]:
    """Which instruction a thread is at. A frame that is held is no other one's."""
    frame = sys._current_frames().get(thread)
    return frame, frame.f_lasti if frame is not None else -1


def _raises() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _run(signals: socket.socket, waits: Callable[[], bool], fail: Callable[[], None]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while True:
        if signal.SIGINT not in signals.recv(64) or not _raises():
            continue
        came, at = time.monotonic(), _place(main)
        while _place(main) == at:
            time.sleep(_LOOK)
            if time.monotonic() - came > GRACE and _place(main) == at:
                torch.ops.pagoda.interrupt_joins()
                if waits():
                    fail()
                    break
