"""What the user holds: `build_schedule` makes this rank's stages, and the schedule runs steps on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hocket.errors import ConfigError, HocketError, StageError
from hocket.passes import lower
from hocket.program import Op, Program
from hocket.runtime.agreement import agree, agree_on_text, signature
from hocket.runtime.context import StepContext
from hocket.runtime.executor import Executor, Hook, PairRunner, StepPlan
from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.microbatch import Microbatches, SplitRule, merge_outputs, split_step
from hocket.runtime.p2p import Transport
from hocket.runtime.payload import Layout
from hocket.runtime.result import AuxCollector, LossCollector, LossFn, LossReduction, StepResult, weights_of
from hocket.runtime.stage import Stage
from hocket.schedules import InferenceConfig, ScheduleConfig, build, forward_only, parse_schedule
from hocket.verify import verify

ModelProvider = Callable[[PipelineStageInfo], nn.Module]

_UNKNOWN = -1


@dataclass(frozen=True)
class PipelineInfo:
    """The schedule, and what this rank has of the pipeline."""

    schedule: PipelineSchedule
    has_first_stage: bool
    has_last_stage: bool


def build_schedule(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    n_microbatches: int,
    schedule_config: ScheduleConfig | Mapping[str, Any] | str,
    model_provider: ModelProvider,
    loss_fn: LossFn | None = None,
    *,
    loss_reduction: LossReduction = "mean",
    split: Mapping[str | int, SplitRule] | None = None,
    dynamic_shapes: bool = False,
    run_pair: PairRunner | None = None,
    device: torch.device | str | None = None,
) -> tuple[PipelineInfo, list[nn.Module]]:
    """Make this rank's stages and the schedule that runs them. Call it on every rank of the pipeline alike.

    mesh: a DeviceMesh of one dimension or with one named "pp", a ProcessGroup, or None for the whole world (one process
        if there is no process group).
    schedule_config: a config, its mapping, JSON, or a bare name.
    model_provider: called with a PipelineStageInfo for each stage of this rank, and only those; returns the module.
    loss_fn: loss_fn(outputs, target) -> scalar or (scalar, metrics); without targets its second argument is the
        microbatch's index. None: forward only.
    loss_reduction: "mean" if loss_fn averages over the microbatch, "sum" if it adds up.
    split: how arguments are divided into microbatches, by name or position: a dimension, "whole", or a function.
    dynamic_shapes: True if what a stage returns may change shape while the step's inputs do not.
    run_pair: runs the forward and the backward of an overlapped pair jointly; None: one after the other.
    device: where tensors travel; by default the current accelerator if the group uses one, else the CPU.

    Returns (info, modules), the modules in stage order. Raises ConfigError, on every rank, for arguments that cannot
    work or that differ between ranks.
    """
    group = _group_of(mesh)
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    config = parse_schedule(schedule_config)
    _check_arguments(config, n_microbatches, loss_fn, loss_reduction)
    program = lower(build(config, ranks=ranks, microbatches=n_microbatches))
    verify(program)
    transport = None if group is None or ranks == 1 else Transport(group, _edges(program), _device(group, device))
    agree_on_text(transport, _facts(config, n_microbatches, loss_reduction, program))
    stages = _make_stages(program, rank, model_provider, transport)
    schedule = PipelineSchedule(
        config, program, rank, stages, transport, loss_fn, loss_reduction, split or {}, dynamic_shapes, run_pair
    )
    info = PipelineInfo(schedule, 0 in stages, program.num_stages - 1 in stages)
    return info, [stage.module for stage in stages.values()]


class PipelineSchedule:
    """Runs steps of one pipeline. Made by `build_schedule`."""

    def __init__(
        self,
        config: ScheduleConfig,
        program: Program,
        rank: int,
        stages: dict[int, Stage],
        transport: Transport | None,
        loss_fn: LossFn | None,
        loss_reduction: LossReduction,
        split: Mapping[str | int, SplitRule],
        dynamic_shapes: bool,
        run_pair: PairRunner | None,
    ):
        self.config, self.program, self.rank = config, program, rank
        self.n_microbatches = program.num_microbatches
        self._stages, self._transport = stages, transport
        self._loss_fn, self._reduction, self._split = loss_fn, loss_reduction, split
        self._dynamic, self._run_pair = dynamic_shapes, run_pair
        self._hooks: list[Hook] = []
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._layouts: dict[tuple[Any, ...], dict[tuple[int, int, int], Layout]] = {}
        self.loss_rank = program.placement.rank_of(program.num_stages - 1)
        self._first_rank = program.placement.rank_of(0)
        self.steps = 0
        """Training steps done; `keyed_rng` draws on it, so set it when a run is resumed."""
        self.seed = torch.initial_seed()

    # --- what the user calls

    def step(
        self,
        *args: Any,
        targets: Any = None,
        loss_scale: float | torch.Tensor = 1.0,
        return_outputs: bool = False,
        n_microbatches: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run the schedule once: forward and backward of every microbatch, gradients added to `.grad`.

        Positional arguments feed stage 0, keyword arguments every stage that takes them; tensors are divided on
        dimension 0 unless `split` says otherwise. `loss_scale` multiplies before backward; the loss reported is without
        it. Raises ConfigError on all ranks for input that cannot work, before anything is sent, and StageError for what
        the user's code raises.
        """
        count = n_microbatches or self.n_microbatches
        train = self.program.has_backward
        return self._run(train, count, args, kwargs, targets, loss_scale, return_outputs)

    def evaluate(
        self,
        *args: Any,
        targets: Any = None,
        return_outputs: bool = False,
        n_microbatches: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Forward only, without gradients: the arguments of `step`, at any time and with any batch size.

        Touches neither `.grad` nor the modules' modes. A batch with fewer items than microbatches is divided into as
        many microbatches as it has items. The loss is None where there is no loss_fn, or it needs targets not given.
        """
        count = n_microbatches or self.n_microbatches
        return self._run(False, count, args, kwargs, targets, 1.0, return_outputs)

    def share_loss(self, result: StepResult) -> torch.Tensor:
        """The batch's loss, on every rank of the pipeline: a 0-d float64 tensor on the CPU. Call it on all of them."""
        mine = torch.full((), float("nan"), dtype=torch.float64)
        if result.loss is not None:
            mine = result.loss.detach().to("cpu", torch.float64).reshape(())
        return mine if self._transport is None else self._transport.broadcast(mine, self.loss_rank)

    def add_hook(
        self, hook: Hook, *, op: Op | None = None, stage: int | None = None, microbatch: int | None = None
    ) -> Callable[[], None]:
        """Call `hook(when, action, values)`, when = "before" or "after", around the actions that match.

        `values` are what the action has just made for others, or is about to send, if any. Returns a function that
        removes the hook.
        """

        def selected(when: str, action: Any, values: Any) -> None:
            if (
                (op is None or action.op == op)
                and (stage is None or action.stage == stage)
                and (microbatch is None or action.microbatch == microbatch)
            ):
                hook(when, action, values)

        self._hooks.append(selected)
        return lambda: self._hooks.remove(selected)

    def describe(self) -> str:
        """The schedule, and for each stage of this rank how its backward is split, and why."""
        lines = [f"{self.config.schedule}, {self.program.num_ranks} ranks, {self.program.num_stages} stages"]
        for index, stage in self._stages.items():
            choice = stage.splitter.choice
            lines.append(f"stage {index}: {choice.method.value}: {choice.reason}")
        return "\n".join(lines)

    # --- one run

    def _run(
        self,
        train: bool,
        count: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        loss_scale: float | torch.Tensor,
        return_outputs: bool,
    ) -> StepResult:
        begun = time.perf_counter()
        count, batch, key = self._agree(train, count, args, kwargs, targets)
        layouts = None if self._dynamic else self._layouts.get(key)
        parts = self._divide(args, kwargs, targets, count, batch, layouts is not None)
        weights = weights_of(self._reduction, parts.sizes, parts.count)
        collector = self._collector(train, parts, targets is not None, weights, loss_scale, return_outputs)
        aux = AuxCollector(weights)
        executor = self._executor(train, count)
        executor.hooks = self._hooks
        context = StepContext(self.steps, self.seed, weights, loss_scale, aux)
        with nullcontext() if train else torch.no_grad():
            executor.run(StepPlan(parts.args, parts.kwargs, collector, layouts, train, context))
        if layouts is None and not self._dynamic:
            self._remember(key, executor.seen)
        self.steps += train
        result = StepResult(self.loss_rank, seconds=time.perf_counter() - begun, wait_seconds=executor.record.waited)
        result.busy_seconds, result.aux_losses = executor.record.busy, aux.totals
        if collector is not None:
            collector.finish(result)
            if collector.outputs is not None:
                result.outputs = merge_outputs(collector.outputs, parts.sizes)
        return result

    def _agree(
        self, train: bool, count: int, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
    ) -> tuple[int, int | None, tuple[Any, ...]]:
        """What all ranks hold of this step: the number of microbatches, the batch size, and the key of its shapes."""
        problem: HocketError | None = None
        batch = _UNKNOWN
        try:
            self._check_inputs(train, args, targets)
            batch = self._claim(args, targets, count)
        except ConfigError as error:
            problem = error
        flags = [p.requires_grad for stage in self._stages.values() for p in stage.module.parameters()]
        shapes = signature(args, kwargs, targets is None, flags, _autocast_state())
        rows = agree(self._transport, problem, [train, count, batch, shapes])
        _refuse_differences(rows)
        known = [row[2] for row in rows if row[2] != _UNKNOWN]
        size = known[0] if known else None
        if not train and size is not None:
            count = min(count, max(size, 1))
        return count, size, tuple(map(tuple, rows))

    def _check_inputs(self, train: bool, args: tuple[Any, ...], targets: Any) -> None:
        if self.rank == self._first_rank and not args:
            raise ConfigError(
                f"rank {self.rank} holds stage 0 but got no positional argument; pass the inputs: "
                "step(inputs, targets=...)"
            )

    def _claim(self, args: tuple[Any, ...], targets: Any, count: int) -> int:
        """The batch size as this rank's inputs or targets tell it, or unknown."""
        if self.rank == self._first_rank:
            found = split_step(args, {}, None, 1, split=self._split).batch_size
        elif self.rank == self.loss_rank and isinstance(targets, torch.Tensor) and targets.dim():
            found = len(targets)
        else:
            found = None
        return _UNKNOWN if found is None else found

    def _divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, count: int, batch: int | None, known: bool
    ) -> Microbatches:
        """Divide this rank's arguments. Shapes not seen before are agreed on once more, so that all refuse alike."""
        problem: HocketError | None = None
        parts = None
        try:
            mine = args if 0 in self._stages else ()
            parts = split_step(mine, kwargs, targets, count, split=self._split, batch_size=batch)
        except ConfigError as error:
            problem = error
        if not known or problem:
            agree(self._transport, problem, [])
        assert parts is not None
        return parts

    def _collector(
        self,
        train: bool,
        parts: Microbatches,
        has_targets: bool,
        weights: list[float],
        loss_scale: float | torch.Tensor,
        keep: bool,
    ) -> LossCollector | None:
        if self.rank != self.loss_rank:
            return None
        loss_fn = self._loss_fn
        if not train and not has_targets and loss_fn is not None and self._targets_needed:
            loss_fn = None
        if train and has_targets:
            self._targets_needed = True
        return LossCollector(loss_fn, parts.targets if has_targets else None, weights, loss_scale, keep)

    _targets_needed = False

    def _executor(self, train: bool, count: int) -> Executor:
        found = self._executors.get((train, count))
        if found is None:
            program = self._program(train, count)
            found = Executor(program, self.rank, self._stages, self._transport, self._run_pair)
            self._executors[train, count] = found
        return found

    def _program(self, train: bool, count: int) -> Program:
        if train == self.program.has_backward and count == self.n_microbatches:
            return self.program
        if train:
            program = build(self.config, ranks=self.program.num_ranks, microbatches=count)
        else:
            program = forward_only(self.program.placement, count)
        program = lower(program)
        verify(program)
        return program

    def _remember(self, key: tuple[Any, ...], layouts: dict[tuple[int, int, int], Layout]) -> None:
        if len(self._layouts) >= 128:
            self._layouts.clear()
        self._layouts[key] = layouts


# --- building


def _group_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            return mesh.get_group("pp")
        if mesh.ndim == 1:
            return mesh.get_group()
        raise ConfigError(
            f"the mesh has dimensions {names or mesh.ndim}; name the pipeline's 'pp', or pass a mesh of one dimension"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise ConfigError(f"mesh is {type(mesh).__name__}; pass a DeviceMesh, a ProcessGroup, or None for the whole world")


def _check_arguments(config: ScheduleConfig, count: int, loss_fn: Any, reduction: str) -> None:
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"n_microbatches is {count!r}; give a whole number of at least 1")
    if reduction not in get_args(LossReduction):
        raise ConfigError(f"loss_reduction is {reduction!r}; choose 'mean' or 'sum'")
    if loss_fn is None and not isinstance(config, InferenceConfig):
        raise ConfigError(
            f"schedule {config.schedule!r} trains, but loss_fn is None; give loss_fn, or use InferenceConfig"
        )


def _facts(config: ScheduleConfig, count: int, reduction: str, program: Program) -> str:
    """What must be the same on all ranks, one fact a line."""
    from hocket import __version__

    return "\n".join(
        [
            f"hocket {__version__}",
            f"schedule {config.model_dump_json()}",
            f"n_microbatches {count}",
            f"stages {program.num_stages}",
            f"loss_reduction {reduction}",
            f"program {hash((program.placement.stage_to_rank, program.ranks)):x}",
        ]
    )


def _edges(program: Program) -> list[tuple[int, int]]:
    home = program.placement.stage_to_rank
    found = set()
    for stage in range(program.num_stages - 1):
        here, there = home[stage], home[stage + 1]
        if here != there:
            found |= {(here, there), (there, here)}
    return sorted(found)


def _device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.get_backend(group) == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _make_stages(program: Program, rank: int, provider: ModelProvider, transport: Transport | None) -> dict[int, Stage]:
    split = any(part.op == Op.I for _, _, action in program.actions() for part in action.computes)
    stages: dict[int, Stage] = {}
    problem: HocketError | None = None
    cause: Exception | None = None
    for index in program.placement.stages_of(rank):
        info = PipelineStageInfo(index, program.num_stages)
        try:
            module = provider(info)
        except Exception as error:
            problem, cause = (
                StageError(f"rank {rank}: model_provider failed for stage {index}: {type(error).__name__}: {error}"),
                error,
            )
            break
        if not isinstance(module, nn.Module):
            problem = ConfigError(
                f"rank {rank}: model_provider returned {type(module).__name__} for stage {index}; return an nn.Module"
            )
            break
        stages[index] = Stage(module, info, split=split)
    try:
        agree(transport, problem, [])
    except StageError as error:
        raise error from cause
    return stages


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _refuse_differences(rows: Sequence[Sequence[int]]) -> None:
    """Raise, on all ranks alike, if the ranks do not run the same kind of step."""
    for column, what in ((0, "kind of call (step = 1, evaluate = 0)"), (1, "number of microbatches")):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            raise ConfigError(
                f"the ranks disagree on the {what}: "
                + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
                + "; make the same call on every rank"
            )
    claims = {rank: row[2] for rank, row in enumerate(rows) if row[2] != _UNKNOWN}
    if len(set(claims.values())) > 1:
        raise ConfigError(
            "the ranks disagree on the batch size: "
            + ", ".join(f"rank {rank} has {value} items" for rank, value in claims.items())
            + "; give inputs and targets of the same batch"
        )
