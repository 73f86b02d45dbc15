# SPDX-License-Identifier: Apache-2.0
"""Scenarios of rank_scenarios.py in which a rank is killed, or stopped, while ranks join each other in
`pagoda.Engine()`. Where it has got to is seen in what it says to the store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from rank_scenario import (
    RANK,
    SCENARIOS,
    error_of,
    move_store_to_rank_0,
    scenario,
    started,
    train,
)
from torch import distributed

LONG = 150.0
"""A join_timeout that nobody shall wait for: the tests end their ranks before that."""
SHORT = 8.0
"""A join_timeout for ranks of which only it can tell."""

WORDS = {
    "before_coming": b"/board/group/0/calls/here/1",
    "in_calls": b"/0/group/0/calls/", "in_pulls": b"/0/group/3/pulls/",
    "in_agreement": b"/board/engine 0/1"}
"""Of rank 1's first request to the store at some points of its join: when it says that it has come, when
Gloo connects its first and its last group, and its first heartbeat."""


def before_request(words: bytes, call: Callable[[], None]) -> None:
    """What this process says to the store of its engines from now on goes through a thread, which makes
    the call before it passes on the first request that has `words`."""
    port = int(os.environ["MASTER_PORT"])
    server = socket.create_server(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    seen = threading.Lock()

    def requests(source: socket.socket, to: socket.socket) -> None:
        before = b""
        with contextlib.suppress(OSError):  # of a store that was killed
            while data := source.recv(1 << 16):
                heard = before + data
                if words in heard and seen.acquire(blocking=False):
                    # What was said before is passed on, here and on other connections.
                    first = max(0, heard.index(words) - len(before))
                    to.sendall(data[:first])
                    data = data[first:]
                    time.sleep(0.3)
                    call()
                before = heard[-len(words):]
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def answers(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            ours, _ = server.accept()
            try:
                store = socket.create_connection(("127.0.0.1", port))
            except OSError:
                ours.close()
                continue
            for call, ends in ((requests, (ours, store)), (answers, (store, ours))):
                threading.Thread(target=call, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def engines_store() -> distributed.TCPStore:
    """Of the engines; it outlasts every rank."""
    return distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))


def join(join_timeout: float) -> None:
    began = time.monotonic()
    print("error", error_of(lambda: train(*started(timeout=60, heartbeat=1,
                                                   join_timeout=join_timeout), 1)))
    print("waited", round(time.monotonic() - began, 1))


def killed(words: bytes) -> None:
    if RANK == 1:
        before_request(words, lambda: os.kill(os.getpid(), signal.SIGKILL))
    join(LONG)


def stopped(words: bytes) -> None:
    """Rank 0 kills rank 1 in the end."""
    store = engines_store()
    if RANK == 1:
        store.set("stopped", str(os.getpid()))
        before_request(words, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    join(SHORT)
    if RANK == 0:
        os.kill(int(store.get("stopped")), signal.SIGKILL)


def holder(sign: int, join_timeout: float, words: bytes) -> None:
    """Rank 0 has the store, and gets the signal when rank 1 is so far and rank 2 has met the store (who
    has not can only wait for it); rank 2 kills it in the end."""
    before = move_store_to_rank_0()

    def send() -> None:
        before.wait(["rank 2 has come"])
        os.kill(pid, sign)

    if RANK == 0:
        before.set("holder", str(os.getpid()))
    else:
        pid = int(before.get("holder"))
        if RANK == 1:
            before_request(words, send)
        else:
            before_request(b"/board/group/0/calls/here/2",
                           lambda: before.set("rank 2 has come", ""))
    join(join_timeout)
    before.set(f"done {RANK}", "")
    if RANK == 2 and sign == signal.SIGSTOP:
        before.wait(["done 1"])
        os.kill(pid, signal.SIGKILL)


def add(name: str, call: Callable[..., None], *arguments: object) -> None:
    def run() -> None:
        call(*arguments)

    SCENARIOS[name] = run


for _name, _words in WORDS.items():
    add(f"killed_{_name}", killed, _words)
    add(f"holder_killed_{_name}", holder, signal.SIGKILL, LONG, _words)
add("stopped", stopped, WORDS["in_calls"])
add("holder_stopped", holder, signal.SIGSTOP, SHORT, WORDS["in_calls"])


@scenario
def holder_never_starts() -> None:
    move_store_to_rank_0()
    if RANK != 0:
        join(SHORT)


@scenario
def partner_has_gone() -> None:
    """Rank 1 has closed its engine and ended, and the others make a second one."""
    engine, model = started()
    train(engine, model, 1)
    engine.close()
    if RANK != 1:
        join(LONG)


@scenario
def partner_comes_late() -> None:
    """It has closed its engine, and makes the next one later."""
    started()[0].close()
    if RANK == 1:
        time.sleep(3)
    engine, model = started(join_timeout=LONG)
    train(engine, model, 1)
    engine.close()


@scenario
def killed_later() -> None:
    engine, model = started()
    train(engine, model, 2)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print("error", error_of(lambda: train(engine, model, 2)))
