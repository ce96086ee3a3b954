"""What a step gives back, and how the last stage's outputs become losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from hocket.errors import ConfigError

LossReduction = Literal["mean", "sum"]
LossFn = Callable[[Any, Any], Any]
"""loss_fn(outputs, target) -> a scalar tensor, or (scalar, metrics)."""


@dataclass
class StepResult:
    """The outcome of one step on this rank.

    Where the last stage lives (`loss_rank`, a rank of the pipeline group): the batch's `loss`, unscaled; `losses`, one
    for each microbatch; `metrics`, averaged like the loss. Elsewhere these are None, [] and {}. `outputs` only if asked
    for. Seconds are this rank's: `seconds` the host's for the whole call; `busy_seconds` and `wait_seconds`, where the
    stages compute. On accelerators asking for the latter waits until the device has done the step.
    """

    loss_rank: int
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    aux_losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Auxiliary losses of this rank's stages, by name, averaged like the loss and summed over the stages."""
    outputs: Any = None
    seconds: float = 0.0
    weights: Sequence[float] = field(default=(), repr=False)
    """What each microbatch's loss counts in the batch's."""
    measured: Callable[[], tuple[float, float]] = field(default=lambda: (0.0, 0.0), repr=False)

    @cached_property
    def loss(self) -> torch.Tensor | None:
        """The batch's loss; None where the last stage is not, or nothing gives a loss."""
        # Made when it is asked for: a few small kernels that most steps can do without.
        return _weighted(self.losses, self.weights) if self.losses else None

    @property
    def busy_seconds(self) -> float:
        """Seconds that this rank spent computing."""
        return self._seconds[0]

    @property
    def wait_seconds(self) -> float:
        """Seconds that this rank spent waiting for messages."""
        return self._seconds[1]

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        return self.measured()


class LossCollector:
    """Turns the last stage's output of each microbatch into the loss that backward starts from, and its gradient.

    weights: what each microbatch's loss counts in the batch's; `scale` multiplies before backward only. The gradient is
    the product of both: as good as a loss multiplied by it, without the multiplications. With `optional` there is no
    loss if loss_fn raises.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        targets: Sequence[Any] | None,
        weights: Sequence[float],
        scale: float | torch.Tensor,
        keep_outputs: bool,
        optional: bool = False,
    ):
        self.loss_fn, self.targets, self.weights, self.scale = loss_fn, targets, weights, scale
        self.optional = optional
        self._names: Collection[str] | None = None
        self._cut = 0
        self.losses: list[torch.Tensor | None] = [None] * len(weights)
        self.metrics: list[Mapping[str, Any]] = [{}] * len(weights)
        self.outputs: list[Any] | None = [None] * len(weights) if keep_outputs else None

    def __call__(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.outputs is not None:
            self.outputs[microbatch] = _detached(output)
        if self.loss_fn is None:
            return None
        try:
            loss = self.loss_fn(output, microbatch if self.targets is None else self.targets[microbatch])
        except Exception as error:
            if self.optional:
                self.loss_fn = None
                return None
            if self.targets is None:
                error.add_note(
                    "this call has no targets on the rank of the last stage, so loss_fn got the microbatch's index in "
                    "their place; pass targets=..."
                )
            raise
        metrics: Mapping[str, Any] = {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, metrics = loss
        self._note(microbatch, metrics)
        _check_scalar(loss)
        self.losses[microbatch] = value = loss.detach()
        if not loss.requires_grad and any(_requires_grad(leaf) for leaf in pytree.tree_leaves(output)):
            self._cut += 1
        return loss, self._seed(value, self.weights[microbatch])

    def _seed(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """The gradient of `loss`. Each microbatch has its own: a backward that changes it in place harms no other."""
        factor = weight * self.scale
        if isinstance(factor, torch.Tensor):
            return torch.ones_like(loss) * factor.detach().reshape(()).to(loss)
        return torch.full_like(loss, factor)

    def _note(self, microbatch: int, metrics: Mapping[str, Any]) -> None:
        if self._names is None:
            self._names = metrics.keys()
        if not metrics and not self._names:
            return
        if metrics.keys() != self._names:
            raise ConfigError(
                f"loss_fn returned the metrics {sorted(metrics)}, but {sorted(self._names)} for a microbatch before; "
                "return the same names for all"
            )
        for name, value in metrics.items():
            if not isinstance(value, (torch.Tensor, Number)) and not hasattr(value, "__array__"):
                raise ConfigError(
                    f"loss_fn returned {value!r} for the metric {name!r}; return a number or a tensor, of which a mean "
                    "over the microbatches can be taken"
                )
        self.metrics[microbatch] = {name: _detached(value) for name, value in metrics.items()}

    def finish(self, result: StepResult) -> None:
        """Write the batch's loss and metrics into `result`."""
        if self._cut == len(self.weights):
            # Of some microbatches only it is legitimate: those without a valid token, say.
            warnings.warn(
                "the loss of no microbatch requires grad, though the outputs do, so this step trains nothing; "
                "does loss_fn detach them, or make a number of them?",
                stacklevel=4,
            )
        if self.loss_fn is not None:
            result.losses = [loss for loss in self.losses if loss is not None]
            result.weights = self.weights
            result.metrics = {
                name: _weighted([metrics[name] for metrics in self.metrics], self.weights) for name in self.metrics[0]
            }


class AuxCollector:
    """Adds up the auxiliary losses that stages of this rank report, each with its microbatch's weight."""

    def __init__(self, weights: Sequence[float]):
        self.weights = weights
        self.totals: dict[str, torch.Tensor] = {}

    def __call__(self, stage: int, microbatch: int, name: str, value: torch.Tensor) -> None:
        value = value.detach() * self.weights[microbatch]
        self.totals[name] = self.totals[name] + value if name in self.totals else value


def weights_of(reduction: LossReduction, sizes: Sequence[int] | None, count: int) -> list[float]:
    """What each microbatch's loss counts in the batch's: by size for a mean, fully for a sum.

    This is the one place where losses are scaled. A mean over the batch is the sum over microbatches of
    size / batch size times the microbatch's mean.
    """
    if reduction == "sum":
        return [1.0] * count
    if not sizes:
        return [1 / count] * count
    total = sum(sizes)
    return [size / total for size in sizes]


def _weighted(values: Sequence[Any], weights: Sequence[float]) -> Any:
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def _detached(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"loss_fn returned {type(loss).__name__}; return a scalar tensor, or (scalar tensor, metrics mapping)"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; return a scalar: reduce it with .mean() or .sum()"
        )
    if loss.is_complex():
        raise ConfigError(f"loss_fn returned a loss of {loss.dtype}; return a real one: take .real or .abs() of it")
