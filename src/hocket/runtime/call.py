"""The scope of one call that takes all ranks: what enters and leaves it, and how signals are met meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hocket.errors import HocketError, PeerError
from hocket.runtime.failure import Failure, is_connection_error

if TYPE_CHECKING:
    from hocket.runtime.watch import Watch


class Call:
    """The scope of one call that takes all ranks."""

    __slots__ = ("previous_fd", "taken", "watch", "what")

    def __init__(self, watch: Watch, what: str):
        self.watch, self.what = watch, what
        self.previous_fd: int | None = None
        self.taken: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        watch = self.watch
        watch.entries += 1
        watch.now = self.what
        watch.thread = threading.get_ident()
        watch.interrupted = watch.interruptible = False
        if watch.board is not None and threading.current_thread() is threading.main_thread():
            self._take_signals()
        known = watch.verdict or (watch.board and watch.board.failure)
        if known:
            self._refuse(known)

    def _take_signals(self) -> None:
        """Have the watching thread hear of signals, which Python's handlers do only when torch returns."""
        watch = self.watch
        previous = signal.set_wakeup_fd(watch.signals, warn_on_full_buffer=False)
        if previous != -1:  # somebody else's, such as asyncio's
            signal.set_wakeup_fd(previous)
            return
        self.previous_fd = previous
        # Handlers of the user's own stay: they may want the step to end in peace.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.taken.append((signal.SIGTERM, signal.signal(signal.SIGTERM, _leave_it_to_the_thread)))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.taken.append((signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt)))
            watch.interruptible = True

    def _interrupt(self, number: int, frame: object) -> None:
        """For Ctrl-C. A launcher often repeats what the terminal has sent already; a wait is ended by the thread."""
        watch = self.watch
        again, watch.interrupted = watch.interrupted, True
        if not again and watch.awaited() is None:
            raise KeyboardInterrupt

    def _refuse(self, known: Failure) -> None:
        watch, error = self.watch, known.error()
        try:
            if watch.verdict is None:
                watch.verdict = known
                watch.settle(error)
            else:
                error = type(error)(f"this pipeline has failed and takes no call until `reset`; the cause was: {error}")
        finally:
            self._leave()
        raise error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch = self.watch
        try:
            if watch.interrupted:
                _shorten_interrupt(f"hocket: rank {watch.rank}: interrupted in {watch.doing()[1]}")
                error = KeyboardInterrupt()
                raise error from None
            if error is None or (isinstance(error, HocketError) and error.agreed):
                return
            cause = error.__cause__ if isinstance(error, PeerError) else error
            if watch.board is not None and cause is not None and is_connection_error(cause):
                error = watch.lost(cause)
                raise error from None
        finally:
            try:
                if error is not None and not (isinstance(error, HocketError) and error.agreed):
                    watch.settle(error)
            finally:
                self._leave()

    def _leave(self) -> None:
        watch = self.watch
        for number, handler in self.taken:
            signal.signal(number, handler)
        if self.previous_fd is not None:
            signal.set_wakeup_fd(self.previous_fd)
        watch.before, watch.now = self.what, None
        watch.waiting = watch.executor = None


def _leave_it_to_the_thread(number: int, frame: object) -> None:
    """For SIGTERM: the watching thread reads of it too, and ends the process."""


def _shorten_interrupt(line: str) -> None:
    """Have Ctrl-C print one line on each rank; unless the user shows exceptions in a way of their own."""
    usual = sys.excepthook
    if getattr(usual, "__module__", "") not in ("sys", "torch.distributed.distributed_c10d"):
        return

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            os.write(2, f"{line}\n".encode())
        else:
            usual(kind, value, trace)

    sys.excepthook = show
