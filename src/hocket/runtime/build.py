"""`build_schedule`: checks what it is given, agrees on it over the ranks, and makes this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from hocket.errors import ConfigError, HocketError, StageError
from hocket.passes import lower
from hocket.program import Op, Program
from hocket.runtime.agreement import agree, agree_on_text
from hocket.runtime.executor import PairRunner
from hocket.runtime.groups import Mesh, group_of
from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.microbatch import SplitRule
from hocket.runtime.p2p import Transport
from hocket.runtime.pipeline import PipelineInfo, PipelineSchedule, StepOptions
from hocket.runtime.result import LossFn, LossReduction
from hocket.runtime.rng import derive_seed, isolated_rng
from hocket.runtime.stage import Stage
from hocket.runtime.tied import TiedWeights
from hocket.runtime.watch import Watch
from hocket.schedules import InferenceConfig, ScheduleConfig, build, parse_schedule
from hocket.verify import verify
from hocket.version import VERSION

ModelProvider = Callable[[PipelineStageInfo], nn.Module]
Init = Literal["per_stage", "sequential"]


def build_schedule(
    mesh: Mesh,
    n_microbatches: int,
    schedule_config: ScheduleConfig | Mapping[str, Any] | str,
    model_provider: ModelProvider,
    loss_fn: LossFn | None = None,
    *,
    loss_reduction: LossReduction = "mean",
    split: Mapping[str | int, SplitRule] | None = None,
    dynamic_shapes: bool = False,
    run_pair: PairRunner | None = None,
    tied: Mapping[str, str] | None = None,
    seed: int | None = None,
    init: Init = "per_stage",
    device: torch.device | str | None = None,
    timeout: float = 600.0,
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
    tied: weights that several stages share, by names of the whole model: {copy: source}.
    seed: what initial weights and `keyed_rng` draw from; by default torch.initial_seed().
    init: "per_stage": the provider draws from a seed of its stage's own, so equal stages start different, and the same
        on any number of ranks. "sequential": from one stream through all stages, as one process that makes them in
        order would; for that, every rank makes every stage, one at a time, and keeps its own.
    device: where tensors travel; by default the current accelerator if the group uses one, else the CPU.
    timeout: seconds that this rank may wait for another, for one message or one call, before it gives up on it.

    Returns (info, modules), the modules in stage order. Raises ConfigError, on every rank, for arguments that cannot
    work or that differ between ranks.
    """
    group = group_of(mesh)
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    if not timeout > 0:
        raise ConfigError(f"timeout is {timeout}; give a number of seconds above 0")
    transport = None if group is None or ranks == 1 else Transport(group, _device(group, device), timeout)
    watch = transport.watch if transport else Watch(None, "", 0, 1, timeout)
    with watch.call("build_schedule"):
        if transport:
            transport.connect()
        try:
            config = parse_schedule(schedule_config)
            _check_arguments(config, n_microbatches, loss_fn, loss_reduction, init)
            _check_types(model_provider, loss_fn, tied, seed)
            program = lower(build(config, ranks=ranks, microbatches=n_microbatches))
            verify(program)
        except HocketError as error:
            agree(transport, error, [])
            raise
        agree(transport, None, [])
        agree_on_text(transport, _facts(config, n_microbatches, loss_reduction, program, tied, init))
        if transport:
            transport.open(_edges(program))
        seed = torch.initial_seed() if seed is None else seed
        modules = _make_modules(program, rank, model_provider, transport, seed, init)
        ties = TiedWeights(tied or {}, modules.values(), group, transport)
        split_backward = any(part.op == Op.I for _, _, action in program.actions() for part in action.computes)
        stages = {
            index: Stage(module, PipelineStageInfo(index, program.num_stages), split=split_backward)
            for index, module in modules.items()
        }
        options = StepOptions(loss_fn, loss_reduction, split or {}, dynamic_shapes, run_pair, seed)
        schedule = PipelineSchedule(config, program, rank, stages, transport, ties, options, watch)
        return PipelineInfo(schedule, 0 in stages, program.num_stages - 1 in stages), list(modules.values())


def _check_arguments(config: ScheduleConfig, count: int, loss_fn: Any, reduction: str, init: str) -> None:
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"n_microbatches is {count!r}; give a whole number of at least 1")
    if reduction not in get_args(LossReduction):
        raise ConfigError(f"loss_reduction is {reduction!r}; choose 'mean' or 'sum'")
    if init not in get_args(Init):
        raise ConfigError(f"init is {init!r}; choose 'per_stage' or 'sequential'")
    if loss_fn is None and not isinstance(config, InferenceConfig):
        raise ConfigError(
            f"schedule {config.schedule!r} trains, but loss_fn is None; give loss_fn, or use InferenceConfig"
        )


def _check_types(provider: Any, loss_fn: Any, tied: Any, seed: Any) -> None:
    if not callable(provider):
        raise ConfigError(f"model_provider is {provider!r}; give a function that makes the module of a stage")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}; give a function loss_fn(outputs, target)")
    if tied is not None and not isinstance(tied, Mapping):
        raise ConfigError(f"tied is {tied!r}; give a mapping of names, {{copy: source}}")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"seed is {seed!r}; give a whole number, or None for torch.initial_seed()")


def _facts(
    config: ScheduleConfig, count: int, reduction: str, program: Program, tied: Mapping[str, str] | None, init: str
) -> str:
    """What must be the same on all ranks, one fact a line."""
    return "\n".join(
        [
            f"hocket {VERSION}",
            f"schedule {config.model_dump_json()}",
            f"n_microbatches {count}",
            f"stages {program.num_stages}",
            f"loss_reduction {reduction}",
            f"tied {sorted((tied or {}).items())}",
            f"init {init}",
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


def _make_modules(
    program: Program, rank: int, provider: ModelProvider, transport: Transport | None, seed: int, init: Init
) -> dict[int, nn.Module]:
    """This rank's modules by stage; raises on all ranks what the provider raised on any."""
    modules: dict[int, nn.Module] = {}
    cause: BaseException | None = None
    problem: HocketError | None = None
    try:
        if init == "per_stage":
            for index in program.placement.stages_of(rank):
                with isolated_rng(derive_seed("init", seed, index)):
                    modules[index] = _provide(provider, index, program.num_stages)
        else:
            with isolated_rng(seed):
                for index in range(program.num_stages):
                    module = _provide(provider, index, program.num_stages)
                    if program.placement.rank_of(index) == rank:
                        modules[index] = module
    except HocketError as error:
        problem, cause = type(error)(f"rank {rank}: {error}"), error.__cause__
    try:
        agree(transport, problem, [])
    except HocketError as error:
        raise error from cause
    return modules


def _provide(provider: ModelProvider, index: int, num_stages: int) -> nn.Module:
    try:
        module = provider(PipelineStageInfo(index, num_stages))
    except Exception as error:
        raise StageError(f"model_provider failed for stage {index}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model_provider returned {type(module).__name__} for stage {index}; return an nn.Module")
    return module
