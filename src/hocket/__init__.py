"""hocket: pipeline-parallel training in PyTorch. This door opens without torch, which only runtime names load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket.cost import CostModel
from hocket.errors import ConfigError, HocketError, ProgramError, ScheduleError
from hocket.partition import partition_layers, split_microbatch_ranges
from hocket.passes import lower
from hocket.program import Action, Op, Placement, Program
from hocket.simulate import Timeline, simulate
from hocket.verify import verify
from hocket.version import VERSION

if TYPE_CHECKING:
    from hocket.runtime import PipelineStageInfo, build_schedule
    from hocket.schedules import (
        DualPipeVConfig,
        GPipeConfig,
        InferenceConfig,
        Interleaved1F1BConfig,
        LoopedBFSConfig,
        ZeroBubbleVConfig,
        build,
        parse_schedule,
        register_schedule,
    )

__version__ = VERSION

__all__ = [
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

# Loaded when first used: the runtime brings torch, the schedules bring pydantic; a reader of programs needs neither.
_LAZY = {
    **dict.fromkeys(("build_schedule", "PipelineStageInfo"), "hocket.runtime"),
    **dict.fromkeys(
        (
            "DualPipeVConfig",
            "GPipeConfig",
            "InferenceConfig",
            "Interleaved1F1BConfig",
            "LoopedBFSConfig",
            "ZeroBubbleVConfig",
            "build",
            "parse_schedule",
            "register_schedule",
        ),
        "hocket.schedules",
    ),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hocket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
