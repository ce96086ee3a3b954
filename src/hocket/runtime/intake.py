"""What comes into a step: agreed on over the ranks, divided into microbatches; gradients back to where it was made.

One control message a step says what each rank knows of the batch; the key of all that the ranks said stands for the
shapes of everything in the step, so that messages need to tell their layouts only when the key is new.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any
from zlib import crc32

import torch
from torch.utils import _pytree

from hocket.errors import ConfigError, HocketError
from hocket.runtime.agreement import agree, agreed, signature
from hocket.runtime.microbatch import Batch, Microbatches, SplitRule, measure_batch, split_step
from hocket.runtime.p2p import Transport
from hocket.runtime.stage import Stage

Key = tuple[tuple[int, ...], ...]
"""For each rank: train, microbatches, batch size, shapes, sizes, keywords taken."""

_UNKNOWN = -1


class Intake:
    """Agrees on steps and divides their arguments, on one rank.

    stages: this rank's. first_rank, loss_rank: where the first and the last stage live. split: rules by name.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        transport: Transport | None,
        rank: int,
        first_rank: int,
        loss_rank: int,
        split: Mapping[str | int, SplitRule],
    ):
        self._stages, self._transport, self._split = stages, transport, split
        self._rank, self._first_rank, self._loss_rank = rank, first_rank, loss_rank
        self._sizes: dict[Key, tuple[int, ...]] = {}
        self._taken = _bits_taken(stages.values())
        self._warned: set[str] = set()

    def forget(self) -> None:
        """Drop what was remembered of steps before: after a failure ranks may differ in it."""
        self._sizes.clear()

    def agree(
        self,
        train: bool,
        count: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Any,
        loss_scale: float | torch.Tensor = 1.0,
    ) -> tuple[int, Batch, Key]:
        """What all ranks hold of this step: the number of microbatches, the batch, and the key of its shapes.

        Raises ConfigError, on all ranks alike, if it cannot work on one of them or if they differ.
        """
        problem: HocketError | None = None
        claim = Batch(None, None)
        try:
            _check_training(train, loss_scale)
            self._check(count, args, kwargs)
            claim = self._claim(args, kwargs, targets, count)
        except ConfigError as error:
            problem = error
            count = -1
        modules = [stage.module for stage in self._stages.values()]
        flags = [[m.training, *(p.requires_grad for p in m.parameters())] for m in modules]
        shapes = signature((args, kwargs, flags, _autocast_state()), targets)
        size = _UNKNOWN if claim.size is None else claim.size
        rows = agree(self._transport, problem, [train, count, size, shapes, hash(claim.sizes or 0), self._taken])
        _refuse_differences(rows)
        if kwargs:
            self._warn_of_untaken(rows, kwargs)
        key = tuple(map(tuple, rows))
        known = [row[2] for row in rows if row[2] != _UNKNOWN]
        total = known[0] if known else None
        sizes = self._share_sizes(key, claim.sizes, count)
        if sizes and sum(sizes) == total:
            return count, Batch(total, sizes), key
        if not train and total is not None:
            count = min(count, max(total, 1))
        return count, Batch(total, None), key

    def _warn_of_untaken(self, rows: Sequence[Sequence[int]], kwargs: Mapping[str, Any]) -> None:
        """A keyword that no stage of any rank takes is most likely misspelt. A warning: batches may hold more."""
        taken = 0
        for row in rows:
            taken |= row[5]
        names = [name for name in kwargs if _bits([name]) & ~taken and name not in self._warned]
        if names:
            self._warned.update(names)
            warnings.warn(
                f"no stage takes the keyword argument {', '.join(map(repr, names))}, so nothing is done with it; "
                "correct its name, leave it out, or name it in the forward of the stages that need it",
                stacklevel=5,
            )

    def divide(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, count: int, batch: Batch, known: bool
    ) -> Microbatches:
        """Divide this rank's arguments. Shapes not `known` are agreed on once more, so that all refuse alike."""
        problem: HocketError | None = None
        parts = None
        try:
            parts = split_step(
                args if 0 in self._stages else (),
                kwargs,
                targets if self._rank == self._loss_rank else None,
                count,
                split=self._split,
                batch_size=batch.sizes or batch.size,
            )
        except ConfigError as error:
            problem = error
        if not known:
            agree(self._transport, problem, [])
        elif problem is not None:
            raise problem
        assert parts is not None
        return parts

    def _check(self, count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"n_microbatches is {count!r}; give a whole number of at least 1")
        if self._rank == self._first_rank:
            stage = self._stages[0]
            if not args and not stage.takes(kwargs):
                raise ConfigError(
                    f"rank {self._rank} holds stage 0 but got no positional argument; pass the inputs: "
                    "step(inputs, targets=...)"
                )
            stage.check_call(args, kwargs)

    def _claim(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, count: int) -> Batch:
        """The batch as this rank's inputs or targets tell it."""
        if self._rank == self._first_rank:
            mine = targets if self._rank == self._loss_rank else None
            return measure_batch(args, kwargs, mine, count, split=self._split)
        if self._rank == self._loss_rank:
            found = measure_batch((), {}, targets, count, split=self._split)
            # In anything but a tensor the first length need not be the batch's.
            return found if isinstance(targets, torch.Tensor) else Batch(None, found.sizes)
        return Batch(None, None)

    def _share_sizes(self, key: Key, sizes: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
        """The microbatches' sizes, on every rank, if arguments came divided; sent once for each key."""
        if self._transport is None:
            return sizes
        owner = next((rank for rank in (self._first_rank, self._loss_rank) if key[rank][4]), None)
        if owner is None:
            return None
        if key not in self._sizes:
            mine = torch.tensor(sizes if sizes and self._rank == owner else [0] * count)
            remember(self._sizes, key, tuple(self._transport.broadcast(mine, owner).tolist()))
        return self._sizes[key]


def _check_training(train: bool, loss_scale: Any) -> None:
    if train and not torch.is_grad_enabled():
        raise ConfigError(
            "step runs backward, but gradients are switched off here, by torch.no_grad or inference_mode; "
            "call step outside of it, or evaluate for the forward alone"
        )
    if isinstance(loss_scale, torch.Tensor):
        if loss_scale.numel() != 1:
            raise ConfigError(f"loss_scale is a tensor of shape {list(loss_scale.shape)}; give one number")
    elif not isinstance(loss_scale, Real):
        raise ConfigError(f"loss_scale is {loss_scale!r}; give a number, or a tensor of one")


def _bits(names: Iterable[str]) -> int:
    """A set of names in one number. Two names may share a bit: then a name that no stage takes can pass unseen."""
    bits = 0
    for name in names:
        bits |= 1 << crc32(name.encode()) % 62
    return bits


def _bits_taken(stages: Iterable[Stage]) -> int:
    """The keywords that these stages take; all bits if one of them takes any."""
    bits = 0
    for stage in stages:
        if stage.keywords is None:
            return -1
        bits |= _bits(stage.keywords)
    return bits


class Upstream:
    """Arguments computed from what requires grad, outside of the pipeline: their graph is walked once, after the step.

    Each microbatch's backward would walk it again, which autograd refuses.
    """

    def __init__(self) -> None:
        self._cuts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with leaves of their own in the place of such tensors."""
        if not kwargs and all(type(value) is torch.Tensor and value.grad_fn is None for value in args):
            return args, kwargs
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        if not any(_is_computed(leaf) for leaf in leaves):
            return args, kwargs
        return _pytree.tree_unflatten([self._leaf(leaf) for leaf in leaves], structure)

    def _leaf(self, value: Any) -> Any:
        if not _is_computed(value):
            return value
        leaf = value.detach().requires_grad_()
        self._cuts.append((value, leaf))
        return leaf

    def backward(self) -> None:
        """Send what gradients the step has left further back."""
        found = [(value, leaf.grad) for value, leaf in self._cuts if leaf.grad is not None]
        if found:
            torch.autograd.backward([value for value, _ in found], [grad for _, grad in found])


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep `value`; ranks forget together, since all see the same keys in the same order."""
    if len(memory) >= 128:
        memory.clear()
    memory[key] = value


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _refuse_differences(rows: Sequence[Sequence[int]]) -> None:
    """Raise, on all ranks alike, if the ranks do not run the same kind of step."""
    for column, what in ((0, "kind of call (step = 1, evaluate = 0)"), (1, "number of microbatches")):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            raise agreed(
                ConfigError(
                    f"the ranks disagree on the {what}: "
                    + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
                    + "; make the same call on every rank"
                )
            )
    claims = {rank: row[2] for rank, row in enumerate(rows) if row[2] != _UNKNOWN}
    if len(set(claims.values())) > 1:
        raise agreed(
            ConfigError(
                "the ranks disagree on the batch size: "
                + ", ".join(f"rank {rank} has {value} items" for rank, value in claims.items())
                + "; give inputs and targets of the same batch"
            )
        )
