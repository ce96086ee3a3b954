"""CostModel: what every op, message and held tensor costs, in seconds and bytes, per stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hocket.errors import ConfigError
from hocket.replay import Durations

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""

_SECONDS = ("forward", "backward_input", "backward_weight", "backward")
_MESSAGES = ("message_bytes", "gradient_bytes")
_HELD = ("activation_bytes", "weight_bytes")
_PER_STAGE = (*_SECONDS, *_MESSAGES, *_HELD)


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of a pipeline. Any unit of time will do, as long as it is the same everywhere.

    Numbers are for one stage and one microbatch; where the type is PerStage, give one number or one for each stage.
    Raises ConfigError, with the name and the number, for what is negative, no finite number, or of a wrong length.
    """

    forward: PerStage = 1.0
    """Seconds of F."""
    backward_input: PerStage = 1.0
    """Seconds of I."""
    backward_weight: PerStage = 1.0
    """Seconds of W."""
    backward: PerStage | None = None
    """Seconds of a full backward B; None: those of I and W together."""
    hop_latency: float = 0.0
    """Seconds that a message between two ranks takes, whatever its size."""
    bandwidth: float | None = None
    """Bytes per second between two ranks; None: no limit."""
    message_bytes: PerStage = 0.0
    """Bytes of the activation that a stage gives to the next one."""
    gradient_bytes: PerStage | None = None
    """Bytes of the gradient that a stage gives to the one before; None: those of the activation that came from it."""
    overlap_speedup: float | None = None
    """How many times faster an overlapped pair is than its parts in turn, at least 1; None: they run in turn."""
    activation_bytes: PerStage = 0.0
    """Bytes held from the start of F to the end of I (or B)."""
    weight_bytes: PerStage = 0.0
    """Bytes of what W still needs, held from the end of I to the end of W."""
    static_bytes: PerStage = 0.0
    """Bytes that a rank holds all the time (weights, gradients, optimizer): one number, or one for each rank."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _PER_STAGE or field.name == "static_bytes":
                value = _per_stage(field.name, value)
            else:
                value = _number(field.name, value)
            object.__setattr__(self, field.name, value)
        if self.bandwidth == 0:
            raise ConfigError("bandwidth is 0 bytes per second, so no message would arrive; give None for no limit")
        if self.overlap_speedup is not None and self.overlap_speedup < 1:
            raise ConfigError(
                f"overlap_speedup is {self.overlap_speedup:g}; a pair is at least 1 time as fast as its parts in turn"
            )
        self._check_lengths()

    def _check_lengths(self) -> None:
        lengths = {name: len(value) for name in _PER_STAGE if isinstance(value := getattr(self, name), tuple)}
        if len(set(lengths.values())) > 1:
            (one, a), (other, b) = min(lengths.items(), key=lambda x: x[1]), max(lengths.items(), key=lambda x: x[1])
            raise ConfigError(f"{one} has {a} numbers and {other} has {b}; give each one number or one per stage")

    # --- one number per stage ---------------------------------------------------------------------------------

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """The field `name` as one number for each stage. Raises ConfigError if it was given for another count."""
        value = getattr(self, name)
        if name == "backward" and value is None:
            inputs, weights = (
                self.per_stage("backward_input", num_stages),
                self.per_stage("backward_weight", num_stages),
            )
            return tuple(i + w for i, w in zip(inputs, weights, strict=True))
        if name == "gradient_bytes" and value is None:
            return (0.0, *self.per_stage("message_bytes", num_stages)[:-1])
        return _expand(name, value, num_stages, "stages")

    def static_of(self, num_ranks: int) -> tuple[float, ...]:
        """Bytes that each rank holds all the time."""
        return _expand("static_bytes", self.static_bytes, num_ranks, "ranks")

    def hops(self, num_stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of the message that each stage sends to another rank: its activation, and its gradient."""
        latency, bandwidth = self.hop_latency, self.bandwidth or math.inf
        forward, backward = (
            tuple(latency + size / bandwidth for size in self.per_stage(name, num_stages))
            for name in ("message_bytes", "gradient_bytes")
        )
        return forward, backward

    def durations(self, num_stages: int) -> Durations:
        """These costs as the replay charges them."""
        compute = [
            self.per_stage(name, num_stages) for name in ("forward", "backward", "backward_input", "backward_weight")
        ]
        return Durations(compute, self.hops(num_stages), self.overlap)

    @property
    def overlap(self) -> float | None:
        """Seconds of an overlapped pair over those of its parts in turn; None: the parts run in turn."""
        return None if self.overlap_speedup is None else 1.0 / self.overlap_speedup

    @property
    def counts_bytes(self) -> bool:
        """True if activations have a size, so that memory is measured in bytes and not only in activations."""
        return any(any(_as_tuple(getattr(self, name))) for name in ("activation_bytes", "weight_bytes"))

    # --- costs made of others ---------------------------------------------------------------------------------

    def of_stages(
        self, layers: Sequence[range], first: CostModel | None = None, last: CostModel | None = None
    ) -> CostModel:
        """The costs of stages that hold these `layers`, where `self` has those of single layers (or one for all).

        Seconds and held bytes add up; a stage's messages are those of its last layer (activation) and of its first
        (gradient). The seconds and held bytes of `first` and `last`, the embedding and the head, are added to the first
        and the last stage. The rest stays as it is. Raises ConfigError if `self` is for another number of layers.
        """
        count = layers[-1].stop
        found: dict[str, PerStage] = {}
        given = (self, *(extra for extra in (first, last) if extra is not None))
        for name in (*_SECONDS, *_HELD):
            if name == "backward" and all(costs.backward is None for costs in given):
                continue
            row = self.per_stage(name, count)
            sums = [math.fsum(row[stage.start : stage.stop]) for stage in layers]
            for at, extra in ((0, first), (-1, last)):
                if extra is not None:
                    sums[at] += extra.per_stage(name, 1)[0]
            found[name] = sums
        sizes = self.per_stage("message_bytes", count)
        found["message_bytes"] = [sizes[max(0, stage.stop - 1)] for stage in layers]
        if self.gradient_bytes is not None:
            sizes = self.per_stage("gradient_bytes", count)
            found["gradient_bytes"] = [sizes[min(stage.start, count - 1)] for stage in layers]
        return replace(self, **found)

    def divided(self, parts: int) -> CostModel:
        """The costs of one of `parts` equal parts; messages stay as they are. Raises ConfigError if not one number."""
        for name in (*_SECONDS, *_HELD):
            value = getattr(self, name)
            if isinstance(value, tuple):
                raise ConfigError(
                    f"{name} has {len(value)} numbers, where one is needed, for a rank's whole share of the model; "
                    "give one number, or costs per layer with n_layers"
                )
        return self._times(1 / parts, (*_SECONDS, *_HELD))

    def scaled(self, factor: float) -> CostModel:
        """The costs of a microbatch `factor` times as large; latency, bandwidth and static bytes stay as they are."""
        return self._times(factor, _PER_STAGE)

    def _times(self, factor: float, names: Sequence[str]) -> CostModel:
        found: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                found[name] = tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor
        return replace(self, **found)

    # --- JSON ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> CostModel:
        """The costs that a JSON object names; fields left out keep their defaults. Raises ConfigError."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f'costs are {mapping!r}; give a mapping like {{"forward": 2}}')
        known = [field.name for field in fields(cls)]
        for name in mapping:
            if name not in known:
                raise ConfigError(f"a cost model has no field {name!r}; it has {', '.join(known)}")
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values; `from_mapping` reads them back."""
        found = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None if name in ("bandwidth", "overlap_speedup") else _refuse(name, value)
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        return _refuse(name, value)
    try:
        number = float(value)
    except OverflowError:
        return _refuse(name, value)
    return number if math.isfinite(number) and number >= 0 else _refuse(name, value)


def _refuse(name: str, value: Any) -> float:
    raise ConfigError(f"{name} is {value!r}; give a finite number of at least 0")


def _per_stage(name: str, value: Any) -> float | tuple[float, ...] | None:
    if value is None and name in ("backward", "gradient_bytes"):
        return None
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return _number(name, value)
    found = tuple(_number(f"{name}[{index}]", number) or 0.0 for index, number in enumerate(value))
    if not found:
        raise ConfigError(f"{name} is empty; give one number, or one for each {_unit(name)}")
    return found


def _unit(name: str) -> str:
    return "rank" if name == "static_bytes" else "stage"


def _as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _expand(name: str, value: PerStage, count: int, unit: str) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (value,) * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} numbers for {count} {unit}; give one number, or {count}")
    return tuple(value)
