"""Joining the process group, with an error that names the ranks that did not come."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from hocket.errors import ConfigError, PipelineTimeoutError
from hocket.runtime.failure import names

_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_PREFIX = "hocket/joined"
_ABSENT, _READ = "absent", "read/"
_GRACE = 5.0
"""Seconds that rank 0 waits for the others to read who is absent."""


def init_process_group(backend: str | None = None, *, join_timeout: float = 300.0, timeout: float = 1800.0) -> None:
    """`torch.distributed.init_process_group` for scripts under torchrun; names the ranks that never join.

    join_timeout: seconds to wait for all ranks. timeout: that of the group's collectives, as in torch. Raises
    PipelineTimeoutError with the missing ranks, where torch only says how many have come.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(f"the environment lacks {', '.join(missing)}; launch the script with torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _store(rank, size, join_timeout)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise PipelineTimeoutError(
            f"rank {rank} cannot reach the store of rank 0 at {where} within {join_timeout:g} s; has rank 0 started, "
            f"and is the port open? ({str(error).splitlines()[0][:200]})"
        ) from None
    absent = _wait_for_all(store, rank, size, join_timeout)
    if absent:
        raise PipelineTimeoutError(
            f"{len(absent)} of {size} ranks did not join within {join_timeout:g} s: {names(absent)}; start them, or "
            f"launch with the right number of processes"
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def _store(rank: int, size: int, seconds: float) -> dist.Store:
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not hosted,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{_PREFIX}/{attempt}", store)


def _wait_for_all(store: dist.Store, rank: int, size: int, seconds: float) -> list[int]:
    """The ranks that have not joined when the first of those here has waited for `seconds`."""
    store.set(str(rank), "1")
    everyone = [str(r) for r in range(size)]
    end = time.monotonic() + seconds
    while not (given_up := store.check([_ABSENT])) and not store.check(everyone):
        absent = time.monotonic() > end and ",".join(r for r in everyone if not store.check([r]))
        if absent:
            store.compare_set(_ABSENT, "", absent)  # the first to give up says it for all
        time.sleep(0.05)
    if not given_up:
        return []
    missing = [int(r) for r in store.get(_ABSENT).decode().split(",")]
    # Rank 0 may host the store: it stays until the others have read.
    store.set(f"{_READ}{rank}", "1")
    here = [f"{_READ}{r}" for r in range(size) if r not in missing]
    end = time.monotonic() + _GRACE
    while rank == 0 and not store.check(here) and time.monotonic() < end:
        time.sleep(0.05)
    return missing
