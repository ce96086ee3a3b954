"""Runs plain functions on groups of processes: `run_distributed` forks gloo ranks, `run_torchrun` launches a script.

    def add(rank, x):
        t = torch.tensor(rank + x)
        dist.all_reduce(t)
        return t

    assert run_distributed(add, 4, 10) == [46, 46, 46, 46]

The parent has imported torch already, so forked ranks start at once. A rank that raises fails the test with its own
traceback, shown first; ranks that hang are stopped and the test shows where they stood.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when first made: seconds that forked ranks need not spend one by one
import torch.distributed as dist

# How long the other ranks may go on after one has failed, so that what they say of it is heard too.
GRACE = 1.0


@dataclass
class Outcome:
    """What became of one rank: a value, a traceback, or neither when it was killed or had to be stopped."""

    rank: int
    value: Any = None
    traceback: str | None = None
    exitcode: int | None = None
    """Of a process that died by itself: what it gave to exit, or minus the signal that killed it."""
    stack: str | None = None
    """Where a rank stood that had to be stopped."""
    done: bool = False
    """It returned."""


@dataclass
class _Rank:
    """The parent's end of one child."""

    outcome: Outcome
    process: BaseProcess
    channel: Connection
    stack_file: Path
    reported: bool = False


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    check: bool = True,
) -> list[Any]:
    """Runs `fn(rank, *args)` on `world_size` processes that form the default group, and returns their values by rank.

    Fails with an AssertionError if a rank raises, dies, or is not done after `timeout` seconds. With `check=False` it
    returns an `Outcome` for each rank instead, and lets the others run on after a failure until they end or the
    timeout stops them: for tests of what survivors do.

    Ranks are forked, so closures work and nothing is pickled on the way in; values come back by pickle (tensors too).
    With backend "nccl" they are spawned, as CUDA demands: `fn` must then be a function at the top of its module.
    """
    # CUDA cannot be used in a forked child of a process that has used it.
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
    with tempfile.TemporaryDirectory(prefix="hocket-ranks-") as folder:
        ranks = [
            _start(context, fn, rank, world_size, args, timeout, backend, Path(folder)) for rank in range(world_size)
        ]
        try:
            order, timed_out = _watch(ranks, timeout, check)
            if timed_out:
                _ask_for_stacks(ranks)
        finally:
            _stop(ranks)
    outcomes = [r.outcome for r in ranks]
    if not check:
        return outcomes
    if order or timed_out:
        raise AssertionError(_report(getattr(fn, "__qualname__", str(fn)), outcomes, order, timeout, timed_out))
    return [o.value for o in outcomes]


def _start(
    context: Any, fn: Any, rank: int, world_size: int, args: Any, timeout: float, backend: str, folder: Path
) -> _Rank:
    ours, theirs = context.Pipe()
    stack_file = folder / f"stack.{rank}"
    process = context.Process(
        target=_child,
        args=(fn, rank, world_size, args, timeout, backend, str(folder / "store"), str(stack_file), theirs),
        daemon=True,
        name=f"rank{rank}",
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the children here use none of the parent's locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(Outcome(rank), process, ours, stack_file)


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    backend: str,
    store: str,
    stack_file: str,
    channel: Connection,
) -> None:
    """The life of one rank. It leaves by `os._exit`, so that nothing of pytest in the forked copy ever runs."""
    code = 1
    try:
        torch.set_num_threads(1)
        stack = open(stack_file, "w")  # noqa: SIM115 - must stay open until the process ends
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 30),  # the parent's limit comes first and says more
        )
        channel.send_bytes(b"V" + pickle.dumps(fn(rank, *args)))
        # Stay until all are done: a peer may still be reading what this rank has sent.
        channel.poll(None)
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:
        # A failed rank does not wait: its peers see its connections close, as they would in a real run.
        channel.send_bytes(b"T" + traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(ranks: Sequence[_Rank], timeout: float, check: bool) -> tuple[list[int], bool]:
    """Waits for all to report. Returns the failed ones in the order of failure, and whether time ran out."""
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    while waiting := [r for r in ranks if not r.reported]:
        left = deadline - time.monotonic()
        if left <= 0:
            # After a failure the others are expected to hang; only a timeout without one deserves the name.
            return failed, not failed or not check
        for channel in wait([r.channel for r in waiting], left):
            rank = next(r for r in waiting if r.channel is channel)
            _hear(rank)
            if not rank.outcome.done:
                failed.append(rank.outcome.rank)
                if check:
                    deadline = min(deadline, time.monotonic() + GRACE)
    return failed, False


def _hear(rank: _Rank) -> None:
    """Takes in what a rank reports; the end of the file means that it died."""
    rank.reported = True
    try:
        message = rank.channel.recv_bytes()
    except (EOFError, ConnectionError):
        rank.process.join(5)
        rank.outcome.exitcode = rank.process.exitcode
        return
    if message[:1] == b"V":
        rank.outcome.value, rank.outcome.done = pickle.loads(message[1:]), True
    else:
        rank.outcome.traceback = message[1:].decode()


def _ask_for_stacks(ranks: Sequence[_Rank]) -> None:
    """Has each rank that is still busy write down where it stands."""
    busy = [r for r in ranks if not r.reported and r.process.is_alive() and r.process.pid]
    for r in busy:
        os.kill(r.process.pid or 0, signal.SIGUSR1)
    end = time.monotonic() + 1
    while time.monotonic() < end and any(not r.stack_file.exists() or not r.stack_file.stat().st_size for r in busy):
        time.sleep(0.02)
    time.sleep(0.05)  # the dump of many threads is several writes
    for r in busy:
        text = r.stack_file.read_text() if r.stack_file.exists() else ""
        r.outcome.stack = text or "(the process did not answer: it was stopped or not yet started)\n"


def _stop(ranks: Sequence[_Rank]) -> None:
    """Lets those that are done leave, and sees to it that no child outlives the call."""
    for r in ranks:
        if r.outcome.done:
            with contextlib.suppress(OSError):
                r.channel.send_bytes(b"go")
    deadline = time.monotonic() + 5
    for r in ranks:
        if r.reported:
            r.process.join(max(0, deadline - time.monotonic()))
        if r.process.is_alive():
            r.process.kill()
        r.process.join()
        r.channel.close()
        r.process.close()


def _report(name: str, outcomes: Sequence[Outcome], order: Sequence[int], timeout: float, timed_out: bool) -> str:
    """The text of the failure: first cause first."""
    world_size = len(outcomes)
    busy = [o.rank for o in outcomes if not (o.done or o.traceback or o.exitcode is not None)]
    done = [o.rank for o in outcomes if o.done]
    lines = []
    if timed_out:
        lines.append(f"{name}: not done after {timeout:g} s; ranks {busy} of {world_size} still ran, {done} were done")
    else:
        lines.append(f"{name}: rank {order[0]} of {world_size} failed first")
    for rank in order:
        outcome = outcomes[rank]
        lines.append(f"\n--- rank {rank} " + "-" * 60)
        lines.append(outcome.traceback or f"died without a word, exit code {outcome.exitcode}")
    for rank in busy:
        if stack := outcomes[rank].stack:
            lines += [f"\n--- rank {rank}, where it stood " + "-" * 42, stack]
    if busy and not timed_out:
        lines.append(f"\nranks {busy} still ran {GRACE:g} s later and were stopped")
    return "\n".join(lines)


def run_torchrun(
    script: str | os.PathLike[str],
    nproc: int,
    *args: object,
    timeout: float = 90,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node NPROC SCRIPT ARGS`; returns stdout and stderr as text.

    Fails with an AssertionError that shows both if the exit status is not 0 (unless `check=False`) or time runs out.
    """
    # --standalone: a free port for each launch, so that tests can run side by side.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [*launcher, os.fspath(script), *map(str, args)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        # Not unbuffered: the pieces of one print would mix with those of the other ranks.
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    shown = " ".join(command[1:])
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun takes its workers along on SIGTERM; whatever is left of its session goes after that.
        process.terminate()
        try:
            out, err = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        raise AssertionError(f"{shown}\nnot done after {timeout:g} s\n--- stdout\n{out}\n--- stderr\n{err}") from None
    if check and process.returncode:
        raise AssertionError(f"{shown}\nexit status {process.returncode}\n--- stdout\n{out}\n--- stderr\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)
