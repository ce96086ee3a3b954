"""The schedules: config and builder side by side, one file a family; importing this package registers them."""

from hocket.schedules.gpipe import GPipeConfig
from hocket.schedules.inference import InferenceConfig
from hocket.schedules.interleaved import Interleaved1F1BConfig
from hocket.schedules.looped_bfs import LoopedBFSConfig
from hocket.schedules.registry import (
    ScheduleConfig,
    build,
    build_rank,
    config_type_of,
    parse_schedule,
    register_schedule,
    schedule_names,
)

__all__ = [
    "GPipeConfig",
    "InferenceConfig",
    "Interleaved1F1BConfig",
    "LoopedBFSConfig",
    "ScheduleConfig",
    "build",
    "build_rank",
    "config_type_of",
    "parse_schedule",
    "register_schedule",
    "schedule_names",
]
