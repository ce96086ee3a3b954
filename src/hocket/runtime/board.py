"""The notice board: what ranks tell each other through the group's store, beside the channels.

On it are the ranks' signs of life, the first failure, and who has read of it. The store may hang (its host stopped, a
cable cut), so one thread with a connection of its own does all the talking, and others ask it with a limit of time.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

from hocket.runtime.failure import Failure

T = TypeVar("T")

BEAT = 0.5
"""Seconds between two signs of life."""

_LONGEST = 1 << 16


class BoardError(Exception):
    """The store does not answer."""


class Sign(NamedTuple):
    """A sign of life: its number, what the rank is doing ("waiting", "computing", "outside", "left"), since when, and
    the same in words."""

    beat: int
    state: str
    seconds: float
    words: str

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sign | None:
        """None for bytes that are no sign of life."""
        try:
            beat, state, seconds, words = json.loads(data[:_LONGEST])
            return cls(int(beat), str(state)[:20], float(seconds), str(words)[:500])
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None


class Board:
    """This rank's access to the board of one pipeline.

    store: the group's. name: the same on all ranks, and used by one pipeline only. sign: says what this rank is doing.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, sign: Callable[[int], Sign]):
        self.rank, self.size = rank, size
        self.failure: Failure | None = None
        """The first failure, once this rank knows of it."""
        self.down: str | None = None
        """Why the store cannot be reached, once that is so."""
        self._name, self._sign = name, sign
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closed = self._hangs = False
        self._beat = 0
        self._thread = threading.Thread(target=self._serve, args=(store,), daemon=True, name=f"hocket board {rank}")
        self._thread.start()

    # --- for the other threads

    def ask(self, job: Callable[[dist.Store], T], seconds: float) -> T:
        """What `job` makes of the store; raises BoardError if there is no answer in `seconds`."""
        if self.down is not None:
            raise BoardError(self.down)
        asked = _Job(job)
        self._jobs.put(asked)
        if not asked.done.wait(min(seconds, 0.2) if self._hangs else seconds):
            self._hangs = True
            raise BoardError(f"the store of the process group has not answered for {seconds:g} s")
        if asked.error is not None:
            raise BoardError(self.down or str(asked.error))
        return asked.result  # type: ignore[return-value]

    def publish(self, failure: Failure, seconds: float = 2.0) -> Failure:
        """Put `failure` on the board unless another is there; gives the one that is there."""

        def write(store: dist.Store) -> Failure:
            first = store.compare_set(self._key("failure"), "", failure.to_text())
            self.failure = Failure.from_text(first)
            return self.failure

        with contextlib.suppress(BoardError):
            return self.ask(write, seconds)
        self.failure = self.failure or failure
        return self.failure

    def find_failure(self, seconds: float) -> Failure | None:
        """The first failure, if one comes onto the board within `seconds`."""
        end = time.monotonic() + seconds
        with contextlib.suppress(BoardError):
            while self.failure is None and not self.ask(self._look, max(end - time.monotonic(), 0.1)):
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
        return self.failure

    def missing(self, what: str, ranks: Iterable[int], seconds: float, *, always: bool = False) -> list[int]:
        """Mark `what` for this rank, wait until all `ranks` have marked it too, and give those that have not.

        A failure that comes onto the board ends the wait, unless `always`.
        """
        end = time.monotonic() + seconds
        left, pause = list(ranks), 0.002
        with contextlib.suppress(BoardError):
            self.ask(lambda store: store.set(self._key(f"{what}/{self.rank}"), "1"), max(seconds, 1))
            while left:
                if self.ask(lambda store: store.check([self._key(f"{what}/{r}") for r in left]), seconds):
                    return []
                if time.monotonic() > end or (self.failure is not None and not always):
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            left = self.ask(
                lambda store: [r for r in left if not store.check([self._key(f"{what}/{r}")])], max(seconds, 1)
            )
        return left

    def signs(self, seconds: float = 2.0) -> dict[int, Sign]:
        """The last sign of life of each rank that has given one."""

        def read(store: dist.Store) -> dict[int, Sign]:
            found = {}
            for rank in range(self.size):
                key = self._key(f"sign/{rank}")
                if store.check([key]) and (sign := Sign.from_bytes(store.get(key))):
                    found[rank] = sign
            return found

        with contextlib.suppress(BoardError):
            return self.ask(read, seconds)
        return {}

    def close(self) -> None:
        """Say farewell and end the thread. A thread inside torch while Python shuts down would abort the process."""
        self._closed = True
        self._jobs.put(None)
        # The garbage collector may call this from any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    # --- the thread

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _serve(self, shared: dist.Store) -> None:
        try:
            store = shared.clone()  # type: ignore[attr-defined]
            host = _Host(store)
        except Exception as error:
            self.down = f"the store of the process group cannot be reached: {error}"
            return
        due = 0.0
        while not self._closed:
            try:
                job = self._jobs.get(timeout=max(due - time.monotonic(), 0))
            except queue.Empty:
                job = None
            if self._closed:
                break
            if host.gone():
                self.down = "the store of the process group is gone: the process that hosts it has ended"
            if job is not None:
                self._run(job, store)
            if self.down is not None:
                break
            if time.monotonic() >= due:
                self._run(_Job(self._tick), store)
                due = time.monotonic() + BEAT
        if self.down is None and not host.gone():
            self._run(_Job(self._give_sign), store)
        host.close()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                self._run(job, store)

    def _run(self, job: _Job[Any], store: dist.Store) -> None:
        try:
            if self.down is not None:
                raise BoardError(self.down)
            job.result = job.job(store)
        except Exception as error:
            job.error = error
            if self.down is None:
                self.down = f"the store of the process group does not work: {str(error).splitlines()[0][:200]}"
        job.done.set()

    def _tick(self, store: dist.Store) -> None:
        self._give_sign(store)
        self._look(store)

    def _give_sign(self, store: dist.Store) -> None:
        self._beat += 1
        store.set(self._key(f"sign/{self.rank}"), self._sign(self._beat).to_text())

    def _look(self, store: dist.Store) -> bool:
        if self.failure is None and store.check([self._key("failure")]):
            self.failure = Failure.from_text(store.get(self._key("failure")))
        return self.failure is not None


class _Job(Generic[T]):
    """Something to do with the store, and what came of it."""

    def __init__(self, job: Callable[[dist.Store], T]):
        self.job = job
        self.done = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None


class _Host:
    """Tells whether the process that hosts a TCPStore is still there.

    Torch prints pages of C++ frames when a store's host is gone. A silent connection of our own sees that before.
    """

    def __init__(self, store: dist.Store):
        self._socket: socket.socket | None = None
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection((store.host, store.port), timeout=5)
                self._socket.setblocking(False)

    def gone(self) -> bool:
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
