"""The commands plan and compare."""

from __future__ import annotations

from typing import Any, Literal

from hocket.cli.options import JSON, MICROBATCHES, RANKS, Command, Option, cost_options, parse_numbers
from hocket.cli.output import counter, say, say_json, table
from hocket.cli.sources import read_costs, read_schedule
from hocket.errors import ConfigError
from hocket.plan import PipelinePlan, build_pipeline_plan, compare
from hocket.program import Program


def _plan(values: dict[str, Any]) -> int:
    source = values["source"]
    if isinstance(source, Program):
        raise ConfigError("hocket plan takes a schedule and not a program; give its name, its JSON or a .json file")
    plan = build_pipeline_plan(
        values["layers"],
        source,
        ranks=values["ranks"],
        microbatches=values["microbatches"],
        partition=values["partition"],
        layer_costs=_row("layer_costs", values["layer_costs"]),
        layer_counts=_whole("layer_counts", values["layer_counts"]),
        first_cost=values["first_cost"],
        last_cost=values["last_cost"],
        allow_empty=values["allow_empty"],
        backward_ticks=values["backward_ticks"],
    )
    if values["rank"] is not None:
        _say_rank(plan, values["rank"], values["json"])
    elif values["json"]:
        say_json(plan.to_mapping())
    else:
        say(plan.summary())
        say("")
        head = ["stage", "rank", "local index", "layers", "count"]
        rows = [
            [str(a.stage), str(a.rank), str(a.local_index), _layers(a.layer_range), str(len(a.layer_range))]
            for a in plan.stage_assignments
        ]
        say(table(head, rows))
        say("")
        pairs = enumerate(zip(plan.metrics.busy_ticks, plan.metrics.idle_ticks, strict=True))
        say(table(["rank", "busy ticks", "idle ticks"], [[str(r), str(busy), str(idle)] for r, (busy, idle) in pairs]))
    return 0


def _say_rank(plan: PipelinePlan, rank: int, as_json: bool) -> None:
    """What one rank does, tick by tick."""
    events = plan.events_for(rank)
    if as_json:
        say_json([{"tick": e.tick, "ticks": e.ticks, "action": str(e.action)} for e in events])
    else:
        say(table(["tick", "ticks", "action"], [[str(e.tick), str(e.ticks), str(e.action)] for e in events]))


def _layers(layers: range) -> str:
    return f"{layers.start}..{layers.stop - 1}" if layers else "-"


def _compare(values: dict[str, Any]) -> int:
    costs = read_costs(values)
    given = values["schedules"]
    schedules = None if given is None else [read_schedule(name) if "." in name else name for name in given.split(",")]
    memory = _row("memory", values["memory"])
    with counter("comparing schedules") as progress:
        found = compare(
            costs,
            ranks=values["ranks"],
            microbatches=values["microbatches"],
            memory=memory[0] if memory and len(memory) == 1 else memory,
            n_layers=values["layers"],
            schedules=schedules,
            stages_per_rank=_whole("stages_per_rank", values["stages_per_rank"]) or [1],
            progress=progress,
        )
    if values["json"]:
        say_json(found.to_mapping())
    else:
        say(str(found))
    return 0


def _row(name: str, text: str | None) -> list[float] | None:
    found = None if text is None else parse_numbers(name, text)
    return found if found is None or isinstance(found, list) else [found]


def _whole(name: str, text: str | None) -> list[int] | None:
    found = _row(name, text)
    if found is None:
        return None
    if not all(value.is_integer() for value in found):
        raise ConfigError(f"--{name.replace('_', '-')} is {text!r:.60}; write whole numbers with commas between them")
    return list(map(int, found))


_NUMBERS = "X[,X...]"

PLAN = Command(
    "plan",
    "Divide layers over the stages of a schedule and print who does what when. An F, I or W takes a tick.",
    (
        Option("layers", int, "Layers of the model."),
        RANKS,
        MICROBATCHES,
        JSON,
        Option("rank", int | None, "Print what this rank does, tick by tick.", None, "R"),
        Option("partition", Literal["even", "costs", "counts"], "How layers are divided over stages.", "even"),
        Option("layer_costs", str | None, "With --partition costs: the cost of each layer.", None, _NUMBERS),
        Option("layer_counts", str | None, "With --partition counts: the layers of each stage.", None, "N[,N...]"),
        Option("first_cost", float, "With --partition costs: what the first stage costs besides layers.", 0.0),
        Option("last_cost", float, "With --partition costs: what the last stage costs besides layers.", 0.0),
        Option("allow_empty", bool, "Stages may have no layer.", False),
        Option("backward_ticks", int | None, "Ticks of a full backward, if not those of the schedule.", None, "N"),
    ),
    _plan,
)

COMPARE = Command(
    "compare",
    "Print a table over schedules, the fastest that fits first. Costs are those of a rank's share of the model, or "
    "with --layers of one layer.",
    (
        RANKS,
        MICROBATCHES,
        JSON,
        Option(
            "schedules", str | None, "Names, or files, of those to compare; all that train.", None, "NAME[,NAME...]"
        ),
        Option("stages_per_rank", str, "Numbers of stages per rank to try.", "1,2,4", "N[,N...]"),
        Option("memory", str | None, "What a rank may hold: bytes, or activations of its share.", None, _NUMBERS),
        Option("layers", int | None, "Layers of the model; costs are then those of a layer.", None, "N"),
        *cost_options(),
    ),
    _compare,
    takes_schedule=False,
)
