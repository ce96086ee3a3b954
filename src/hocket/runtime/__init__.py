"""The runtime: the only part of hocket that imports torch."""

from hocket.runtime.aux import add_aux_loss
from hocket.runtime.build import build_schedule
from hocket.runtime.grad_norm import clip_grad_norm_
from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.pipeline import PipelineInfo, PipelineSchedule
from hocket.runtime.result import StepResult
from hocket.runtime.rng import keyed_rng
from hocket.runtime.scaler import PipelineGradScaler

__all__ = [
    "PipelineGradScaler",
    "PipelineInfo",
    "PipelineSchedule",
    "PipelineStageInfo",
    "StepResult",
    "add_aux_loss",
    "build_schedule",
    "clip_grad_norm_",
    "keyed_rng",
]
