"""Loads a full state dict of the whole model, such as one of Hugging Face, into the stages of this rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hocket.errors import ConfigError
from hocket.runtime.checkpoint_state import listed, model_state, refuse_meta, set_model_state
from hocket.runtime.groups import Mesh, group_of, share
from hocket.runtime.names import as_modules, find_alias, names_of


def load_full_state_dict(
    modules: Iterable[nn.Module] | nn.Module,
    state: Mapping[str, torch.Tensor],
    mesh: Mesh = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Copy from `state`, by names of the whole model, what this rank's stages have. Call it on every rank.

    state: any mapping from names to tensors, on every rank or at least with this rank's names; one that reads from a
    file when asked is asked for these names only. mesh: as given to `build_schedule`. A tied weight is found under any
    of its names. Returns the names that no stage has; they raise unless strict=False.

    Raises ConfigError, on all ranks, that lists names missing in `state`, names that no stage has, and shapes that
    differ.
    """
    modules = as_modules(modules)
    targets, others = model_state(modules)
    aliases = {name: names for names in names_of(modules).values() for name in names}
    names = {*state.keys()}
    sources = {name: find_alias(name, aliases, names) for name in [*targets, *others]}
    problem = None
    try:
        refuse_meta(targets)
    except ConfigError as error:
        problem = error
    shapes = [
        f"{name!r} is {tuple(targets[name].shape)} here and {tuple(state[source].shape)} in the state dict"
        for name, source in sources.items()
        if name in targets and source is not None and state[source].shape != targets[name].shape
    ]
    facts = {
        "missing": [name for name, source in sources.items() if source is None],
        "shapes": shapes,
        "known": [*sources, *aliases],
        "there": sorted(names),
    }
    rows = [json.loads(data) for data in share(json.dumps(facts).encode(), problem, group_of(mesh))]
    extra = {name for row in rows for name in row["there"]} - {name for row in rows for name in row["known"]}
    _refuse(rows, extra if strict else set())
    with torch.no_grad():
        values = {
            name: _like(targets[name], state[source]) if name in targets else state[source]
            for name, source in sources.items()
            if source is not None
        }
        set_model_state(modules, values)
    return sorted(extra)


def _refuse(rows: list[dict[str, list[str]]], extra: set[str]) -> None:
    lines = []
    if missing := {name for row in rows for name in row["missing"]}:
        lines.append(f"missing in the state dict: {listed(missing)}")
    if extra:
        lines.append(f"in the state dict, but in no stage: {listed(extra)} (strict=False ignores them)")
    if shapes := sorted({text for row in rows for text in row["shapes"]}):
        lines.append(f"of another shape: {'; '.join(shapes[:12])}")
    if lines:
        raise ConfigError("the state dict does not fit the model\n  " + "\n  ".join(lines))


def _like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` cut like `target`, without communication: every rank has it in full."""
    if not isinstance(target, DTensor):
        return value
    value = value.to(target.device)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
