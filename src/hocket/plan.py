"""PipelinePlan: which rank runs which layers, and what it does at each tick, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hocket.cost import CostModel
from hocket.counts import positive, whole
from hocket.errors import ConfigError, PartitionError
from hocket.partition import partition_layers
from hocket.program import Action, Op, Program
from hocket.schedules import GreedyConfig, ScheduleConfig, build, parse_schedule
from hocket.search import Candidate, Comparison, SearchResult, compare, search
from hocket.simulate import simulate

__all__ = [
    "Candidate",
    "Comparison",
    "PipelinePlan",
    "PlanEvent",
    "PlanMetrics",
    "RankWorkload",
    "SearchResult",
    "SharedWeightReport",
    "StageAssignment",
    "build_pipeline_plan",
    "compare",
    "rank_workload",
    "search",
    "shared_weight_gradients",
]

PARTITIONS = ("even", "costs", "counts")


class StageAssignment(NamedTuple):
    """Where a stage lives: its rank, its index among the stages of that rank, and its layers."""

    stage: int
    rank: int
    local_index: int
    layer_range: range


class PlanEvent(NamedTuple):
    """An action of a rank, the tick at which it starts, and how many ticks it lasts."""

    rank: int
    tick: int
    action: Action
    ticks: int


@dataclass(frozen=True)
class PlanMetrics:
    """What a plan comes to, in ticks. `busy_ticks` and `idle_ticks` have one number for each rank."""

    total_ticks: int
    total_events: int
    busy_ticks: tuple[int, ...]
    idle_ticks: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle ticks over all ticks of all ranks."""
        return sum(self.idle_ticks) / (self.total_ticks * len(self.idle_ticks))


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule on its ranks, with layers for its stages and ticks for its actions."""

    config: ScheduleConfig
    program: Program
    n_layers: int
    stage_assignments: tuple[StageAssignment, ...]
    events: tuple[PlanEvent, ...] = field(repr=False)
    """By tick, then rank."""

    @property
    def num_ranks(self) -> int:
        return self.program.num_ranks

    @property
    def num_stages(self) -> int:
        return self.program.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.program.num_microbatches

    @cached_property
    def _by_rank(self) -> tuple[tuple[PlanEvent, ...], ...]:
        rows: list[list[PlanEvent]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            rows[event.rank].append(event)
        return tuple(map(tuple, rows))

    @cached_property
    def metrics(self) -> PlanMetrics:
        """Ticks, events and bubble."""
        total = max(event.tick + event.ticks for event in self.events)
        busy = tuple(sum(event.ticks for event in row) for row in self._by_rank)
        return PlanMetrics(total, len(self.events), busy, tuple(total - ticks for ticks in busy))

    def events_for(self, rank: int) -> tuple[PlanEvent, ...]:
        """What `rank` does, by tick. Raises ConfigError for a rank that the plan does not have."""
        return self._by_rank[_checked_rank(self, rank)]

    def assignments_for(self, rank: int) -> tuple[StageAssignment, ...]:
        """The stages of `rank`, in order. Raises ConfigError for a rank that the plan does not have."""
        rank = _checked_rank(self, rank)
        return tuple(assignment for assignment in self.stage_assignments if assignment.rank == rank)

    def summary(self) -> str:
        """One line: schedule, layers, ranks, stages, microbatches, ticks, events, bubble."""
        metrics, options = self.metrics, self.config.model_dump(exclude={"schedule"})
        details = f" ({', '.join(f'{name}={value}' for name, value in options.items())})" if options else ""
        return (
            f"{self.config.schedule}{details}: {self.n_layers} layers in {self.num_stages} stages on {self.num_ranks} "
            f"ranks, {self.num_microbatches} microbatches: {metrics.total_ticks} ticks, {metrics.total_events} events, "
            f"bubble {metrics.bubble_fraction:.1%}"
        )

    def to_mapping(self) -> dict[str, Any]:
        """The plan as JSON values."""
        metrics = self.metrics
        return {
            "schedule": self.config.model_dump(),
            "layers": self.n_layers,
            "ranks": self.num_ranks,
            "stages": [
                {
                    "stage": a.stage,
                    "rank": a.rank,
                    "local_index": a.local_index,
                    "layers": [a.layer_range.start, a.layer_range.stop],
                }
                for a in self.stage_assignments
            ],
            "microbatches": self.num_microbatches,
            "total_ticks": metrics.total_ticks,
            "total_events": metrics.total_events,
            "busy_ticks": list(metrics.busy_ticks),
            "idle_ticks": list(metrics.idle_ticks),
            "bubble_fraction": metrics.bubble_fraction,
            "events": [[f"{event.tick}:{event.action}" for event in row] for row in self._by_rank],
        }


def build_pipeline_plan(
    n_layers: int,
    config: ScheduleConfig | Mapping[str, Any] | str,
    *,
    ranks: int,
    microbatches: int,
    partition: str = "even",
    layer_costs: Sequence[float] | None = None,
    layer_counts: Sequence[int] | None = None,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    allow_empty: bool = False,
    backward_ticks: int | None = None,
) -> PipelinePlan:
    """Plan `n_layers` layers under a schedule (a config, its mapping or its name).

    `partition` is "even"; "costs", by `layer_costs` (default: all alike) with `first_cost` and `last_cost` for the
    embedding and the head; or "counts", with the layers of each stage in `layer_counts`. See `partition_layers`.

    F, I and W last one tick each. A full backward lasts one where a schedule knows only full backwards (as in the
    greedy schedule, whose ticks are its definition), and two, those of I and W, where it splits some; `backward_ticks`
    states another number. Each action starts at the first tick at which its rank is free and its inputs are there. The
    parts of an overlapped pair follow one another.

    Raises ConfigError and its subclasses, each with the numbers and what to change: no layers, ranks, stages or
    microbatches; more stages than layers; an unknown partition; what the schedule or `partition_layers` refuses.
    """
    config = parse_schedule(config)
    _check(n_layers, partition, backward_ticks, layer_costs, layer_counts)
    program = build(config, ranks=ranks, microbatches=microbatches)
    stages, hosted = program.num_stages, program.num_stages // program.num_ranks
    if stages > n_layers and not allow_empty and partition != "counts":
        raise PartitionError(
            f"a plan needs total stages <= n_layers (got {stages} > {n_layers}): {ranks} ranks with {hosted} stages "
            "each; use fewer ranks, fewer stages per rank or more layers"
        )
    ranges = partition_layers(
        n_layers,
        stages,
        layer_costs if partition == "costs" else None,
        counts=layer_counts if partition == "counts" else None,
        first=first_cost if partition == "costs" else 0.0,
        last=last_cost if partition == "costs" else 0.0,
        allow_empty=allow_empty,
    )
    return PipelinePlan(
        config, program, n_layers, _assignments(program, ranges), _events(program, config, backward_ticks)
    )


def _check(
    n_layers: int,
    partition: str,
    backward_ticks: int | None,
    layer_costs: Sequence[float] | None,
    layer_counts: Sequence[int] | None,
) -> None:
    if whole("n_layers", n_layers, PartitionError) < 1:
        raise PartitionError(f"a plan needs at least 1 layer, got n_layers={n_layers}")
    if partition not in PARTITIONS:
        raise ConfigError(f"unknown partition {partition!r}; choose one of {', '.join(map(repr, PARTITIONS))}")
    if backward_ticks is not None:
        positive("backward_ticks", backward_ticks)
    for name, value, wanted in (("layer_costs", layer_costs, "costs"), ("layer_counts", layer_counts, "counts")):
        if value is not None and partition != wanted:
            raise ConfigError(f"{name} is given, but partition is {partition!r}; say partition={wanted!r}")
    if partition == "counts" and layer_counts is None:
        raise ConfigError("partition is 'counts', but layer_counts is missing; give the layers of each stage")


def _assignments(program: Program, ranges: Sequence[range]) -> tuple[StageAssignment, ...]:
    placement = program.placement
    local = {stage: i for rank in range(program.num_ranks) for i, stage in enumerate(placement.stages_of(rank))}
    return tuple(StageAssignment(s, placement.rank_of(s), local[s], layers) for s, layers in enumerate(ranges))


def _events(program: Program, config: ScheduleConfig, backward_ticks: int | None) -> tuple[PlanEvent, ...]:
    if backward_ticks is None:
        splits = not isinstance(config, GreedyConfig) and any(
            part.op == Op.W for _, _, action in program.actions() for part in action.computes
        )
        backward_ticks = 2 if splits else 1
    timeline = simulate(program, CostModel(backward=backward_ticks))
    events = (PlanEvent(e.rank, round(e.start), e.action, round(e.end - e.start)) for e in timeline.events)
    return tuple(sorted(events, key=lambda event: (event.tick, event.rank)))


def _checked_rank(plan: PipelinePlan, rank: int) -> int:
    if not 0 <= whole("rank", rank) < plan.num_ranks:
        raise ConfigError(f"rank {rank} is outside 0..{plan.num_ranks - 1}; the plan has {plan.num_ranks} ranks")
    return rank


# --- one rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankWorkload:
    """What one process of a job does: its place in the job, its stages, its forwards and its backwards by tick."""

    global_rank: int
    pipeline_rank: int
    data_parallel_rank: int
    assignments: tuple[StageAssignment, ...]
    forward_events: tuple[PlanEvent, ...]
    backward_events: tuple[PlanEvent, ...]
    """B, or I and W."""


def rank_workload(plan: PipelinePlan, global_rank: int, pipeline_rank: int, data_parallel_rank: int) -> RankWorkload:
    """The work of the process that is `pipeline_rank` of the pipeline numbered `data_parallel_rank`.

    Raises ConfigError for a pipeline rank that the plan does not have, or a negative rank.
    """
    for name, value in (("global_rank", global_rank), ("data_parallel_rank", data_parallel_rank)):
        if value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value}")
    events = plan.events_for(pipeline_rank)
    return RankWorkload(
        global_rank,
        pipeline_rank,
        data_parallel_rank,
        plan.assignments_for(pipeline_rank),
        tuple(event for event in events if event.action.op == Op.F),
        tuple(event for event in events if event.action.op != Op.F),
    )


# --- one parameter shared by all stages -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedWeightReport:
    """What tying one parameter over all stages must give.

    `reference_gradient` is the sum over all layers and microbatches in one process, `rank_gradients` the sum over each
    rank's own, `merged_gradient` their sum, `updated_weight` the weight after one step of plain SGD with it.
    """

    reference_gradient: Any
    rank_gradients: tuple[Any, ...]
    merged_gradient: Any
    updated_weight: Any


def shared_weight_gradients(
    plan: PipelinePlan, learning_rate: float, initial_weight: Any, gradient_fn: Callable[[int, int], Any]
) -> SharedWeightReport:
    """Add up the gradients of one parameter that every layer uses.

    `gradient_fn(layer, microbatch)` is asked once for each pair; it gives a number, or anything that adds and
    multiplies like one. Each rank adds in the order in which it runs the backwards (B, or W) of its stages; the
    reference by microbatch, then layer. Raises ConfigError for a plan without backwards.
    """
    if not plan.program.has_backward:
        raise ConfigError(
            f"schedule {plan.config.schedule!r} runs forwards only and has no gradients; plan a schedule that trains"
        )
    gradients = {
        (layer, microbatch): gradient_fn(layer, microbatch)
        for microbatch in range(plan.num_microbatches)
        for layer in range(plan.n_layers)
    }
    sums = []
    for rank in range(plan.num_ranks):
        total: Any = 0.0
        for event in plan.events_for(rank):
            op, stage, microbatch, _ = event.action
            if op in (Op.B, Op.W):
                for layer in plan.stage_assignments[stage].layer_range:
                    total = total + gradients[layer, microbatch]
        sums.append(total)
    merged = sum(sums[1:], sums[0])
    return SharedWeightReport(
        sum(gradients.values(), 0.0), tuple(sums), merged, initial_weight - learning_rate * merged
    )
