"""What `from hocket import …` offers: exactly these names, each of them there, each with a word on what it is."""

import importlib
import types

import pytest

import hocket

NAMES = [
    "Action",
    "ConfigError",
    "CostModel",
    "DualPipeVConfig",
    "GPipeConfig",
    "HocketError",
    "InferenceConfig",
    "Interleaved1F1BConfig",
    "LoopedBFSConfig",
    "Op",
    "PipelineStageInfo",
    "Placement",
    "Program",
    "ProgramError",
    "ScheduleError",
    "Timeline",
    "ZeroBubbleVConfig",
    "build",
    "build_schedule",
    "lower",
    "parse_schedule",
    "partition_layers",
    "register_schedule",
    "simulate",
    "split_microbatch_ranges",
    "verify",
]


def test_exactly_these_names():
    assert sorted(hocket.__all__) == sorted(NAMES)
    assert hocket.__all__ == sorted(hocket.__all__)


def test_every_name_resolves_and_is_documented():
    for name in hocket.__all__:
        found = getattr(hocket, name)
        assert found.__doc__, f"{name} has no docstring"
        assert found.__module__.split(".")[0] == "hocket"
        home = importlib.import_module(found.__module__)
        assert getattr(home, name) is found


def test_nothing_else_is_offered():
    """What is there besides are modules and private names."""
    others = {name for name in vars(hocket) if not name.startswith("_")} - set(hocket.__all__)
    strangers = {name for name in others if not isinstance(getattr(hocket, name), types.ModuleType)}
    assert strangers <= {"annotations", "Any", "TYPE_CHECKING", "VERSION"}
    assert set(dir(hocket)) == {*hocket.__all__, "__version__"}


def test_star_and_unknown_names():
    space: dict[str, object] = {}
    exec("from hocket import *", space)
    assert set(NAMES) <= set(space)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hocket.no_such_name  # noqa: B018
