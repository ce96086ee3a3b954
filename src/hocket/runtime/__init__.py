"""The runtime: the only part of hocket that imports torch."""

from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.pipeline import PipelineInfo, PipelineSchedule, build_schedule
from hocket.runtime.result import StepResult

__all__ = ["PipelineInfo", "PipelineSchedule", "PipelineStageInfo", "StepResult", "build_schedule"]
