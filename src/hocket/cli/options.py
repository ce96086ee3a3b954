"""Options of a command, derived from the configs and the cost model with their own docs, and parsed by tyro."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from hocket.cost import CostModel
from hocket.errors import ConfigError
from hocket.schedules import ScheduleConfig, config_type_of, schedule_names

REQUIRED: Any = object()
"""The default of an option that must be given."""


@dataclass(frozen=True)
class Option:
    """One option of a command. `default` is REQUIRED, or what the command sees when it is left out."""

    name: str
    type: Any
    help: str
    default: Any = REQUIRED
    metavar: str | None = None
    positional: bool = False

    @property
    def takes_value(self) -> bool:
        return self.type is not bool


@dataclass(frozen=True)
class Command:
    """A command of `hocket`: `run(values)` does it, with the value of each option by name."""

    name: str
    summary: str
    options: tuple[Option, ...]
    run: Callable[[dict[str, Any]], int]
    takes_schedule: bool = True


SCHEDULE = Option(
    "schedule",
    str,
    "Name of a schedule, its JSON, or a file: .json or .yaml with a schedule, .csv or .txt with a program.",
    metavar="SCHEDULE",
    positional=True,
)
RANKS = Option("ranks", int, "Ranks of the pipeline.")
MICROBATCHES = Option("microbatches", int, "Microbatches of a step.")
JSON = Option("json", bool, "Write JSON instead of text.", False)


# --- options of the schedules -----------------------------------------------------------------------------------------


def schedule_options(
    config_type: type[ScheduleConfig], taken: Sequence[str], config: ScheduleConfig | None
) -> dict[str, Option]:
    """An option for each field of `config_type`, by field; its default is that of `config`, or of the type.

    A field named like an option of the command gets the prefix `schedule_`.
    """
    found = {}
    for name in config_type.options():
        field = config_type.model_fields[name]
        default = getattr(config, name) if config else field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            default = REQUIRED
        kind = _plain(field.annotation)
        if kind is None:
            kind, default = str, default if default is REQUIRED else json.dumps(_jsonable(default))
        shown = f"schedule_{name}" if name in taken else name
        help_text = " ".join((field.description or "").split())
        found[name] = Option(shown, kind, help_text, default, None if _plain(field.annotation) else "JSON")
    return found


def schedule_mapping(
    config_type: type[ScheduleConfig], options: dict[str, Option], values: dict[str, Any]
) -> dict[str, Any]:
    """The mapping for `parse_schedule` that the values of `schedule_options` describe."""
    mapping: dict[str, Any] = {"schedule": config_type.model_fields["schedule"].default}
    for name, option in options.items():
        value = values[option.name]
        if option.metavar == "JSON":
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{_flag(option.name)} is no valid JSON: {error}; got {value!r:.60}") from None
        mapping[name] = value
    return mapping


def _plain(annotation: Any) -> Any:
    """The type if a command line can write it, else None: then the option takes JSON."""
    simple = (bool, int, float, str)
    if annotation in simple or get_origin(annotation) is Literal:
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        return annotation if len(inner) == 1 and inner[0] in simple and inner[0] is not bool else None
    return None


def _jsonable(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def schedule_list() -> str:
    """The names of all schedules with the first sentence of their docs."""
    docs = {name: inspect.getdoc(config_type_of(name)) or "" for name in schedule_names()}
    width = max(map(len, docs))
    return "\n".join(f"  {name:<{width}}  {' '.join(doc.split('.')[0].split())}." for name, doc in docs.items())


# --- options of the costs ---------------------------------------------------------------------------------------------


@cache
def cost_options() -> tuple[Option, ...]:
    """An option for each field of CostModel, and one for all of them as JSON."""
    docs = _attribute_docs(CostModel)
    found = [Option("costs", str | None, "Costs as JSON, or a .json or .yaml file of them.", None, "JSON|FILE")]
    for field in dataclasses.fields(CostModel):
        metavar = "X[,X...]" if "PerStage" in str(field.type) else "X"
        default = "none" if field.default is None else f"{field.default:g}"
        text = f"{docs.get(field.name, '')} Default: {default}.".strip()
        found.append(Option(field.name, str | None, text, None, metavar))
    return tuple(found)


def cost_values(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of CostModel that were given as options."""
    found = {}
    for field in dataclasses.fields(CostModel):
        text = values.get(field.name)
        if text is not None:
            found[field.name] = parse_numbers(field.name, text)
    return found


def parse_numbers(name: str, text: str) -> float | list[float] | None:
    """One number, or several between commas; None for `none`. Raises ConfigError."""
    if text.strip().lower() == "none":
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{_flag(name)} is {text!r:.60}; write a number, or numbers with commas between them: 1,1,2"
        ) from None
    return found[0] if len(found) == 1 else found


def _attribute_docs(cls: type) -> dict[str, str]:
    """The strings under the fields of a class; empty where its source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, SyntaxError):
        return {}
    found, name = {}, None
    for node in getattr(body, "body", []):
        if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        name = node.target.id if is_field else None
    return found


# --- parsing ----------------------------------------------------------------------------------------------------------


def find_schedule(command: Command, args: Sequence[str]) -> int | None:
    """Where the schedule stands in `args`: the first that is no option nor the value of one; or None."""
    fields = [
        option
        for name in schedule_names()
        for option in schedule_options(config_type_of(name), [o.name for o in command.options], None).values()
    ]
    valued = {_flag(o.name) for o in (*command.options, *fields) if o.takes_value}
    skip = False
    for index, arg in enumerate(args):
        if skip:
            skip = False
        elif not arg.startswith("-") or arg == "-":
            return index
        else:
            skip = arg.replace("_", "-") in valued
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(
    command: Command, options: Sequence[Option], args: Sequence[str], description: str, of: str = ""
) -> dict[str, Any]:
    """The value of each option. Exits with 2 and a message on standard error if `args` do not fit, as tyro does.

    `of` is the schedule, if it has been taken out of `args`.
    """
    import tyro

    fields: list[Any] = []
    for option in sorted(options, key=lambda option: option.default is not REQUIRED):
        hint = "" if option.default is None else None
        about = tyro.conf.arg(help=option.help, metavar=option.metavar, help_behavior_hint=hint)
        kind: Any = Annotated[option.type, about]
        if option.positional:
            kind = tyro.conf.Positional[kind]
        fields.append((option.name, kind) if option.default is REQUIRED else (option.name, kind, option.default))
    shape = dataclasses.make_dataclass(command.name, fields)
    parsed = tyro.cli(
        shape,
        prog=f"hocket {command.name} {of}".strip(),
        description=description,
        args=list(args),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return {option.name: getattr(parsed, option.name) for option in options}
