"""The scope of one call that takes all ranks: what enters and leaves it, and how signals are met meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from hocket.errors import HocketError, PeerError
from hocket.runtime.failure import Failure, is_connection_error

if TYPE_CHECKING:
    from hocket.runtime.watch import Watch


class Call:
    """The scope of one call that takes all ranks."""

    __slots__ = ("handles_term", "previous_fd", "watch", "what")

    def __init__(self, watch: Watch, what: str):
        self.watch, self.what = watch, what
        self.previous_fd: int | None = None
        self.handles_term = False

    def __enter__(self) -> None:
        watch = self.watch
        watch.entries += 1
        watch.now = self.what
        watch.thread = threading.get_ident()
        if watch.board is not None and threading.current_thread() is threading.main_thread():
            self.previous_fd = signal.set_wakeup_fd(watch.signals, warn_on_full_buffer=False)
            if self.previous_fd != -1:  # somebody else's, such as asyncio's
                signal.set_wakeup_fd(self.previous_fd)
                self.previous_fd = None
            elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self.handles_term = True
                signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        known = watch.verdict or (watch.board and watch.board.failure)
        if known:
            self._refuse(known)

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
            if error is None or (isinstance(error, HocketError) and error.agreed):
                return
            cause = error.__cause__ if isinstance(error, PeerError) else error
            if watch.board is not None and cause is not None and is_connection_error(cause):
                error = watch.lost(cause)
                raise error from None
            if isinstance(error, KeyboardInterrupt):
                error.__cause__, error.__suppress_context__ = None, True
                _shorten_interrupt(f"hocket: rank {watch.rank}: interrupted in {watch.doing()[1]}")
        finally:
            try:
                if error is not None and not (isinstance(error, HocketError) and error.agreed):
                    watch.settle(error)
            finally:
                self._leave()

    def _leave(self) -> None:
        watch = self.watch
        if self.handles_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
