"""The runtime: the only part of hocket that imports torch."""

from hocket.runtime.aux import add_aux_loss
from hocket.runtime.build import build_schedule
from hocket.runtime.checkpoint import (
    LoadedCheckpoint,
    SavedCheckpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from hocket.runtime.deferred import register_deferred
from hocket.runtime.finite import check_finite
from hocket.runtime.full_state import load_full_state_dict
from hocket.runtime.grad_norm import clip_grad_norm_
from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.join import init_process_group
from hocket.runtime.param_groups import parameter_groups
from hocket.runtime.pipeline import PipelineInfo, PipelineSchedule
from hocket.runtime.result import StepResult
from hocket.runtime.rng import keyed_rng
from hocket.runtime.scaler import PipelineGradScaler
from hocket.runtime.tokens import TokenCount, count_tokens

__all__ = [
    "LoadedCheckpoint",
    "PipelineGradScaler",
    "PipelineInfo",
    "PipelineSchedule",
    "PipelineStageInfo",
    "SavedCheckpoint",
    "StepResult",
    "TokenCount",
    "add_aux_loss",
    "build_schedule",
    "check_finite",
    "clip_grad_norm_",
    "count_tokens",
    "init_process_group",
    "keyed_rng",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_state_dict",
    "parameter_groups",
    "register_deferred",
    "save_checkpoint",
]
