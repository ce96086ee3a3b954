"""The folders of checkpoints on disk: written whole or not at all, found again, in the foreground or behind a step.

    PATH/step-00000300/.metadata, *.distcp    torch.distributed.checkpoint: model and optimizer tensors by name
    PATH/step-00000300/hocket.pt              step, seed, hyperparameters, LR schedulers, RNG, what the user adds
    PATH/step-00000400.partial/               a save that is under way, or was cut off

A folder gets its final name when all ranks have written all of it, so a folder of that name is complete. One of the
same step is set aside as step-N.old for the moment between two renames, and counts if the second never came.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from hocket.errors import ConfigError, PipelineError
from hocket.runtime.checkpoint_state import dump, listed, restore
from hocket.runtime.groups import rank_in, share

Group = dist.ProcessGroup | None

_VALUES = "hocket.pt"
_STEP = re.compile(r"step-(\d{8,})(\.old)?")


def folder_of(path: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of `step` lies in `path`."""
    return Path(path) / f"step-{step:08d}"


def latest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step in folder `path`, or None if there is none."""
    named = [(found, p) for p in Path(path).glob("step-*") if (found := _STEP.fullmatch(p.name))]
    whole = [(int(found[1]), found[2] is None, p) for found, p in named if _complete(p)]
    return max(whole)[2] if whole else None


def find(path: Path, group: Group) -> Path:
    """The folder to load, the same on all ranks."""
    problem = None
    folder = path if _complete(path) else latest_checkpoint(path)
    if folder is None:
        there = listed(p.name for p in path.glob("*")) if path.is_dir() else "nothing"
        problem = ConfigError(f"no complete checkpoint in {path}; it holds {there or 'nothing'}")
    chosen = share(b"" if folder is None else folder.name.encode(), problem, group)[0].decode()
    return path if path.name == chosen and _complete(path) else path / chosen


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of the tensors by name, and the plain values."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return dict(metadata), restore((folder / _VALUES).read_bytes())


def read_tensors(folder: Path, targets: dict[str, Any]) -> None:
    """Fill the tensors `targets`, by name."""
    _quietly(dcp.load, targets, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def write_behind(folder: Path, tensors: dict[str, Any], values: dict[str, Any], group: Group) -> Future[None]:
    """Copy everything to the CPU now, and write it while the caller goes on."""
    copies = BlockingAsyncStager().stage(tensors)
    done: Future[None] = Future()
    own_group = _group_of_its_own(group)

    def work() -> None:
        try:
            done.set_result(write(folder, copies, values, own_group))
        except BaseException as error:
            done.set_exception(error)

    # A thread for each save and no pool: a pool does not live on in a process forked from this one.
    Thread(target=work, name="hocket-checkpoint").start()
    _pending.append(done)
    return done


def wait_for_background() -> None:
    """Let the save that is under way finish; raises what it raised."""
    while _pending:
        _pending.pop().result()


def write(folder: Path, tensors: dict[str, Any], values: dict[str, Any], group: Group) -> None:
    """Write all under a preliminary name, and rename it when every rank is done."""
    partial_folder = folder.with_name(f"{folder.name}.partial")
    first = rank_in(group) == 0
    _together(first, partial(_begin, partial_folder, values), group)
    try:
        writer = dcp.FileSystemWriter(partial_folder)
        _quietly(dcp.save, tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise PipelineError(f"saving {folder} failed: {causes}; earlier checkpoints are untouched") from error
    _together(first, partial(_finish, partial_folder, folder), group)


def _begin(partial_folder: Path, values: dict[str, Any]) -> None:
    for leftover in partial_folder.parent.glob("step-*.partial"):
        shutil.rmtree(leftover)
    partial_folder.mkdir(parents=True)
    with open(partial_folder / _VALUES, "wb") as file:
        file.write(dump(values))
        file.flush()
        os.fsync(file.fileno())


def _finish(partial_folder: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial_folder.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _together(mine: bool, work: Callable[[], None], group: Group) -> None:
    """Run `work` on one rank; all wait for it, and all raise if it fails."""
    problem = None
    try:
        if mine:
            work()
    except Exception as error:
        problem = PipelineError(f"saving a checkpoint failed: {type(error).__name__}: {error}")
    share(b"", problem, group)


def _complete(folder: Path) -> bool:
    return folder.suffix != ".partial" and (folder / ".metadata").is_file() and (folder / _VALUES).is_file()


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.distributed.checkpoint warns of a single process even where it was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        return call(*args, **kwargs)


_pending: list[Future[None]] = []
_own_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _group_of_its_own(group: Group) -> Group:
    """For a save in the background: the step's messages must not mix with its own."""
    if group is None:
        return None
    if group not in _own_groups:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="hocket checkpoint")
        assert isinstance(made, dist.ProcessGroup)
        _own_groups[group] = made
    return _own_groups[group]
