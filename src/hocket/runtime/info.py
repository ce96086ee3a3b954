"""What a model provider is told about the stage it makes."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import ConfigError
from hocket.partition import partition_layers


@dataclass(frozen=True)
class PipelineStageInfo:
    """Which stage of how many; stages are numbered in the order of the forward pass."""

    current_stage: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        return self.current_stage == 0

    @property
    def is_last(self) -> bool:
        return self.current_stage == self.num_stages - 1

    def layers(self, n_layers: int) -> range:
        """The layers of this stage when `n_layers` are divided evenly; raises ConfigError if there are too few."""
        if n_layers < self.num_stages:
            raise ConfigError(
                f"{n_layers} layers cannot fill {self.num_stages} stages; use fewer stages per rank or ranks, or more "
                "layers"
            )
        return partition_layers(n_layers, self.num_stages)[self.current_stage]
