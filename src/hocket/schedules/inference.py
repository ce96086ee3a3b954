"""Inference: forwards only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import columns, even_rounds, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class InferenceConfig(ScheduleConfig):
    """Forwards only: to evaluate, to serve, to compute features."""

    schedule: Literal["inference"] = "inference"
    """Name of the schedule."""

    num_stages_per_rank: int = Field(default=1, ge=1)
    """Stages that each rank hosts; stage s lives on rank s mod ranks."""


def inference_order(config: InferenceConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The microbatches pass the rank's stages in rounds.

    A round of at least `ranks` microbatches returns from the last rank to the first just when it is wanted there, so
    nothing waits; smaller rounds than all microbatches at once keep fewer activations between the stages.
    """
    return _forwards(Placement.loop(ranks, config.num_stages_per_rank), rank, microbatches)


def _forwards(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    return columns(Op.F, placement.stages_of(rank), even_rounds(microbatches, placement.num_ranks))


def forward_only(placement: Placement, microbatches: int) -> Program:
    """Forwards in rounds on any placement: how a schedule that trains evaluates."""
    return program_of(placement, microbatches, lambda rank: _forwards(placement, rank, microbatches))


@register_schedule(InferenceConfig, rank_order=inference_order)
def build_inference(config: InferenceConfig, ranks: int, microbatches: int) -> Program:
    """Forwards in rounds of at least `ranks` microbatches."""
    return forward_only(Placement.loop(ranks, config.num_stages_per_rank), microbatches)
