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
    group: dist.ProcessGroup | None = None
    stashed: torch.Tensor | None = None


class TiedWeights:
    """The ties of one pipeline on this rank. Raises ConfigError, on all ranks, for names or shapes that do not fit."""

    def __init__(
        self,
        ties: Mapping[str, str],
        modules: Iterable[nn.Module],
        group: dist.ProcessGroup | None,
        transport: object | None,
    ):
        modules = list(modules)
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
        everyone = agree(transport, problem, numbers)  # type: ignore[arg-type]
        for index, tie in enumerate(self._ties):
            self._join(tie, [row[4 * index : 4 * index + 4] for row in everyone], group)

    def _join(self, tie: _Tie, held: list[list[int]], group: dist.ProcessGroup | None) -> None:
        """Check what every rank holds of `tie`, make the group of those that do, and give all the source's values."""
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
        if group is None or len(tie.ranks) == 1:
            return
        members = [dist.get_global_rank(group, rank) for rank in tie.ranks]
        if tie.parameter is None:
            return
        made = dist.new_group(members, use_local_synchronization=True, group_desc=f"hocket tie {tie.source}")
        assert isinstance(made, dist.ProcessGroup)
        tie.group = made
        source = dist.get_global_rank(group, owners[0])
        dist.broadcast(tie.parameter.data, source, group=tie.group)
        setattr(tie.parameter, _MARK, dist.get_rank() != source)

    def before_step(self) -> None:
        """Put earlier gradients aside: they have been summed over the ranks already."""
        for tie in self._ties:
            if tie.group is not None and tie.parameter is not None:
                tie.stashed, tie.parameter.grad = tie.parameter.grad, None

    def after_step(self) -> None:
        """Sum the step's gradients over the ranks, and add those put aside."""
        for tie in self._ties:
            parameter = tie.parameter
            if tie.group is None or parameter is None or not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=tie.group)
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
