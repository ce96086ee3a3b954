"""The schedules: config and builder side by side, one file a family; importing this package registers them."""

from hocket.schedules.dual_pipe_v import DualPipeVConfig
from hocket.schedules.gpipe import GPipeConfig
from hocket.schedules.greedy import GreedyConfig
from hocket.schedules.inference import InferenceConfig, forward_only
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
from hocket.schedules.v_memory import VHalfConfig, VMinConfig
from hocket.schedules.zb_h2 import ZBH2Config
from hocket.schedules.zero_bubble_v import ZeroBubbleVConfig

__all__ = [
    "DualPipeVConfig",
    "GPipeConfig",
    "GreedyConfig",
    "InferenceConfig",
    "Interleaved1F1BConfig",
    "LoopedBFSConfig",
    "ScheduleConfig",
    "VHalfConfig",
    "VMinConfig",
    "ZBH2Config",
    "ZeroBubbleVConfig",
    "build",
    "build_rank",
    "config_type_of",
    "forward_only",
    "parse_schedule",
    "register_schedule",
    "schedule_names",
]
