"""Pipelines that are not the whole world: peers are found by the right global ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distributed import run_distributed
from hocket import ConfigError
from hocket.runtime import build_schedule
from runtime.parity import Trained, batches, make_stage, mse, train_pipeline, train_reference

PIPELINES = [[0, 2], [1, 3]]
CONFIG = {"schedule": "1f1b", "num_stages_per_rank": 2}


def _side_by_side(rank: int, as_mesh: bool) -> Trained:
    data = [(x * (rank % 2 + 1), y) for x, y in batches(2, 8)]
    if as_mesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        return train_pipeline(mesh, CONFIG, 4, data)
    groups = [dist.new_group(ranks) for ranks in PIPELINES]
    return train_pipeline(groups[rank % 2], CONFIG, 4, data)


@pytest.mark.parametrize("as_mesh", [False, True], ids=["group", "mesh"])
def test_two_pipelines_side_by_side(as_mesh: bool) -> None:
    rows = run_distributed(_side_by_side, 4, as_mesh)
    for which, ranks in enumerate(PIPELINES):
        losses, parameters = train_reference(4, 4, [(x * (which + 1), y) for x, y in batches(2, 8)])
        mine = {}
        for rank in ranks:
            assert rows[rank][0] == losses
            mine.update(rows[rank][1])
        assert mine.keys() == parameters.keys()
        assert all(mine[name].equal(parameters[name]) for name in mine)


def _unnamed_mesh(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    with pytest.raises(ConfigError) as caught:
        build_schedule(mesh, 2, "gpipe", make_stage, mse)
    return str(caught.value)


def test_a_mesh_without_pp_is_refused() -> None:
    assert "name the pipeline's 'pp'" in run_distributed(_unnamed_mesh, 4)[0]
