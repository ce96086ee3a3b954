"""Which process group is the pipeline, from what the user passes as mesh; and the sums that go over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket import errors
from hocket.errors import ConfigError, HocketError

Mesh = DeviceMesh | dist.ProcessGroup | None
"""A DeviceMesh of one dimension or with one named "pp", a ProcessGroup, or None for the whole world."""


def group_of(mesh: Mesh) -> dist.ProcessGroup | None:
    """The pipeline's process group; None if there is no process group and so one process alone."""
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            return mesh.get_group("pp")
        if mesh.ndim == 1:
            return mesh.get_group()
        raise ConfigError(
            f"the mesh has dimensions {names or mesh.ndim}; name the pipeline's 'pp', or pass a mesh of one dimension"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise ConfigError(f"mesh is {type(mesh).__name__}; pass a DeviceMesh, a ProcessGroup, or None for the whole world")


def gather_numbers(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Every rank's `values` (equally many on each) as float64, by rank of `group`."""
    if group is None or dist.get_world_size(group) == 1:
        return [list(values)]
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [row.tolist() for row in everyone]


def share(data: bytes, problem: HocketError | None, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's `data`, by rank of `group`, if no rank has a `problem`; else raises the same error on all ranks."""
    if group is None or dist.get_world_size(group) == 1:
        if problem is not None:
            raise problem
        return [data]
    mine = (type(problem).__name__, str(problem)) if problem is not None else None
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (mine, data), group=group)
    failed: list[tuple[int, str, str]] = [(rank, *row[0]) for rank, row in enumerate(rows) if row[0] is not None]
    if failed:
        kind = getattr(errors, failed[0][1], ConfigError)
        texts = {text for _, _, text in failed}
        if len(texts) == 1:
            where = "all ranks" if len(failed) == len(rows) else f"rank {', '.join(str(rank) for rank, _, _ in failed)}"
            raise kind(f"on {where}: {texts.pop()}") from problem
        raise kind("\n".join(f"on rank {rank}: {text}" for rank, _, text in failed)) from problem
    return [row[1] for row in rows]


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 where there is none."""
    return 0 if group is None else dist.get_rank(group)
