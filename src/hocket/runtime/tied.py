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
from torch.distributed.tensor import DTensor

from hocket.errors import ConfigError
from hocket.runtime.agreement import agree
from hocket.runtime.data_parallel import is_wrapped
from hocket.runtime.names import place_tied, whole_name
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
        self._group, self._transport = group, transport
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
        if tie.parameter is not None:
            place_tied(tie.parameter, tie.names)
        if self._group is None or len(tie.ranks) == 1 or tie.parameter is None:
            return
        tie.shared = True
        source = tie.ranks.index(owners[0])
        with torch.no_grad():
            mine = _local(tie.parameter)
            mine.copy_(self._exchange(tie, mine)[source])
        setattr(tie.parameter, _MARK, dist.get_rank(self._group) != owners[0])

    def _exchange(self, tie: _Tie, mine: torch.Tensor) -> list[torch.Tensor]:
        """`mine` of every rank that holds the weight, by rank. Point to point: no groups of some ranks are needed."""
        assert self._transport is not None
        return self._transport.exchange(mine.contiguous(), tie.ranks)

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
            gradient = self._summed(tie, gradient.detach())
            parameter.grad = gradient if tie.stashed is None else tie.stashed.add_(gradient)
            tie.stashed = None

    def _summed(self, tie: _Tie, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in one order on all of them. Shards meet shards: each rank's replicas cut alike."""
        first, *others = self._exchange(tie, _local(gradient))
        total = first + others[0]
        for other in others[1:]:
            total += other
        if not isinstance(gradient, DTensor):
            return total
        _local(gradient).copy_(total)
        return gradient

    def after_failure(self) -> None:
        """Give earlier gradients back."""
        for tie in self._ties:
            if tie.stashed is not None and tie.parameter is not None:
                tie.parameter.grad, tie.stashed = tie.stashed, None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


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
    owners: dict[str, list[tuple[str, nn.Module, nn.Parameter]]] = defaultdict(list)
    for module in modules:
        for own, parameter in module.named_parameters(remove_duplicate=False):
            owners[whole_name(module, own)].append((own, module, parameter))
    places = [(name, *owner) for name in tie.names for owner in owners[name]]
    if not places:
        return [0, 0, 0, 0]
    first = places[0][3]
    for name, own, module, parameter in places[1:]:
        if parameter is first:
            continue
        if parameter.shape != first.shape or parameter.dtype != first.dtype:
            raise ConfigError(
                f"tied weights {places[0][0]} {tuple(first.shape)} {first.dtype} and {name} {tuple(parameter.shape)} "
                f"{parameter.dtype} differ; make their shapes and dtypes equal"
            )
        if is_wrapped(module):
            raise ConfigError(
                f"tied weights {places[0][0]} and {name} live on one rank, but {name}'s stage is wrapped for data "
                "parallelism already, and its wrapper would go on with the weight that the tie replaces; use a "
                "placement that puts them on different ranks, or wrap nothing around these stages"
            )
        owner, _, attribute = own.rpartition(".")
        setattr(module.get_submodule(owner), attribute, first)
    tie.parameter = first
    what = hash((tuple(first.shape), first.element_size())) & 0x7FFFFFFF
    return [len(places), int(places[0][0] == tie.source), first.numel(), what]
