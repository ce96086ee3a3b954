"""Proven lower bounds of the makespan: what no program beats at given costs, placement and memory."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.cost import CostModel
from hocket.program import Placement


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: CostModel,
    capacity: Sequence[float] | None = None,
    *,
    split: bool = True,
    forward_only: bool = False,
) -> float:
    """Seconds that no program beats: for now the work of the busiest rank."""
    stages = placement.num_stages
    work = costs.per_stage("forward", stages)
    if not forward_only:
        whole = costs.per_stage("backward", stages)
        halves = [
            i + w
            for i, w in zip(
                costs.per_stage("backward_input", stages), costs.per_stage("backward_weight", stages), strict=True
            )
        ]
        work = tuple(f + min(b, h) if split else f + b for f, b, h in zip(work, whole, halves, strict=True))
    best = max(sum(work[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks))
    return microbatches * best * (costs.overlap or 1.0)
