"""Compares schedules, and searches for the fastest that fits a memory budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args, get_origin

from hocket.bound import lower_bound
from hocket.collector import collector_paused
from hocket.cost import CostModel
from hocket.counts import positive
from hocket.errors import ConfigError
from hocket.partition import partition_layers
from hocket.program import Program
from hocket.schedules import ScheduleConfig, build, config_type_of, parse_schedule, schedule_names
from hocket.simulate import peak_bytes, simulate

Schedules = Iterable[ScheduleConfig | Mapping[str, Any] | str]
Memory = float | Sequence[float]


# --- candidates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One way to run the model, and what it comes to.

    Times are in the unit of the costs. `peak_bytes` and `peak_in_flight` are those of the rank that holds most; where
    the costs give activations no size, `peak_bytes` counts activations of one rank's whole share. `lower_bound` holds
    for any schedule at the same costs and placement within the memory budget (with any memory if there is none), or,
    for one that does not fit, within what it uses. A candidate with `refused` was not run: that text says why.
    """

    config: ScheduleConfig
    microbatches: int
    stages_per_rank: int = 0
    layers: tuple[range, ...] = ()
    makespan: float = math.inf
    bubble_fraction: float = 1.0
    peak_bytes: float = math.inf
    peak_in_flight: int = 0
    lower_bound: float = 0.0
    fits: bool = False
    refused: str = ""

    @property
    def distance(self) -> float:
        """How much longer it takes than the lower bound: 0.05 is 5 %."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def name(self) -> str:
        """The schedule with the options that differ from their defaults, besides the stages per rank."""
        options = self.config.model_dump(exclude={"schedule", "num_stages_per_rank"}, exclude_defaults=True)
        texts = [name if value is True else str(value) for name, value in options.items()]
        return " ".join([self.config.schedule, *texts])

    def to_mapping(self) -> dict[str, Any]:
        """The candidate as JSON values."""
        found: dict[str, Any] = {"schedule": self.config.model_dump(), "microbatches": self.microbatches}
        if self.refused:
            return {**found, "refused": self.refused}
        found |= {"stages_per_rank": self.stages_per_rank, "makespan": self.makespan}
        found |= {"bubble_fraction": self.bubble_fraction, "peak_bytes": self.peak_bytes}
        found |= {"peak_in_flight": self.peak_in_flight, "lower_bound": self.lower_bound, "distance": self.distance}
        return found | {"fits": self.fits, "layers": [[stage.start, stage.stop] for stage in self.layers]}


@dataclass(frozen=True)
class Comparison:
    """Candidates, the fastest that fits first; then those that do not fit, then those refused."""

    rows: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits, or None."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def to_mapping(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [row.to_mapping() for row in self.rows]

    def __str__(self) -> str:
        """A table for people; refused candidates below it with their reasons."""
        head = ("schedule", "stages/rank", "microbatches", "makespan", "bubble", "peak", "over bound", "fits")
        table = [head] + [
            (
                row.name,
                str(row.stages_per_rank),
                str(row.microbatches),
                f"{row.makespan:.6g}",
                f"{row.bubble_fraction:.1%}",
                f"{row.peak_bytes:.4g}",
                f"{row.distance:.1%}",
                "yes" if row.fits else "no",
            )
            for row in self.rows
            if not row.refused
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        return "\n".join([*lines, *(f"refused: {row.name}: {row.refused}" for row in self.rows if row.refused)])


@dataclass(frozen=True)
class SearchResult:
    """What a search found: the `best` candidate, all that were run or refused, how many were not run because a bound
    shows that they are slower (`skipped`), and how many because they do not fit (`too_large`).
    """

    best: Candidate
    tried: Comparison
    skipped: int
    too_large: int

    @cached_property
    def summary(self) -> str:
        """One line about the best."""
        best = self.best
        return (
            f"{best.name}, {best.stages_per_rank} stages per rank, {best.microbatches} microbatches: makespan "
            f"{best.makespan:.6g}, bubble {best.bubble_fraction:.1%}, peak {best.peak_bytes:.4g}, "
            f"{best.distance:.1%} over the lower bound"
        )


def expand(schedules: Schedules | None, stages_per_rank: Sequence[int]) -> list[ScheduleConfig]:
    """Configs to look at: those given as they are; for a bare name (default: every schedule that trains), every option
    that has a few values, and each number of stages per rank.
    """
    if isinstance(schedules, str):
        raise ConfigError(f"schedules is {schedules!r}; give a list of them: [{schedules!r}]")
    for number in stages_per_rank:
        positive("stages_per_rank", number)
    found: list[ScheduleConfig] = []
    for item in schedules if schedules is not None else [n for n in schedule_names() if n != "inference"]:
        if isinstance(item, str) and not item.lstrip().startswith("{"):
            found += _variants(config_type_of(item.strip()), stages_per_rank)
        else:
            found.append(parse_schedule(item))
    return list(dict.fromkeys(found))


def _variants(config_type: type[ScheduleConfig], stages_per_rank: Sequence[int]) -> Iterator[ScheduleConfig]:
    choices: dict[str, Sequence[Any]] = {}
    for name, field in config_type.model_fields.items():
        if name == "num_stages_per_rank":
            choices[name] = stages_per_rank
        elif field.annotation is bool:
            choices[name] = (False, True)
        elif get_origin(field.annotation) is Literal:
            choices[name] = get_args(field.annotation)
    for values in itertools.product(*choices.values()):
        yield parse_schedule(config_type(**dict(zip(choices, values, strict=True))))


Layers = Callable[[int], tuple[range, ...]]
"""From a number of stages to their layers; none where costs are not per layer."""


@dataclass(frozen=True)
class _Setup:
    """A candidate ready to run: its program and the costs of its stages."""

    config: ScheduleConfig
    program: Program
    layers: tuple[range, ...]
    costs: CostModel

    @cached_property
    def key(self) -> tuple[str, int, tuple[range, ...], int]:
        """The same for two variants of a schedule that came out alike."""
        return self.config.schedule, self.program.num_microbatches, self.layers, hash(self.program.ranks)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        return peak_bytes(self.program, self.costs)

    def fits(self, limits: Sequence[float]) -> bool:
        return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(self.peaks, limits, strict=True))

    def bound(self, limits: Sequence[float]) -> float:
        """What nothing at these costs and placement beats within `limits`, or within what this one holds if more."""
        program, room = self.program, None
        costs = replace(self.costs, static_bytes=0.0)
        if math.inf not in limits:
            static = self.costs.static_of(program.num_ranks)
            own = peak_bytes(program, costs)  # small activations would drown in the rounding of large static bytes
            room = [max(limit - part, held) for limit, part, held in zip(limits, static, own, strict=True)]
        return lower_bound(program.placement, program.num_microbatches, costs, room)

    def run(self, limits: Sequence[float]) -> Candidate:
        program, fits = self.program, self.fits(limits)
        with collector_paused():
            timeline = simulate(program, self.costs, check=False)
        return Candidate(
            self.config,
            program.num_microbatches,
            program.num_stages // program.num_ranks,
            self.layers,
            timeline.makespan,
            timeline.bubble_fraction,
            max(self.peaks),
            max(timeline.peak_in_flight),
            min(timeline.makespan, self.bound(limits if fits else [0.0] * program.num_ranks)),
            fits,
        )


def _prepare(
    config: ScheduleConfig,
    costs: CostModel,
    ranks: int,
    microbatches: int,
    layers_of: Layers,
    first: CostModel | None = None,
    last: CostModel | None = None,
) -> _Setup | Candidate:
    """Build a candidate, or say why it is refused."""
    try:
        program = build(config, ranks=ranks, microbatches=microbatches)
        layers = layers_of(program.num_stages)
    except ConfigError as error:
        return Candidate(config, microbatches, refused=str(error))
    if not costs.counts_bytes:
        unit = ranks / layers[-1].stop if layers else 1.0
        costs = replace(costs, activation_bytes=unit, weight_bytes=unit)
    hosted = program.num_stages // ranks
    return _Setup(config, program, layers, costs.of_stages(layers, first, last) if layers else costs.divided(hosted))


# --- the two ways to ask ----------------------------------------------------------------------------------------------


def compare(
    costs: CostModel | None = None,
    *,
    ranks: int,
    microbatches: int,
    memory: Memory | None = None,
    n_layers: int | None = None,
    schedules: Schedules | None = None,
    stages_per_rank: Sequence[int] = (1, 2, 4),
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """A table over schedules and stages per rank: makespan, bubble, peak memory, distance to the bound, which fit.

    `costs` are those of one microbatch on one rank's share of the model, of which each stage gets its equal part; or,
    with `n_layers`, those of single layers, spread evenly over the stages. Messages are not divided. `memory` is what a
    rank may hold, in bytes, or, where `costs` give activations no size, in activations of a rank's whole share.
    `progress(done, total)` is called after each candidate. Builders' programs are taken as legal; `verify` proves it.

    Raises ConfigError for costs or memory of a wrong length. What a schedule refuses is a row that says so.
    """
    costs = costs or CostModel()
    limits = _limits(memory, ranks)
    configs = expand(schedules, stages_per_rank)
    layers_of: Layers = lambda stages: () if n_layers is None else tuple(partition_layers(n_layers, stages))  # noqa: E731
    rows: list[Candidate] = []
    seen = set()
    for done, config in enumerate(configs, 1):
        setup = _prepare(config, costs, ranks, microbatches, layers_of)
        if isinstance(setup, Candidate):
            rows.append(setup)
        elif setup.key not in seen:
            seen.add(setup.key)
            rows.append(setup.run(limits))
        if progress:
            progress(done, len(configs))
    return _sorted(rows)


def search(
    n_layers: int,
    costs: CostModel,
    *,
    ranks: int,
    microbatches: int | Sequence[int],
    memory: Memory | None = None,
    batch: int | None = None,
    first: CostModel | None = None,
    last: CostModel | None = None,
    schedules: Schedules | None = None,
    stages_per_rank: Sequence[int] = (1, 2, 4),
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The fastest schedule, stages per rank, number of microbatches and partition that fit the memory of each rank.

    `costs` are those of single layers (numbers, or one per layer) for one microbatch; with `batch`, for one item of it,
    so that several numbers of `microbatches` can be weighed: each then has batch / microbatches items, rounded up.
    `first` and `last` are the costs of the embedding and the head. Partitions looked at: even, and by costs. A
    candidate that does not fit, or whose lower bound is above the best found, is not run. Ties go to the smaller peak.

    Raises ConfigError if nothing fits (with the least memory that would do), or if several numbers of microbatches are
    given without `batch`.
    """
    options = [microbatches] if isinstance(microbatches, int) else list(dict.fromkeys(microbatches))
    limits = _limits(memory, ranks)
    _check_options(options, batch)
    cases = list(itertools.product(options, expand(schedules, stages_per_rank)))
    hunt = _Hunt(limits)
    partitions = (_by_costs(n_layers, costs, first, last), lambda stages: tuple(partition_layers(n_layers, stages)))
    for done, (count, config) in enumerate(cases, 1):
        size = 1 if batch is None else -(-batch // count)
        ends = [None if extra is None else extra.scaled(size) for extra in (first, last)]
        for layers_of in partitions:
            hunt.look(_prepare(config, costs.scaled(size), ranks, count, layers_of, *ends))
        if progress:
            progress(done, len(cases))
    tried = _sorted(hunt.rows)
    if tried.best is None:
        raise ConfigError(hunt.nothing_fits(tried, memory))
    return SearchResult(tried.best, tried, hunt.skipped, hunt.too_large)


class _Hunt:
    """The state of a search: what was run, what the best takes, what was passed over, and the least memory seen."""

    def __init__(self, limits: Sequence[float]):
        self.limits, self.rows, self.best = limits, [], math.inf
        self.skipped = self.too_large = 0
        self.least: tuple[float, _Setup] | None = None
        self.seen: set[object] = set()

    def look(self, setup: _Setup | Candidate) -> None:
        """Run the candidate, unless it is too large, cannot beat the best, or was seen."""
        key = (setup.config, setup.refused) if isinstance(setup, Candidate) else setup.key
        if key in self.seen:
            return
        self.seen.add(key)
        if isinstance(setup, Candidate):
            self.rows.append(setup)
            return
        if not setup.fits(self.limits):
            self.too_large += 1
            if self.least is None or max(setup.peaks) < self.least[0]:
                self.least = max(setup.peaks), setup
        elif setup.bound(self.limits) > self.best:
            self.skipped += 1
        else:
            self.rows.append(setup.run(self.limits))
            self.best = min(self.best, self.rows[-1].makespan)

    def nothing_fits(self, tried: Comparison, memory: Memory | None) -> str:
        if self.least is None:
            return f"every candidate was refused; the first: {tried.rows[0].name}: {tried.rows[0].refused}"
        peak, setup = self.least
        program = setup.program
        return (
            f"nothing fits on {program.num_ranks} ranks with memory {memory}: the least is {peak:.6g} on one rank, by "
            f"{setup.config.schedule!r} with {program.num_stages // program.num_ranks} stages per rank and "
            f"{program.num_microbatches} microbatches; raise memory, use more ranks, or smaller microbatches"
        )


def _sorted(rows: Iterable[Candidate]) -> Comparison:
    return Comparison(tuple(sorted(rows, key=lambda r: (bool(r.refused), not r.fits, r.makespan, r.peak_bytes))))


def _by_costs(n_layers: int, costs: CostModel, first: CostModel | None, last: CostModel | None) -> Layers:
    """Partition by the time of F and B of each layer, with the embedding and the head."""
    times = [
        f + b for f, b in zip(costs.per_stage("forward", n_layers), costs.per_stage("backward", n_layers), strict=True)
    ]
    ends = [0.0 if x is None else x.per_stage("forward", 1)[0] + x.per_stage("backward", 1)[0] for x in (first, last)]
    return lambda stages: tuple(partition_layers(n_layers, stages, times, first=ends[0], last=ends[1]))


def _limits(memory: Memory | None, ranks: int) -> tuple[float, ...]:
    """What each rank may hold; infinite where nothing is said."""
    try:
        if memory is None or isinstance(memory, int | float):
            limits = (math.inf if memory is None else float(memory),) * ranks
        else:
            limits = tuple(map(float, memory))
    except (TypeError, ValueError):
        raise ConfigError(f"memory is {memory!r}; give a number, or one for each rank") from None
    if len(limits) != ranks:
        raise ConfigError(f"memory has {len(limits)} numbers for {ranks} ranks; give one number, or {ranks}")
    for number in limits:
        if not number > 0:
            raise ConfigError(f"memory is {number:g}; give each rank more than 0, or None for no limit")
    return limits


def _check_options(options: Sequence[int], batch: int | None) -> None:
    if not options:
        raise ConfigError("microbatches is empty; give at least one number")
    if batch is None and len(options) > 1:
        raise ConfigError(
            f"microbatches has {len(options)} numbers, whose steps would not do the same work; give batch, the items "
            "of a step, with costs per item"
        )
    for count in options:
        positive("microbatches", count)
        if batch is not None and not 1 <= count <= batch:
            raise ConfigError(f"cannot split {batch} items into {count} microbatches; use 1 to {batch} microbatches")
