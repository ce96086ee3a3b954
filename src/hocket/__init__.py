"""hocket: pipeline-parallel training in PyTorch. This door opens without torch."""

from hocket.errors import HocketError
