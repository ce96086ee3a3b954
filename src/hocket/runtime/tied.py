"""Weights that several stages share: equal at the start, gradients summed once a step, so equal ever after.

A tie is declared by names of the whole model: `{"lm_head.weight": "embed.weight"}` makes the first a copy of the
second. On one rank both names get the same Parameter. Between ranks each keeps its own; the source's values are
broadcast when the schedule is built, and the step's gradients are summed over the ranks when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hocket.errors import ConfigError
from hocket.runtime.agreement import agree
from hocket.runtime.p2p import Transport

_MARK = "_hocket_tied_copy"


def is_copy(parameter: torch.Tensor) -> bool:
    """True for a tied parameter whose original lives on another rank: it counts nothing in a global norm."""
    return getattr(parameter, _MARK, False)


@dataclass
class _Tie:
    """One weight with all its names; `parameter` is this rank's, None if it has none."""

    source: str
    names: tuple[str, ...]
    ranks: list[int] = field(default_factory=list)
    parameter: nn.Parameter | None = None
    shared: bool = False
    """Whether other ranks hold copies of this rank's parameter."""
    stashed: torch.Tensor | None = None


class TiedWeights:
    """The ties of one pipeline on this rank. Raises ConfigError, on all ranks, for names or shapes that do not fit."""

    def __init__(
        self,
        ties: Mapping[str, str],
        modules: Iterable[nn.Module],
        group: dist.ProcessGroup | None,
        transport: Transport | None,
    ):
        modules = list(modules)
        self._group = group
        self._ties = [_Tie(source, names) for source, names in sorted(_groups(ties).items())]
        problem = None
        rows: list[list[int]] = []
        for tie in self._ties:
            try:
                rows.append(_hold(tie, modules))
            except ConfigError as error:
                problem = error
                rows.append([0, 0, 0, 0])
        numbers = [number for row in rows for number in row]
        everyone = agree(transport, problem, numbers)
        for index, tie in enumerate(self._ties):
            self._join(tie, [row[4 * index : 4 * index + 4] for row in everyone])

    def _join(self, tie: _Tie, held: list[list[int]]) -> None:
        """Check what every rank holds of `tie`, and give all that hold it the source's values."""
        owners = [rank for rank, (_, is_source, _, _) in enumerate(held) if is_source]
        found = sum(row[0] for row in held)
        if len(owners) != 1 or found != len(tie.names):
            raise ConfigError(
                f"tied weights {', '.join(tie.names)}: {found} of {len(tie.names)} names are parameters of some stage, "
                f"and {tie.source!r} is on {len(owners)} ranks; use the names of the whole model, each on one stage"
            )
        shapes = {(numel, shape) for count, _, numel, shape in held if count}
        if len(shapes) != 1:
            sizes = ", ".join(f"rank {r}: {row[2]} elements" for r, row in enumerate(held) if row[0])
            raise ConfigError(
                f"tied weights {', '.join(tie.names)} differ in shape or dtype ({sizes}); make them equal"
            )
        tie.ranks = [rank for rank, row in enumerate(held) if row[0]]
        if self._group is None or len(tie.ranks) == 1 or tie.parameter is None:
            return
        tie.shared = True
        source = tie.ranks.index(owners[0])
        tie.parameter.data.copy_(self._exchange(tie, tie.parameter.data)[source])
        setattr(tie.parameter, _MARK, dist.get_rank(self._group) != owners[0])

    def _exchange(self, tie: _Tie, mine: torch.Tensor) -> list[torch.Tensor]:
        """`mine` of every rank that holds the weight, by rank. Point to point: no groups of some ranks are needed."""
        group = self._group
        assert group is not None
        mine = mine.contiguous()
        me = dist.get_rank(group)
        found = [mine if rank == me else torch.empty_like(mine) for rank in tie.ranks]
        operations = []
        for rank, tensor in zip(tie.ranks, found, strict=True):
            if rank != me:
                operations.append(dist.P2POp(dist.isend, mine, group=group, group_peer=rank))
                operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return found

    def before_step(self) -> None:
        """Put earlier gradients aside: they have been summed over the ranks already."""
        for tie in self._ties:
            if tie.shared and tie.parameter is not None:
                tie.stashed, tie.parameter.grad = tie.parameter.grad, None

    def after_step(self) -> None:
        """Sum the step's gradients over the ranks, and add those put aside."""
        for tie in self._ties:
            parameter = tie.parameter
            if not tie.shared or parameter is None or not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            first, *others = self._exchange(tie, gradient)
            gradient = first + others[0]
            for other in others[1:]:
                gradient += other
            parameter.grad = gradient if tie.stashed is None else tie.stashed.add_(gradient)
            tie.stashed = None

    def after_failure(self) -> None:
        """Give earlier gradients back."""
        for tie in self._ties:
            if tie.stashed is not None and tie.parameter is not None:
                tie.parameter.grad, tie.stashed = tie.stashed, None


def _groups(ties: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """All names of each weight, by its source; a copy of a copy has the first's source."""
    names: dict[str, list[str]] = defaultdict(list)
    for copy, source in ties.items():
        chain = [copy]
        while source in ties:
            if source in chain:
                raise ConfigError(f"tied weights go in a circle: {' -> '.join([*chain, source])}; name one source")
            chain.append(source)
            source = ties[source]
        names[source].append(copy)
    return {source: (source, *sorted(copies)) for source, copies in names.items()}


def _hold(tie: _Tie, modules: list[nn.Module]) -> list[int]:
    """Make the names of `tie` on this rank one Parameter. Gives [how many, has the source, numel, what]."""
    places = [
        (name, module, parameter)
        for name in tie.names
        for module in modules
        if (parameter := dict(module.named_parameters(remove_duplicate=False)).get(name)) is not None
    ]
    if not places:
        return [0, 0, 0, 0]
    first = places[0][2]
    for name, module, parameter in places[1:]:
        if parameter.shape != first.shape or parameter.dtype != first.dtype:
            raise ConfigError(
                f"tied weights {places[0][0]} {tuple(first.shape)} {first.dtype} and {name} {tuple(parameter.shape)} "
                f"{parameter.dtype} differ; make their shapes and dtypes equal"
            )
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, first)
    tie.parameter = first
    what = hash((tuple(first.shape), first.element_size())) & 0x7FFFFFFF
    return [len(places), int(places[0][0] == tie.source), first.numel(), what]
