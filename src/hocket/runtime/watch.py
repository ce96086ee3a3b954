"""Watches over one pipeline on this rank: a failure stops all ranks, with one message, and nobody waits for ever.

The main thread says what it is in (`with watch.call("step 3")`) and what it waits for (`watch.waiting = ...`): plain
attributes, read four times a second by a thread that

- gives up when one wait lasts longer than `timeout`, and finds out from the board who is to blame;
- learns from the board of failures elsewhere, and wakes the main thread out of its wait;
- wakes it on Ctrl-C too, which Python notices only when torch returns;
- ends the process, with the message and where it stood, if the main thread cannot be woken.

Gloo's waits cannot be cancelled, and a wait in slices is none: the first slice that ends unanswered closes all
connections of the group. This is used here on purpose: to wake the main thread, a receive that nobody answers is waited
for a millisecond. It closes the pipeline's own group and no other, and peers that wait for this rank notice at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hocket.errors import PeerError, PipelineError
from hocket.runtime.board import BEAT, Board, Sign
from hocket.runtime.call import Call
from hocket.runtime.failure import Failure, Kind, gone, names, raised, silent

if TYPE_CHECKING:
    from hocket.runtime.executor import Executor

TICK = 0.25
GRACE = 5.0
"""Seconds that a rank has for its present action when another has failed; then its process ends."""

_SCRATCH_TAG = 19


class Wait:
    """What the main thread waits for: in words, and from which rank (None: all)."""

    __slots__ = ("peer", "what")

    def __init__(self, what: str, peer: int | None = None):
        self.what, self.peer = what, peer

    def __str__(self) -> str:
        return self.what


class Watch:
    """One for each pipeline and rank. store: the group's; None where the pipeline is one process.

    name: the same on all ranks, and new for each pipeline. timeout: seconds that one wait may last.
    """

    waiting: Wait | None = None
    """What the main thread waits for outside of the executor."""
    executor: Executor | None = None
    """The one that runs, if any: it knows the action, and the message for which it waits."""
    interruptible = False
    """Ctrl-C ends the present call, by no handler of the user's own."""
    interrupted = False
    """Ctrl-C has come in the present call."""
    verdict: Failure | None = None
    """The failure that ended this pipeline, once this rank has met it."""

    def __init__(self, store: dist.Store | None, name: str, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.group: Any = None
        """The pipeline's own gloo group; `lanes` are groups of other backends."""
        self.lanes: list[Any] = []
        self.board: Board | None = None
        self.held = 0.0
        self.now: str | None = None
        self.before = ""
        self.entries = 0
        self.thread = threading.get_ident()
        """The one that makes the calls."""
        self._closed = self._woken = False
        if store is None:
            return
        self._reader, self.signals = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(self._reader, False)
        self.board = Board(store, name, rank, size, self._sign)
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"hocket watch {rank}")
        self._thread.start()

    # --- the main thread

    def call(self, what: str) -> Call:
        """A context for whatever takes all ranks: failures in it stop them all, and a failed pipeline refuses it."""
        return Call(self, what)

    def join(self, call: str) -> None:
        """Wait for all ranks to come to `call`; raises PipelineTimeoutError naming those that do not."""
        assert self.board is not None
        missing = self.board.missing("here", range(self.size), self.timeout)
        if missing and self.board.failure is None:
            what = f"has not called {call} (not started, or still busy before it)"
            reason = {} if self.board.down else dict.fromkeys(missing, what)
            self.board.publish(silent(self.timeout, reason, {}))
            if self.board.down:
                raise PeerError(self.board.down)
        if self.board.failure is not None:
            self.verdict = self.board.failure
            raise self.verdict.error()

    def lost(self, error: BaseException) -> PipelineError:
        """What to raise when the backend says that a connection is lost: the first failure, by name."""
        assert self.board is not None
        waiting = self.awaited()
        if self.verdict is None:
            # The connections of a process that dies close one by one, that of a store it hosts perhaps last.
            time.sleep(0.05)
            # Who fails tells the board before it lets go of a connection; so it is there by now, or never.
            self.verdict = self.board.find_failure(0)
        if self.verdict is None:
            self.verdict = self.board.publish(self._gone(waiting, error))
        return self.verdict.error("" if waiting is None else str(waiting))

    def _gone(self, waiting: Wait | None, error: BaseException) -> Failure:
        assert self.board is not None
        peer = waiting.peer if waiting else None
        signs = self.board.signs()
        if peer is None:
            time.sleep(2 * BEAT + 0.2)
            later = self.board.signs()
            peers = [rank for rank in range(self.size) if rank != self.rank and _is_still(rank, signs, later)]
            signs = later
        else:
            peers = [peer]
        table = {rank: sign.words for rank, sign in signs.items()}
        table[self.rank] = self.doing()[1]
        left = [rank for rank in peers if rank in signs and signs[rank].state == "left"]
        failure = (
            gone(peers, table)
            if not left
            else Failure(
                Kind.GONE, tuple(left), "; ".join(f"rank {rank} is gone: it {signs[rank].words}" for rank in left)
            )
        )
        if not peers or self.board.down:
            reason = self.board.down or str(error).splitlines()[0]
            failure = Failure(failure.kind, failure.ranks, f"{failure.text}\n({reason})")
        return failure

    def settle(self, error: BaseException) -> None:
        """After a failure in a call: tell the others, let go of the connections, wait until all have heard."""
        if self.verdict is None and self.board is not None:
            self.verdict = self.board.failure
        if self.verdict is None:
            failure = raised(self.rank, error, self.doing()[1])
            self.verdict = failure if self.board is None else self.board.publish(failure)
        if self.board is None:
            return
        self.wake()
        absent = self.verdict.ranks if self.verdict.kind in (Kind.GONE, Kind.SILENT) else ()
        present = [rank for rank in range(self.size) if rank not in absent]
        patience = 1.0 if isinstance(error, KeyboardInterrupt) else GRACE + 1
        self.board.missing("heard", present, patience, always=True)
        # They have heard, but not yet printed; torchrun stops them as soon as this process has ended.
        time.sleep(0.2)

    def wake(self) -> None:
        """End all waits on the pipeline's own group, here and on peers that wait for this rank."""
        if self._woken or self.group is None:
            return
        self._woken = True
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self.group.recv([torch.zeros(1)], peer, _SCRATCH_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    # A connection that is closed already fails at once, and takes no other along.
                    if "Timed out" in str(error):
                        break
        for lane in self.lanes:
            lane.abort()

    def close(self) -> None:
        """End the threads; the board keeps a word of farewell."""
        if self._closed or self.board is None:
            return
        self._closed = True
        self.board.close()
        with contextlib.suppress(OSError):
            os.write(self.signals, b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        os.close(self.signals)

    # --- what this rank is doing, as others are told

    def doing(self) -> tuple[str, str]:
        """In a word, and in words."""
        if self._closed:
            return "left", f"has left{self.before and ', after ' + self.before}{_last_exception()}"
        call, waiting = self.now, self.awaited()
        action = self.executor.current if self.executor is not None else None
        if call is None:
            return "outside", f"outside of hocket, after {self.before or 'build_schedule'}"
        place = call if action is None else f"{call}, stage {action.stage}, microbatch {action.microbatch}, {action}"
        if waiting is not None:
            return "waiting", f"{place}, waiting for {waiting}"
        return "computing", place

    def awaited(self) -> Wait | None:
        """What the main thread waits for, in the executor or outside."""
        executor = self.executor
        found = executor.awaited() if executor is not None else None
        return Wait(*found) if found else self.waiting

    def _sign(self, beat: int) -> Sign:
        state, words = self.doing()
        return Sign(beat, state, self.held, f"{words}, for {self.held:.0f} s" if self.held >= 2 else words)

    # --- the thread

    def _watch(self) -> None:
        before: tuple[Any, ...] = ()
        last = time.monotonic()
        known_for = 0.0
        while not self._closed:
            self._sleep()
            now = time.monotonic()
            # A process that was stopped itself, or slept with its machine, has not waited that long.
            passed, last = min(now - last, 2 * TICK), now
            executor = self.executor
            token = (self.entries, self.waiting, *((executor.current, executor.waiting) if executor else ()))
            same = len(before) == len(token) and all(a is b for a, b in zip(token[1:], before[1:], strict=True))
            self.held = self.held + passed if same and token[0] == before[0] else 0.0
            before = token
            assert self.board is not None
            if self.board.failure is None and self.now and self.held > self.timeout and (waiting := self.awaited()):
                self._give_up(waiting)
            if self.board.failure is not None and self.now is not None:
                self.wake()
                known_for += passed
                if known_for > GRACE and self.verdict is None:
                    self._last_words(self.board.failure)
        os.close(self._reader)

    def _sleep(self) -> None:
        """For a tick, or until a signal comes in."""
        if not select.select([self._reader], [], [], TICK)[0]:
            return
        with contextlib.suppress(OSError):
            came = os.read(self._reader, 64)
            if signal.SIGTERM in came and self.now:
                self._terminated()
            if signal.SIGINT in came and self.now and self.interruptible:
                self.wake()

    def _terminated(self) -> None:
        """A launcher ends this process because another has failed, maybe before the main thread could say so."""
        assert self.board is not None
        failure = self.verdict or self.board.find_failure(2.5)
        if failure is not None and failure.kind is not Kind.INTERRUPTED:
            awaited = self.awaited()
            error = failure.error(awaited.what if awaited else "")
            os.write(2, f"hocket: rank {self.rank} is stopped by SIGTERM. {error}\n".encode())
        self.board.missing("heard", [], 0.5, always=True)
        os._exit(128 + signal.SIGTERM)

    def _give_up(self, waiting: Wait) -> None:
        """The main thread has waited too long: find out for whom, and tell all."""
        assert self.board is not None
        before = self.board.signs()
        time.sleep(2 * BEAT + 0.2)
        now = self.board.signs()
        if self.board.failure is not None or str(self.awaited()) != str(waiting):
            return
        blamed = self._blame(waiting, before, now)
        table = {rank: sign.words for rank, sign in now.items()}
        table[self.rank] = f"{self.doing()[1]}, for {self.held:.0f} s"
        self.board.publish(silent(self.timeout, blamed, table))

    def _blame(self, waiting: Wait, before: dict[int, Sign], now: dict[int, Sign]) -> dict[int, str]:
        assert self.board is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        if not now:
            peers = others if waiting.peer is None else [waiting.peer]
            why = self.board.down or "the store does not answer either: is the network cut?"
            return dict.fromkeys(peers, f"does not answer, and {why}")
        silent_ranks = [rank for rank in others if _is_still(rank, before, now)]
        if silent_ranks:
            return {
                rank: now[rank].words
                if rank in now and now[rank].state == "left"
                else "gives no sign of life (stopped, swapping, or cut off)"
                for rank in silent_ranks
            }
        busy = {rank: now[rank] for rank in others if now[rank].state != "waiting"}
        longest = max((sign.seconds for sign in busy.values()), default=0.0)
        return {
            rank: f"is {'still in ' if sign.state == 'computing' else ''}{sign.words}"
            for rank, sign in busy.items()
            if sign.seconds >= longest / 2
        }

    def _last_words(self, failure: Failure) -> None:
        """End a process whose main thread does not come back."""
        assert self.board is not None
        self.board.missing("heard", [], 0.5, always=True)
        frame = sys._current_frames().get(self.thread)
        where = "".join(traceback.format_stack(frame)) if frame else ""
        text = (
            f"hocket: rank {self.rank} ends, because another has failed and its main thread has not come back for "
            f"{GRACE:g} s; it stands here:\n{where}{failure.error()}\n"
        )
        os.write(2, text.encode())
        os._exit(1)


def watch_over(owner: object, watch: Watch) -> None:
    """Close `watch` when `owner` is collected or Python ends."""
    weakref.finalize(owner, _close_here, watch, os.getpid())


def _close_here(watch: Watch, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, whose threads do not exist
        watch.close()


def _is_still(rank: int, before: dict[int, Sign], now: dict[int, Sign]) -> bool:
    """Whether a rank has given no sign of life between the two looks."""
    return rank not in now or (rank in before and before[rank].beat == now[rank].beat)


def _last_exception() -> str:
    """What ended the script, if an exception did."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f", by {type(error).__name__}: {str(error)[:200]}"


__all__ = ["Wait", "Watch", "names", "watch_over"]
