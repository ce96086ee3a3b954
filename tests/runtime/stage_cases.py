"""Runs cases of stages and batches on ranks, many in one group, and in one process for comparison.

A case names its stages, its batches and its loss. `reference` runs the same microbatches one after the other as plain
Python calls; it divides batches by itself and shares no code with the runtime but the even ranges.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hocket import split_microbatch_ranges
from hocket.runtime import PipelineStageInfo, build_schedule

WIDTH = 6
TRAINING = ("gpipe", "zb", "dual_pipe_v")
"""One with all messages between ranks, one with a backward in two halves, one that hands over on a rank as well."""
CONFIGS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "bfs": {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "1f1b", "num_stages_per_rank": 2},
    "zb": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    "zbv": {"schedule": "zero_bubble_v"},
    "dual_pipe_v": {"schedule": "dual_pipe_v"},
}


torch.manual_seed(0)
X, Y = torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@dataclass
class Call:
    """One call of `step`, or of `evaluate`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Any = None
    evaluate: bool = False
    options: dict[str, Any] = field(default_factory=dict)


Observe = Callable[[Sequence[nn.Module]], Any]


@dataclass
class Case:
    """Stages, and the calls made of them one after the other, without an optimizer: gradients add up."""

    provider: Callable[[PipelineStageInfo], nn.Module]
    calls: list[Call]
    loss_fn: Callable[..., Any] = mse
    count: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    """Of build_schedule."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context for all calls."""
    observe: Observe | None = None
    """What to look at in the modules after all calls."""


@dataclass
class Ran:
    """What a case gave on one rank, or in one process."""

    losses: list[float | None]
    gradients: dict[str, torch.Tensor | None]
    outputs: list[Any]
    observed: dict[int, Any]
    num_stages: int


def registrar(cases: dict[str, Case]) -> Callable[..., Callable[[type[nn.Module]], type[nn.Module]]]:
    """A decorator `case(name, **more)` that puts a stage class into `cases`, by default with one step on X and Y."""

    def case(name: str, **more: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
        def add(provider: type[nn.Module]) -> type[nn.Module]:
            cases[name] = Case(provider, **{"calls": [Call((X,), targets=Y)], **more})
            return provider

        return add

    return case


class Linear(nn.Module):
    """A stage with one layer; `is_first` and `is_last` tell where it stands."""

    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        torch.manual_seed(100 + info.current_stage)
        self.info, self.is_first, self.is_last = info, info.is_first, info.is_last
        self.layer = nn.Linear(WIDTH, WIDTH)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(h))


def logged(modules: Sequence[nn.Module]) -> Any:
    return [m.log for m in modules]


# --- on ranks ---------------------------------------------------------------------------------------------------------


def run_case(case: Case, config: Mapping[str, Any] | str) -> Ran:
    info, modules = build_schedule(None, case.count, config, case.provider, case.loss_fn, **case.options)
    schedule = info.schedule
    losses: list[float | None] = []
    outputs = []
    for call in case.calls:
        run = schedule.evaluate if call.evaluate else schedule.step
        with case.around():
            result = run(*call.args, targets=call.targets, **call.options, **call.kwargs)
        assert (result.loss is not None) == info.has_last_stage
        losses.append(None if result.loss is None else float(result.loss))
        outputs.append(result.outputs)
    indices = schedule.program.placement.stages_of(schedule.rank)
    stages = dict(zip(indices, modules, strict=True))
    observed = {i: case.observe([m]) for i, m in stages.items()} if case.observe else {}
    return Ran(losses, gradients_of(stages), outputs, observed, schedule.program.num_stages)


def run_cases(rank: int, cases: Mapping[str, Case], configs: Sequence[str]) -> dict[tuple[str, str], Ran]:
    found = {}
    for (name, case), config in itertools.product(cases.items(), configs):
        try:
            found[name, config] = run_case(case, CONFIGS[config])
        except Exception as error:
            error.add_note(f"in case {name!r} under {config!r} on rank {rank}")
            raise
    return found


def once(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`, done once for all tests that look at its result; if it failed, each of them fails at once."""
    found: list[tuple[Any, BaseException | None]] = []

    def get() -> Any:
        if not found:
            try:
                found.append((run(), None))
            except BaseException as error:
                found.append((None, error))
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return get


def merge_ranks(rows: Sequence[Ran]) -> Ran:
    """What all ranks together gave."""
    last = next(row for row in rows if None not in row.losses)
    gradients: dict[str, torch.Tensor | None] = {}
    observed: dict[int, Any] = {}
    for row in rows:
        gradients.update(row.gradients)
        observed.update(row.observed)
    return Ran(last.losses, gradients, last.outputs, observed, last.num_stages)


# --- in one process ---------------------------------------------------------------------------------------------------


def reference(case: Case, num_stages: int) -> Ran:
    stages = {s: case.provider(PipelineStageInfo(s, num_stages)) for s in range(num_stages)}
    losses: list[float | None] = []
    outputs = []
    for call in case.calls:
        with case.around(), torch.set_grad_enabled(not call.evaluate):
            loss, output = _reference_call(case, call, stages)
        losses.append(loss)
        outputs.append(output)
    observed = {s: case.observe([m]) for s, m in stages.items()} if case.observe else {}
    return Ran(losses, gradients_of(stages), outputs, observed, num_stages)


def _reference_call(case: Case, call: Call, stages: Mapping[int, nn.Module]) -> tuple[float, list[Any]]:
    total, outputs = 0.0, []
    for index, (args, kwargs, target, weight) in enumerate(divided(case, call)):
        output: Any = args
        for stage in stages.values():
            positional, named = _arguments(output)
            output = stage(*positional, **{**_taken(stage, kwargs), **named})
        loss = case.loss_fn(output, index if call.targets is None else target)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if case.options.get("loss_reduction") == "sum":
            weight = 1.0
        if not call.evaluate and loss.requires_grad:
            (loss * weight).backward()
        total += float(loss.detach()) * weight
        outputs.append(output)
    return total, outputs


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(value) is tuple:
        return value, {}
    return ((), value) if type(value) is dict else ((value,), {})


def _taken(stage: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(stage.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


def divided(case: Case, call: Call) -> list[tuple[tuple[Any, ...], dict[str, Any], Any, float]]:
    """The call's microbatches: arguments, keywords, target, weight."""
    count = call.options.get("n_microbatches", case.count)
    rules = case.options.get("split", {})
    first = call.args[0] if call.args else next(iter(call.kwargs.values()))
    if type(first) is list:
        lengths = [len(_pytree.tree_leaves(part)[0]) for part in first]
        items = [range(end - length, end) for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]
        batch = sum(lengths)
    else:
        batch = next(x for x in _pytree.tree_leaves(first) if isinstance(x, torch.Tensor)).size(rules.get(0, 0))
        items = split_microbatch_ranges(batch, min(count, batch) if call.evaluate else count)

    def part(value: Any, index: int, rule: Any = 0) -> Any:
        if callable(rule):
            return rule(value, len(items))[index]
        if type(value) is list:
            return value[index]

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or rule == "whole" or leaf.dim() <= rule or leaf.size(rule) != batch:
                return leaf
            return leaf.narrow(rule, items[index].start, len(items[index])).clone()

        return _pytree.tree_map(cut, value)

    return [
        (
            tuple(part(value, i, rules.get(position, 0)) for position, value in enumerate(call.args)),
            {name: part(value, i, rules.get(name, 0)) for name, value in call.kwargs.items()},
            part(call.targets, i, rules.get("targets", 0)),
            len(items[i]) / batch,
        )
        for i in range(len(items))
    ]


def gradients_of(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor | None]:
    return {
        f"{index}.{name}": None if p.grad is None else p.grad.clone()
        for index, stage in stages.items()
        for name, p in stage.named_parameters()
    }


# --- comparing --------------------------------------------------------------------------------------------------------


def assert_same(got: Ran, expected: Ran, bound: float = 1e-5) -> None:
    """Losses and gradients agree to a relative error of `bound`; observed values are equal."""
    for ours, theirs in zip(got.losses, expected.losses, strict=True):
        assert ours is not None and theirs is not None
        assert abs(ours - theirs) <= bound * max(abs(theirs), 1e-3), (got.losses, expected.losses)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, theirs in expected.gradients.items():
        ours = got.gradients[name]
        if theirs is None or ours is None:
            # A pipeline may give zeros where one process gives no gradient, and never the other way round.
            assert theirs is None and (ours is None or not ours.any()), f"{name}: {ours} for {theirs}"
            continue
        error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
        assert error <= bound, f"{name}: relative error {float(error):.1e}\n{ours}\n{theirs}"
    assert got.observed == expected.observed
