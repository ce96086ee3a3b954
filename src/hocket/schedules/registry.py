"""The table of schedules, keyed by config type: how a schedule is registered, named, parsed and built.

A schedule is one file: a config type and its builder.

    class MineConfig(ScheduleConfig):
        schedule: Literal["mine"] = "mine"

    @register_schedule(MineConfig)
    def build_mine(config: MineConfig, ranks: int, microbatches: int) -> Program: ...

From then on `parse_schedule({"schedule": "mine"})` and `build(MineConfig(), ranks=4, microbatches=8)` work.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hocket.collector import collector_paused
from hocket.counts import positive
from hocket.errors import ConfigError, ScheduleError
from hocket.program import Action, Program

MOST_FORWARDS = 1 << 25
"""Of a program, for one stage per rank: some gigabytes. More is a slip of the hand."""


class ScheduleConfig(BaseModel):
    """Base of all schedule configs. A config describes a schedule; its builder makes the program."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    schedule: str
    """Name of the schedule; each config type narrows it to one `Literal` with that default."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of its fields besides `schedule`."""
        return tuple(name for name in cls.model_fields if name != "schedule")


Config = TypeVar("Config", bound=ScheduleConfig)
Builder = Callable[[Config, int, int], Program]
RankOrder = Callable[[Config, int, int, int], list[Action]]


@dataclass(frozen=True)
class _Entry:
    config_type: type[ScheduleConfig]
    build: Callable[[Any, int, int], Program]
    rank_order: Callable[[Any, int, int, int], list[Action]] | None


_entries: dict[type[ScheduleConfig], _Entry] = {}


def register_schedule(
    config_type: type[Config], *, rank_order: RankOrder[Config] | None = None
) -> Callable[[Builder[Config]], Builder[Config]]:
    """Register the function below as the builder of `config_type`, called as `builder(config, ranks, microbatches)`.

    The name is the default of the config's `schedule` field. `rank_order(config, rank, ranks, microbatches)` makes
    one rank's list without those of the others; leave it out where the order is not known in closed form.
    """
    name = _name_of(config_type)
    taken = _by_name().get(name)
    if taken is not None:
        raise ConfigError(
            f"schedule name {name!r} of {config_type.__qualname__} is taken by {taken.config_type.__module__}."
            f"{taken.config_type.__qualname__}; choose another default for its `schedule` field"
        )

    def register(builder: Builder[Config]) -> Builder[Config]:
        _entries[config_type] = _Entry(config_type, builder, rank_order)
        return builder

    return register


def schedule_names() -> tuple[str, ...]:
    """The names of all registered schedules, in order of registration."""
    return tuple(_by_name())


def config_type_of(name: str) -> type[ScheduleConfig]:
    """The config type registered under `name`; raises ConfigError that names those known."""
    entry = _by_name().get(name)
    if entry is None:
        raise ConfigError(f"unknown schedule {name!r}; {_hint(name, schedule_names())}known: {_list(schedule_names())}")
    return entry.config_type


def parse_schedule(source: ScheduleConfig | Mapping[str, Any] | str) -> ScheduleConfig:
    """A config from a mapping such as `{"schedule": "1f1b", "zero_bubble": True}`, its JSON, or a bare name."""
    if isinstance(source, ScheduleConfig):
        _entry_of(source)
        return source
    if isinstance(source, str):
        source = _mapping_from_text(source)
    if not isinstance(source, Mapping):
        raise ConfigError(
            f"a schedule is a config, a mapping or a name, got {type(source).__name__} {source!r:.60}; "
            'write for example {"schedule": "1f1b"}'
        )
    name = source.get("schedule")
    if not isinstance(name, str):
        found = f"got {name!r:.60}" if "schedule" in source else f"it has only {_list(map(repr, source)) or 'no keys'}"
        raise ConfigError(f"a schedule needs its name under 'schedule', {found}; known: {_list(schedule_names())}")
    config_type = config_type_of(name)
    _refuse_unknown_fields(config_type, name, source)
    try:
        return config_type.model_validate(dict(source))
    except ValidationError as error:
        raise ConfigError(f"schedule {name!r}: {_explain(error)}") from None


def build(config: ScheduleConfig, *, ranks: int, microbatches: int) -> Program:
    """The program of `config` on `ranks` ranks: compute actions only.

    Raises ScheduleError for numbers that the schedule's definition rules out, and for what no machine could hold.
    """
    entry = _entry_of(config)
    ranks, microbatches = _size(ranks, microbatches)
    with collector_paused():
        program = entry.build(config, ranks, microbatches)
    if not isinstance(program, Program):
        raise ConfigError(
            f"the builder of schedule {config.schedule!r} returned {type(program).__name__}; let it return a Program"
        )
    return program


def build_rank(config: ScheduleConfig, rank: int, *, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """What `build` gives for one rank, without making the lists of the others where the order allows that."""
    entry = _entry_of(config)
    ranks, microbatches = _size(ranks, microbatches)
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} is outside 0..{ranks - 1}; choose one of the {ranks} ranks")
    if entry.rank_order is None:
        return build(config, ranks=ranks, microbatches=microbatches).ranks[rank]
    return tuple(entry.rank_order(config, rank, ranks, microbatches))


def _by_name() -> dict[str, _Entry]:
    return {_name_of(config_type): entry for config_type, entry in _entries.items()}


def _name_of(config_type: type[ScheduleConfig]) -> str:
    name = config_type.model_fields["schedule"].default
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{config_type.__qualname__} has no name; give it a field like "
            f'`schedule: Literal["my_schedule"] = "my_schedule"`'
        )
    return name


def _entry_of(config: ScheduleConfig) -> _Entry:
    if not isinstance(config, ScheduleConfig):
        raise ConfigError(
            f"a schedule config is expected, got {type(config).__name__} {config!r:.60}; use parse_schedule for "
            "mappings and names"
        )
    entry = _entries.get(type(config))
    if entry is None:
        raise ConfigError(
            f"{type(config).__qualname__} has no builder; put @register_schedule({type(config).__qualname__}) over one"
        )
    return entry


def _size(ranks: int, microbatches: int) -> tuple[int, int]:
    ranks = positive("ranks", ranks, ScheduleError)
    microbatches = positive("microbatches", microbatches, ScheduleError)
    if ranks * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"{ranks} ranks x {microbatches} microbatches are {ranks * microbatches:,} forwards and more; a program "
            f"holds {MOST_FORWARDS:,} at most: lower one of them"
        )
    return ranks, microbatches


def _mapping_from_text(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return {"schedule": text.strip()}
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise ConfigError(f"schedule {text!r:.80} is no valid JSON: {error}; correct it or pass a name") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys; which of them was meant?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"a schedule has the field {twice!r} twice; give it once")
    return found


def _refuse_unknown_fields(config_type: type[ScheduleConfig], name: str, source: Mapping[str, Any]) -> None:
    unknown = [f"{key}" for key in source if key not in config_type.model_fields]
    if unknown:
        known = config_type.options()
        fields = f"its fields: {_list(known)}" if known else "it takes no fields"
        raise ConfigError(
            f"schedule {name!r} has no field {_list(map(repr, unknown))}; {_hint(unknown[0], known)}{fields}"
        )


def _explain(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}={item['input']!r:.60}: {item['msg'].lower()}" for item in error.errors()
    )


def _hint(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
