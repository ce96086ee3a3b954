"""The commands show, verify, simulate and draw, and how any command is run."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hocket.cli.options import (
    JSON,
    MICROBATCHES,
    RANKS,
    SCHEDULE,
    Command,
    Option,
    cost_options,
    find_schedule,
    parse,
    schedule_list,
    schedule_mapping,
    schedule_options,
)
from hocket.cli.output import facts, number, percent, prints, progress, say, say_json, size, table, wants_color
from hocket.cli.sources import build_program, is_program_file, read_costs, read_program, read_schedule
from hocket.errors import ConfigError, HocketError, ProgramError
from hocket.passes import lower
from hocket.program import Program
from hocket.schedules import ScheduleConfig, config_type_of, parse_schedule, schedule_names
from hocket.simulate import Timeline, simulate
from hocket.verify import verify


def run(name: str, args: Sequence[str]) -> int:
    """Parse `args` for the command `name` and run it; returns the exit code."""
    if name in ("plan", "compare"):
        from hocket.cli.planning import COMPARE, PLAN

        command = PLAN if name == "plan" else COMPARE
    else:
        command = _COMMANDS[name]
    if not command.takes_schedule:
        return command.run(parse(command, command.options, args, command.summary))
    return _run_with_schedule(command, args)


def _run_with_schedule(command: Command, args: Sequence[str]) -> int:
    """The options of a command depend on the schedule: its fields are among them."""
    place = find_schedule(command, args)
    if place is None:
        about = f"{command.summary}\n\nSchedules, each with options of its own (hocket {command.name} NAME --help):"
        parse(command, (SCHEDULE, *command.options), args, f"{about}\n\n{schedule_list()}")
        raise ConfigError(f"hocket {command.name} got no schedule; give its name first")
    source, args = args[place], [*args[:place], *args[place + 1 :]]
    if is_program_file(source):
        options = [option for option in command.options if option not in (RANKS, MICROBATCHES)]
        values = parse(command, options, args, f"{command.summary}\n\nThe program is that of {source}.", source)
        return command.run({**values, "source": read_program(source)})
    # A bare name may leave out fields that have no default: options give them.
    config = None if source in schedule_names() else read_schedule(source)
    config_type = type(config) if config else config_type_of(source)
    fields = schedule_options(config_type, [option.name for option in command.options], config)
    name = config.schedule if config else source
    about = f"{command.summary}\n\nSchedule {name}: {' '.join((config_type.__doc__ or '').split())}"
    values = parse(command, (*fields.values(), *command.options), args, about, source)
    config = parse_schedule(schedule_mapping(config_type, fields, values))
    return command.run({**values, "source": config})


# --- show -------------------------------------------------------------------------------------------------------------


def _show(values: dict[str, Any]) -> int:
    source = values["source"]
    program = build_program(source, values)
    if values["lowered"]:
        program = lower(program)
    if values["json"]:
        say_json(
            {
                **_schedule_json(source),
                "num_microbatches": program.num_microbatches,
                "stage_to_rank": list(program.placement.stage_to_rank),
                "ranks": [[str(action) for action in actions] for actions in program.ranks],
            }
        )
    else:
        say(program.to_csv() if values["csv"] else program.to_text())
    return 0


def _schedule_json(source: ScheduleConfig | Program) -> dict[str, Any]:
    return {} if isinstance(source, Program) else {"schedule": source.model_dump(mode="json")}


# --- verify -----------------------------------------------------------------------------------------------------------


def _verify(values: dict[str, Any]) -> int:
    try:
        program = read_program(values["file"])
        with progress("proving"):
            verify(program)
    except ProgramError as error:
        if values["json"]:
            say_json({"legal": False, "error": str(error)})
        raise
    count = sum(map(len, program.ranks))
    if values["json"]:
        say_json(
            {
                "legal": True,
                "num_ranks": program.num_ranks,
                "num_stages": program.num_stages,
                "num_microbatches": program.num_microbatches,
                "num_actions": count,
                "lowered": program.is_lowered,
            }
        )
    else:
        kind = "with communication" if program.is_lowered else "compute only"
        say(
            f"legal: {program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches, "
            f"{count} actions, {kind}"
        )
    return 0


# --- simulate ---------------------------------------------------------------------------------------------------------


def _timeline(values: dict[str, Any]) -> Timeline:
    costs = read_costs(values)
    with progress("simulating"):
        program = build_program(values["source"], values)
        return simulate(lower(program) if values["lowered"] else program, costs, values["mode"])


def _simulate(values: dict[str, Any]) -> int:
    timeline = _timeline(values)
    with progress("bounding from below"):
        found = {
            "makespan": timeline.makespan,
            "span": timeline.span,
            "lower_bound": timeline.lower_bound,
            "bubble_fraction": timeline.bubble_fraction,
            "busy": list(timeline.busy),
            "idle": list(timeline.idle),
            "peak_in_flight": list(timeline.peak_in_flight),
            "peak_bytes": list(timeline.peak_bytes),
        }
    if values["json"]:
        say_json({**_schedule_json(values["source"]), "mode": timeline.mode, **found})
        return 0
    over = timeline.makespan / timeline.lower_bound - 1 if timeline.lower_bound else 0.0
    say(
        facts(
            [
                ("makespan", number(timeline.makespan)),
                ("span", number(timeline.span)),
                ("lower bound", f"{number(timeline.lower_bound)} (makespan is {percent(over)} above)"),
                ("bubble", percent(timeline.bubble_fraction)),
            ]
        )
    )
    peaks = timeline.peak_bytes
    head = ["rank", "busy", "idle", "peak in flight", *(["peak memory"] if any(peaks) else [])]
    rows = [
        [str(r), number(busy), number(idle), str(flight), *([size(peak)] if any(peaks) else [])]
        for r, (busy, idle, flight, peak) in enumerate(
            zip(timeline.busy, timeline.idle, timeline.peak_in_flight, peaks, strict=True)
        )
    ]
    say("")
    say(table(head, rows))
    return 0


# --- draw -------------------------------------------------------------------------------------------------------------


def _draw(values: dict[str, Any]) -> int:
    from hocket.draw import Source, draw_html, draw_text, draw_trace, read_trace, save_figure

    timeline, path = _timeline(values), values["output"]
    suffix = Path(path).suffix.lower() if path else ".txt"
    if values["json"]:
        if path and suffix != ".json":
            raise ConfigError(f"--json draws a Chrome trace, but --output is {path!r}; leave one out or name it .json")
        suffix = ".json"
    title = values["source"].schedule if isinstance(values["source"], ScheduleConfig) else "program"
    sources: Source | dict[str, Source] = timeline
    if values["measured"]:
        text = _read_text(values["measured"])
        sources = {title: timeline, "measured": read_trace(text)}
    same = values["measured"] is None
    with progress("drawing"):
        match suffix:
            case ".txt":
                width = values["width"] or shutil.get_terminal_size((100, 24)).columns
                window = {"start": values["start"], "end": values["end"]}
                color = wants_color("never" if path else values["color"])
                text = draw_text(
                    sources,
                    width=width,
                    color=color,
                    ascii_only=values["ascii"] or not (path or prints("│·─")),
                    same_scale=same,
                    **window,
                )
            case ".json":
                text = draw_trace(sources)
            case ".html":
                text = draw_html(sources, title=title)
            case ".png" | ".svg" | ".pdf":
                with _writing(path):
                    save_figure(sources, path, same_scale=same)
                return 0
            case _:
                raise ConfigError(
                    f"--output is {path!r}; its suffix says what is drawn: .txt, .json (Chrome trace), .html, .png, "
                    ".svg or .pdf"
                )
    if path:
        _write(path, text)
    else:
        say(text)
    return 0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path!r}: {error}") from None


def _write(path: str, text: str) -> None:
    with _writing(path):
        Path(path).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


@contextmanager
def _writing(path: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, HocketError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot write {path!r}: {reason}") from None


# --- the table of commands --------------------------------------------------------------------------------------------

_LOWERED = Option("lowered", bool, "With the sends and receives that a run needs.", False)
_MODE = Option(
    "mode",
    Literal["buffered", "rendezvous"],
    "When a message of a lowered program may start: when its send is issued, or, as NCCL does, when both ends are.",
    "buffered",
)
_SIMULATED = (RANKS, MICROBATCHES, JSON, _LOWERED, _MODE, *cost_options())

_COMMANDS = {
    "show": Command(
        "show",
        "Print the program of a schedule: for each rank its actions, in order.",
        (
            RANKS,
            MICROBATCHES,
            JSON,
            _LOWERED,
            Option("csv", bool, "Write CSV, as torch does: a line for each rank.", False),
        ),
        _show,
    ),
    "verify": Command(
        "verify",
        "Prove that a program is complete, ordered, paired and free of deadlock; else show the fault and exit with 1.",
        (
            Option(
                "file",
                str,
                "The program: CSV (ours or torch's), text or JSON of `hocket show`; - for standard input.",
                metavar="FILE",
                positional=True,
            ),
            JSON,
        ),
        _verify,
        takes_schedule=False,
    ),
    "simulate": Command(
        "simulate",
        "Print when a step ends, what is idle and what is held. Times are in the unit of the costs.",
        _SIMULATED,
        _simulate,
    ),
    "draw": Command(
        "draw",
        "Draw the timeline of a step. The suffix of --output says how; without it, text goes to standard output.",
        (
            Option(
                "output",
                str | None,
                "File to write: .txt, .png, .svg, .pdf, .html, or .json (Chrome trace).",
                None,
                "FILE",
            ),
            Option("width", int | None, "Columns of a text; otherwise those of the terminal, or 100.", None, "N"),
            Option("start", float, "Time at which a text begins.", 0.0),
            Option("end", float | None, "Time at which a text ends.", None, "X"),
            Option("color", Literal["auto", "always", "never"], "Colours in a text.", "auto"),
            Option("ascii", bool, "Only ASCII characters in a text.", False),
            Option("measured", str | None, "Chrome trace of a run, drawn below, to its own scale.", None, "FILE"),
            *_SIMULATED,
        ),
        _draw,
    ),
}
