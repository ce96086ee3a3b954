"""What the user holds: the schedule, which runs steps on this rank's stages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hocket.errors import ConfigError
from hocket.passes import lower
from hocket.program import Action, Op, Program
from hocket.runtime.context import StepContext
from hocket.runtime.executor import Executor, Hook, PairRunner, StepPlan
from hocket.runtime.feed import in_step
from hocket.runtime.intake import Intake, Key, Upstream, remember
from hocket.runtime.measure import StepTrace, trace_of
from hocket.runtime.microbatch import Microbatches, SplitRule, merge_outputs
from hocket.runtime.p2p import Name, Transport
from hocket.runtime.payload import Layout
from hocket.runtime.result import AuxCollector, LossCollector, LossFn, LossReduction, StepResult, weights_of
from hocket.runtime.stage import Stage
from hocket.runtime.tied import TiedWeights
from hocket.runtime.watch import Watch
from hocket.schedules import ScheduleConfig, build, forward_only
from hocket.verify import verify


@dataclass(frozen=True)
class PipelineInfo:
    """The schedule, and what this rank has of the pipeline."""

    schedule: PipelineSchedule
    has_first_stage: bool
    has_last_stage: bool


@dataclass(frozen=True)
class StepOptions:
    """What `build_schedule` was told of every step."""

    loss_fn: LossFn | None
    loss_reduction: LossReduction
    split: Mapping[str | int, SplitRule]
    dynamic_shapes: bool
    run_pair: PairRunner | None
    seed: int


class PipelineSchedule:
    """Runs steps of one pipeline. Made by `build_schedule`."""

    def __init__(
        self,
        config: ScheduleConfig,
        program: Program,
        rank: int,
        stages: dict[int, Stage],
        transport: Transport | None,
        ties: TiedWeights,
        options: StepOptions,
        watch: Watch,
    ):
        self.config, self.program, self.rank = config, program, rank
        self.n_microbatches = program.num_microbatches
        self._stages, self._transport, self._ties, self._options = stages, transport, ties, options
        self._watch = watch
        self._hooks: list[Hook] = []
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._layouts: dict[Key, dict[Name, Layout]] = {}
        self._targets_needed: bool | None = None
        self.loss_rank = program.placement.rank_of(program.num_stages - 1)
        self._intake = Intake(stages, transport, rank, program.placement.rank_of(0), self.loss_rank, options.split)
        self._last: Executor | None = None
        self.steps = 0
        """Training steps done; `keyed_rng` draws on it, so set it when a run is resumed."""
        self.seed = options.seed

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

        Positional arguments feed stage 0, keyword arguments every stage that takes them; tensors as long as the batch
        are divided on dimension 0 and all else goes whole, unless `split` says otherwise. `loss_scale` multiplies
        before backward; the loss reported is without it. Raises ConfigError on all ranks for input that cannot work,
        before anything is sent, and StageError for what the user's code raises.
        """
        count = self.n_microbatches if n_microbatches is None else n_microbatches
        train = self.program.has_backward
        with self._watch.call(f"step {self.steps}"):
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
        count = self.n_microbatches if n_microbatches is None else n_microbatches
        with self._watch.call("evaluate"):
            return self._run(False, count, args, kwargs, targets, 1.0, return_outputs)

    def share_loss(self, result: StepResult) -> torch.Tensor:
        """The batch's loss, on every rank of the pipeline: a 0-d float64 tensor on the CPU. Call it on all of them."""
        mine = torch.full((), float("nan"), dtype=torch.float64)
        if result.loss is not None:
            mine = result.loss.detach().to("cpu", torch.float64).reshape(())
        if self._transport is None:
            return mine
        with self._watch.call("share_loss"):
            return self._transport.broadcast(mine, self.loss_rank)

    def share_metrics(self, result: StepResult) -> dict[str, float]:
        """The batch's metrics and auxiliary losses, on every rank of the pipeline. Call it on all of them."""
        names = sorted({*result.metrics, *result.aux_losses})
        mine = {name: float(result.metrics.get(name, 0.0)) + float(result.aux_losses.get(name, 0.0)) for name in names}
        if self._transport is None:
            return mine
        total: dict[str, float] = {}
        with self._watch.call("share_metrics"):
            texts = self._transport.gather_text(json.dumps(mine))
        for text in texts:
            for name, value in json.loads(text).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def trace(self, *, all_ranks: bool = False) -> StepTrace:
        """Start and end of each compute action of the last step, as measured on this rank.

        `all_ranks`: those of every rank, on every rank; then call it on all of them. `.report()` says how far the step
        is from the simulated one, `.to_chrome()` is for Perfetto and `hocket draw --measured`.
        """
        if self._last is None:
            raise ConfigError("no step has run yet, so there is nothing to trace; call step first")
        return trace_of(self._last, self._transport, all_ranks=all_ranks)

    def add_hook(
        self, hook: Hook, *, op: Op | None = None, stage: int | None = None, microbatch: int | None = None
    ) -> Callable[[], None]:
        """Call `hook(when, action, tensors)`, when = "before" or "after", around the actions that match.

        `tensors` are, before F, what came in; after F, what the stage returned, and then the loss; before B and I the
        gradients that came in; after them those of the stage's inputs; around a send what is sent; else none. The two
        parts of an overlapped pair are announced one by one. Returns a function that removes the hook.
        """

        def selected(when: str, action: Action, values: list[torch.Tensor]) -> None:
            if (
                (op is None or action.op == op)
                and (stage is None or action.stage == stage)
                and (microbatch is None or action.microbatch == microbatch)
            ):
                hook(when, action, values)

        self._hooks.append(selected)
        return lambda: self._hooks.remove(selected)

    def batches(self, data: Iterable[Any] | None) -> Iterator[Any]:
        """The items of `data` for as long as every rank that has data has one more, so that all ranks stop at once.

        Call it on all ranks; a rank without data passes None and gets None. An error in `data` stops all ranks.
        """
        return in_step(data, self._transport, self._watch)

    def reset(self) -> None:
        """Make a pipeline that has failed ready for steps again. Call it on all ranks, and zero the gradients.

        Possible as long as all ranks live, so not after one was killed: the ranks connect anew. Raises
        PipelineTimeoutError, on all ranks, if one does not come within `timeout`. Gradients of the failed step are in
        part added to `.grad`; parameters have not changed.
        """
        for executor in self._executors.values():
            executor.forget()
        for stage in self._stages.values():
            stage.forget()
        self._ties.after_failure()
        # What was remembered may differ: a step may have ended on some ranks before it failed on others.
        self._layouts.clear()
        self._intake.forget()
        if self._transport is None:
            self._watch.verdict = None
            return
        self._transport.prepare()
        self._watch = self._transport.watch
        with self._watch.call("reset"):
            self._transport.renew()
            self.steps = min(row[0] for row in self._transport.gather([self.steps]))

    def describe(self) -> str:
        """The schedule, and for each stage of this rank how its backward is split, and why."""
        ranks, stages = self.program.num_ranks, self.program.num_stages
        lines = [f"{self.config.schedule}, {ranks} rank{'s'[: ranks != 1]}, {stages} stage{'s'[: stages != 1]}"]
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
        count, batch, key = self._intake.agree(train, count, args, kwargs, targets, loss_scale)
        layouts = None if self._options.dynamic_shapes else self._layouts.get(key)
        upstream = Upstream()
        if train:
            args, kwargs = upstream.cut(args, kwargs)
        parts = self._intake.divide(args, kwargs, targets, count, batch, layouts is not None)
        weights = weights_of(self._options.loss_reduction, parts.sizes, parts.count)
        collector = self._collector(train, parts, targets is not None, weights, loss_scale, return_outputs)
        aux = AuxCollector(weights)
        executor = self._last = self._executor(train, count)
        executor.hooks = self._hooks
        context = StepContext(self.steps, self.seed, weights, loss_scale, aux)
        if train:
            self._ties.before_step()
        self._watch.executor = executor
        with nullcontext() if train else torch.no_grad():
            executor.run(StepPlan(parts.args, parts.kwargs, collector, layouts, train, context))
        if layouts is None and not self._options.dynamic_shapes:
            remember(self._layouts, key, executor.seen)
        self._watch.executor = None
        if train:
            upstream.backward()
            self._ties.after_step()
            self.steps += 1
        record = executor.record
        result = StepResult(self.loss_rank, aux_losses=aux.totals, measured=partial(executor.seconds, record))
        result.seconds = time.perf_counter() - begun
        if collector is not None:
            collector.finish(result)
            if collector.outputs is not None:
                result.outputs = merge_outputs(collector.outputs, parts.sizes)
        return result

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
        loss_fn = self._options.loss_fn
        if train:
            self._targets_needed = has_targets
        elif not has_targets and self._targets_needed:
            loss_fn = None
        # Before the first step nobody knows whether loss_fn makes do with the microbatch's index: then it is tried.
        optional = not train and not has_targets and self._targets_needed is None
        targets = parts.targets if has_targets else None
        return LossCollector(loss_fn, targets, weights, loss_scale, keep, optional)

    def _executor(self, train: bool, count: int) -> Executor:
        found = self._executors.get((train, count))
        if found is None:
            program = self._program(train, count)
            found = Executor(program, self.rank, self._stages, self._transport, self._options.run_pair)
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
