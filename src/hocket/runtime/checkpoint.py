"""Checkpoints under the names of the whole model: saved at one pipeline, loaded at any other, or in one process.

What is saved is in checkpoint_state.py, the folders are in checkpoint_files.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import ConfigError, HocketError
from hocket.runtime import checkpoint_files as files
from hocket.runtime import checkpoint_state as state
from hocket.runtime.checkpoint_files import latest_checkpoint
from hocket.runtime.checkpoint_state import listed
from hocket.runtime.groups import Mesh, group_of, rank_in, share
from hocket.runtime.names import as_modules, find_alias, names_of
from hocket.runtime.pipeline import PipelineSchedule

__all__ = ["LoadedCheckpoint", "SavedCheckpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_FORMAT = 1


@dataclass
class SavedCheckpoint:
    """A checkpoint that has been saved, or is being saved if it was asked to go on in the background."""

    path: Path
    step: int
    _work: Future[None] | None = None

    def wait(self) -> Path:
        """Return the folder when it is complete. Raises PipelineError on all ranks if it could not be written."""
        if self._work is not None:
            self._work.result()
        return self.path

    @property
    def done(self) -> bool:
        return self._work is None or self._work.done()


@dataclass
class LoadedCheckpoint:
    """What was loaded: the folder, the step it was saved at, and what the user had added."""

    path: Path
    step: int
    extra: Any = None
    ignored: list[str] = field(default_factory=list)
    """Names in the checkpoint that no stage has; only with strict=False."""


def save_checkpoint(
    path: str | os.PathLike[str],
    modules: Iterable[nn.Module] | nn.Module,
    *,
    schedule: PipelineSchedule | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    extra: Any = None,
    step: int | None = None,
    async_: bool = False,
    group: Mesh = None,
) -> SavedCheckpoint:
    """Write PATH/step-N, all of it or nothing. Call it on every rank.

    modules: this rank's stages, as `build_schedule` returned them, or a whole model. schedule: gives N (unless `step`
    does), the seed of `keyed_rng`, and the numbers of the stages. optimizer, lr_scheduler: one or several over this
    rank's parameters; a rank without any may leave them out. extra: numbers, strings, tensors, and lists and dicts of
    them; the first rank's is kept. async_: copy everything to the CPU now and write in the background; a later save
    waits for it. group: who saves together; by default all processes, data parallel ones too.

    Raises ConfigError, on all ranks, if two stages claim one name or something cannot be saved, and PipelineError if
    writing fails.
    """
    files.wait_for_background()
    together = group_of(group)
    modules = as_modules(modules)
    problem: HocketError | None = None
    tensors: dict[str, Any] = {}
    part = b""
    try:
        number = _step_of(schedule, step)
        tensors, facts = _collect(modules, schedule, _several(optimizer), _several(lr_scheduler))
        facts |= {"step": number, "extra": extra if rank_in(together) == 0 else None}
        part = state.dump(facts)
    except HocketError as error:
        problem = error
    parts = [state.restore(data) for data in share(part, problem, together)]
    values = _merged(parts)
    folder = files.folder_of(path, values["step"])
    if async_:
        return SavedCheckpoint(folder, values["step"], files.write_behind(folder, tensors, values, together))
    files.write(folder, tensors, values, together)
    return SavedCheckpoint(folder, values["step"])


def load_checkpoint(
    path: str | os.PathLike[str],
    modules: Iterable[nn.Module] | nn.Module,
    *,
    schedule: PipelineSchedule | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    strict: bool = True,
    restore_rng: bool = True,
    group: Mesh = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into this rank's stages, whatever pipeline saved it. Call it on every rank.

    path: a folder step-N, or the folder of all steps, which stands for its latest complete one. The arguments are those
    of `save_checkpoint`. `schedule` gets its number of steps and its seed back. Optimizers get each parameter's state
    and hyperparameters by name. torch's own generators are set back if ranks and schedule are as they were, unless
    `restore_rng` is False; `keyed_rng` needs no such thing. strict=False ignores names that no stage has.

    Raises ConfigError, on all ranks, that lists names missing in the checkpoint, names that no stage has, and shapes
    that differ. Checkpoints are read by torch.distributed.checkpoint, which trusts them: load only your own.
    """
    files.wait_for_background()
    together = group_of(group)
    modules = as_modules(modules)
    optimizers = _several(optimizer)
    folder = files.find(Path(path), together)
    metadata, values = files.read(folder)
    tensors, others = state.model_state(modules)
    aliases = {**values["aliases"], **_aliases(modules)}
    sources = {name: find_alias(name, aliases, metadata) for name in tensors}
    ignored = _check(tensors, others, sources, values, metadata, optimizers, strict, together)

    plan = state.OptimizerPlan(modules, values, metadata)
    wanted = {source: tensors[name] for name, source in sources.items() if source is not None}
    model_names = set(wanted)
    if optimizers:
        wanted |= plan.targets()
    files.read_tensors(folder, wanted)
    loaded = {name: wanted[source] for name, source in sources.items() if source in model_names}
    state.set_model_state(modules, loaded | {name: values["model_values"][name] for name in others})

    problem = None
    try:
        plan.load(optimizers, wanted)
        for scheduler, saved in zip(_several(lr_scheduler), values["lr_schedulers"] or [], strict=False):
            state.set_lr_state(scheduler, saved)
    except HocketError as error:
        problem = error
    share(b"", problem, together)
    if schedule is not None:
        schedule.steps = values["step"] if values["schedule_steps"] is None else values["schedule_steps"]
        schedule.seed = schedule.seed if values["seed"] is None else values["seed"]
    if (
        restore_rng
        and values["layout"] == f"{_layout(schedule)} {1 if together is None else dist.get_world_size(together)}"
    ):
        state.set_rng_state(values["rng"][rank_in(together)])
    return LoadedCheckpoint(folder, values["step"], values["extra"], ignored)


# --- saving


def _step_of(schedule: PipelineSchedule | None, step: int | None) -> int:
    if step is not None:
        return step
    if schedule is None:
        raise ConfigError("give save_checkpoint the schedule, or a step, so that the checkpoint has a number")
    return schedule.steps


def _collect(
    modules: Sequence[nn.Module],
    schedule: PipelineSchedule | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's tensors by name, and its plain values."""
    stages = schedule.program.placement.stages_of(schedule.rank) if schedule else range(len(modules))
    if len(stages) != len(modules):
        raise ConfigError(
            f"got {len(modules)} modules, but this rank has the stages {list(stages)}; pass the modules as "
            "build_schedule returned them"
        )
    claims: dict[str, list[int]] = {}
    for index, module in zip(stages, modules, strict=True):
        model, others = state.model_state([module])
        for name in [*model, *others]:
            claims.setdefault(name, []).append(index)
    model, others = state.model_state(modules)
    tensors, optimizer_values, hyper = state.optimizer_state(optimizers, modules)
    return model | tensors, {
        "format": _FORMAT,
        "schedule_steps": None if schedule is None else schedule.steps,
        "seed": None if schedule is None else schedule.seed,
        "claims": claims,
        "aliases": _aliases(modules),
        "model_values": others,
        "optimizer_values": optimizer_values,
        "hyperparameters": hyper,
        "groups": state.groups_of(optimizers),
        "lr_schedulers": [s.state_dict() for s in schedulers] or None,
        "layout": _layout(schedule),
        "rng": state.rng_state(),
    }


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks as one. Raises ConfigError if they contradict each other."""
    steps = {part["step"] for part in parts}
    if len(steps) > 1:
        raise ConfigError(f"the ranks are at different steps: {sorted(steps)}; save at the same step on all of them")
    claims: dict[str, set[int]] = {}
    for part in parts:
        for name, stages in part.pop("claims").items():
            claims.setdefault(name, set()).update(stages)
    double = [f"{name!r} by stages {sorted(stages)}" for name, stages in sorted(claims.items()) if len(stages) > 1]
    if double:
        raise ConfigError(
            f"names claimed by several stages: {'; '.join(double[:12])}; name parameters and buffers as in the whole "
            "model, such as layers.4.weight in the stage that holds layer 4, or make the buffers non-persistent"
        )
    found = dict(parts[0])
    for key in ("aliases", "model_values", "optimizer_values", "hyperparameters"):
        found[key] = {name: value for part in parts for name, value in part[key].items()}
    most = max(len(part["groups"]) for part in parts)
    rows = [part["groups"] for part in parts if len(part["groups"]) == most]
    found["groups"] = [next((g for g in column if g), None) for column in zip(*rows, strict=True)]
    found["lr_schedulers"] = next((part["lr_schedulers"] for part in parts if part["lr_schedulers"]), None)
    found["layout"] = f"{parts[0]['layout']} {len(parts)}"
    found["rng"] = [part["rng"] for part in parts]
    return found


# --- loading


def _check(
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[str, Any],
    sources: Mapping[str, str | None],
    values: Mapping[str, Any],
    metadata: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    strict: bool,
    group: dist.ProcessGroup | None,
) -> list[str]:
    """Compare names and shapes over all ranks; returns the names that no stage has. Raises ConfigError on all ranks."""
    problem = None
    try:
        state.refuse_meta(dict(tensors))
        if optimizers and not values["hyperparameters"]:
            raise ConfigError("the checkpoint holds no optimizer state; load it without optimizer")
    except ConfigError as error:
        problem = error
    missing = [name for name, source in sources.items() if source is None]
    missing += [name for name in others if name not in values["model_values"]]
    shapes = [
        f"{name!r} is {tuple(tensors[name].shape)} here and {tuple(metadata[source].size)} in the checkpoint"
        for name, source in sources.items()
        if source is not None and metadata[source].size != tensors[name].shape
    ]
    known = [*tensors, *others, *filter(None, sources.values())]
    mine = json.dumps({"missing": missing, "shapes": shapes, "known": known}).encode()
    rows = [json.loads(data) for data in share(mine, problem, group)]
    everywhere = {name for row in rows for name in row["known"]}
    saved = {name for name in metadata if not name.startswith(state.PREFIX)} | set(values["model_values"])
    extra = sorted(saved - everywhere)
    lines = []
    if lacking := {name for row in rows for name in row["missing"]}:
        lines.append(f"missing in the checkpoint: {listed(lacking)}")
    if extra and strict:
        lines.append(f"in the checkpoint, but in no stage: {listed(extra)} (strict=False ignores them)")
    if differing := sorted({text for row in rows for text in row["shapes"]}):
        lines.append(f"of another shape: {'; '.join(differing[:12])}")
    if lines:
        raise ConfigError("the checkpoint does not fit the model\n  " + "\n  ".join(lines))
    return extra


# --- small things


def _aliases(modules: Sequence[nn.Module]) -> dict[str, tuple[str, ...]]:
    return {name: names for names in names_of(modules).values() if len(names) > 1 for name in names}


def _layout(schedule: PipelineSchedule | None) -> str:
    """What must be as it was for torch's generators to mean the same; the number of processes comes on top."""
    return "one model" if schedule is None else f"{schedule.config.model_dump_json()} {schedule.program.placement}"


def _several(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
