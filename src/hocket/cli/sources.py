"""What a command works on: a schedule by name, JSON or file; a program from a file; costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.cli.options import cost_values
from hocket.cost import CostModel
from hocket.errors import ConfigError, ParseError
from hocket.program import Action, Program
from hocket.schedules import ScheduleConfig, build, parse_schedule, schedule_names

_MAPPINGS = (".json", ".yaml", ".yml")
_PROGRAMS = (".csv", ".txt")


def is_program_file(source: str) -> bool:
    """True if `source` names a file of a program and not a schedule."""
    return source == "-" or source.lower().endswith(_PROGRAMS)


def read_schedule(source: str) -> ScheduleConfig:
    """The config that a name, JSON text or a JSON or YAML file describes. Raises ConfigError."""
    if source.lower().endswith(_MAPPINGS):
        return parse_schedule(_read_mapping(source, "a schedule"))
    if source not in schedule_names() and ("/" in source or "." in source) and not source.lstrip().startswith("{"):
        raise ConfigError(
            f"{source!r:.200} is no schedule, and as a file its suffix does not say what it holds; name it "
            f"{' or '.join(_MAPPINGS)} for a schedule, {' or '.join(_PROGRAMS)} for a program"
        )
    return parse_schedule(source)


def read_costs(values: Mapping[str, Any]) -> CostModel:
    """The costs of `--costs`, with those given one by one put over them. Raises ConfigError."""
    text, found = values["costs"], {}
    if text is not None:
        if text.lstrip().startswith("{"):
            found = _load(text, "JSON", "--costs")
        elif text.lower().endswith(_MAPPINGS):
            found = _read_mapping(text, "costs")
        else:
            raise ConfigError(f'--costs is {text!r:.60}; give JSON like {{"forward": 2}}, or a .json or .yaml file')
    if not isinstance(found, Mapping):
        raise ConfigError(f"costs are names with numbers, got {type(found).__name__} {found!r:.60}")
    return CostModel.from_mapping({**found, **cost_values(dict(values))})


def read_program(source: str) -> Program:
    """The program in a file, or in standard input for `-`: text, CSV (ours or torch's), or the JSON of `show --json`.

    Raises ParseError if it is none of these, ConfigError if the file cannot be read.
    """
    name = "standard input" if source == "-" else source
    data = sys.stdin.buffer.read() if source == "-" else _read(source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(
            f"{name} is no text: byte {data[error.start]:#04x} at offset {error.start} is not UTF-8; expected a "
            "program as text, CSV or JSON"
        ) from None
    try:
        return _parse_program(text)
    except ParseError as error:
        raise ParseError(f"{name}: {error}") from None


def _parse_program(text: str) -> Program:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if first.startswith("{"):
        return _program_from_json(text)
    if first.startswith("rank"):
        return Program.from_text(text)
    return Program.from_csv("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))


def _program_from_json(text: str) -> Program:
    found = _load(text, "JSON", "the program", ParseError)
    ranks = found.get("ranks") if isinstance(found, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(row, list) for row in ranks):
        raise ParseError("the JSON has no 'ranks' with a list of actions for each rank")
    parsed = [[Action.parse(str(cell)) for cell in row] for row in ranks]
    if not any(parsed):
        raise ParseError("the JSON holds no action; expected a list of actions for each rank")
    return Program.from_actions(parsed)


def build_program(config: ScheduleConfig | Program, values: Mapping[str, Any]) -> Program:
    """The program of a schedule at the ranks and microbatches given; one read from a file as it is."""
    if isinstance(config, Program):
        return config
    return build(config, ranks=values["ranks"], microbatches=values["microbatches"])


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path!r}: {reason}") from None


def _read_mapping(path: str, what: str) -> Any:
    data = _read(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path!r} is no text: byte {data[error.start]:#04x} at offset {error.start}") from None
    found = _load(text, "JSON" if path.lower().endswith(".json") else "YAML", path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path!r} holds {type(found).__name__} {found!r:.40}; expected {what}: names with values")
    return found


def _load(text: str, form: str, name: str, refusal: type[ConfigError] | type[ParseError] = ConfigError) -> Any:
    """The value that JSON or YAML text writes."""
    if form == "JSON":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise refusal(f"{name} is no valid JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ConfigError("a YAML file needs PyYAML; install it: pip install 'hocket[cli]', or give JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refusal(f"{name} is no valid YAML: {' '.join(str(error).split())}") from None
