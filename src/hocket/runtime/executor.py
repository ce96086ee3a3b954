"""Runs this rank's list of actions on its stages: one match on the op, all else decided when it is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hocket.errors import ConfigError, PipelineError, StageError
from hocket.program import Action, Op, Program, message, unfold
from hocket.runtime.context import Place, StepContext, enter
from hocket.runtime.p2p import Transport, Work
from hocket.runtime.payload import Layout, TensorMeta
from hocket.runtime.release import releases
from hocket.runtime.stage import Received, Stage

Name = tuple[int, int, int]


class Objective(Protocol):
    """What happens to the last stage's output of a microbatch: gives the tensor that backward starts from, if any."""

    def __call__(self, microbatch: int, output: Any) -> torch.Tensor | None: ...


@dataclass
class StepPlan:
    """One step's data on this rank: a value for each microbatch, and what is done with the last stage's outputs."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    objective: Objective | None
    layouts: dict[Name, Layout] | None
    """Of the messages, by name, if a step with the same inputs has been seen; None: each message brings its own."""
    train: bool
    context: StepContext


@dataclass
class Record:
    """Start and end of each action of the last step, in seconds of `time.perf_counter`, and the seconds waited."""

    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    waited: float = 0.0
    computed: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds spent in compute actions, without their waits."""
        return self.computed - self.waited


Hook = Callable[[str, Action, Any], None]
"""Called as hook("before" | "after", action, values) around an action."""

PairRunner = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs the forward and the backward of an overlapped pair, given as two functions without arguments."""


class Executor:
    """Interprets the actions of one rank.

    program: lowered and verified. stages: this rank's, by index. transport: None where the pipeline is one process.
    run_pair: runs the two parts of an overlapped pair jointly; None runs them one after the other.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport | None,
        run_pair: PairRunner | None = None,
    ):
        self.program, self.rank, self.stages, self.transport = program, rank, stages, transport
        self.run_pair = run_pair
        self.order = unfold(program.ranks[rank]) if run_pair is None else list(program.ranks[rank])
        self.last = program.num_stages - 1
        self.home = program.placement.stage_to_rank
        self.releases = releases(program, rank) if transport else {}
        # The last I or B of each stage: behind it the stage's gradients are complete, or left to its W alone.
        self.final = {part.stage: part.microbatch for a in self.order for part in a.computes if part.op in (Op.B, Op.I)}
        self.hooks: list[Hook] = []
        self.record = Record()
        self.current: Action | None = None
        self._clear()

    def _clear(self) -> None:
        self._handed: dict[Name, Any] = {}
        self._outbox: dict[Name, Any] = {}
        self._sending: dict[Name, list[Work]] = {}
        self.seen: dict[Name, Layout] = {}

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        self._clear()
        enter(None)
        for stage in self.stages.values():
            stage.forget()
        if self.transport:
            self.transport.forget()

    def run(self, plan: StepPlan) -> None:
        """One step. Raises StageError for what the user's code raises, with rank, stage, microbatch and action."""
        self.plan = plan
        for index, microbatch in self.final.items():
            self.stages[index].final_microbatch = microbatch
        self.seen = {} if plan.layouts is None else plan.layouts
        self.record = record = Record()
        clock = time.perf_counter
        starts, ends, perform = record.start, record.end, self._perform
        for action in self.order:
            self.current = action
            begun = clock()
            perform(action)
            ended = clock()
            starts.append(begun)
            ends.append(ended)
            if action.op.is_compute:
                record.computed += ended - begun
        self.current = None
        enter(None)
        for works in self._sending.values():
            for work in works:
                work.wait()
        self._sending.clear()

    def _perform(self, action: Action) -> None:
        op, stage, microbatch, parts = action
        if self.hooks:
            self._announce("before", action)
        match op:
            case Op.F:
                self._forward(stage, microbatch)
            case Op.B:
                self._backward(stage, microbatch, self.stages[stage].backward_full)
            case Op.I:
                self._backward(stage, microbatch, self.stages[stage].backward_input)
            case Op.W:
                self._guard(self.stages[stage].backward_weight, microbatch)
            case Op.SEND_F:
                self._send_activation(stage, microbatch)
            case Op.RECV_F:
                self._post_activation(stage, microbatch)
            case Op.SEND_B:
                self._send_gradient(stage, microbatch)
            case Op.RECV_B:
                self._post_gradient(stage, microbatch)
            case Op.OVERLAP_F_B:
                assert self.run_pair is not None
                forward, backward = parts
                self.run_pair(lambda: self._perform(forward), lambda: self._perform(backward))
        if self.hooks:
            self._announce("after", action)

    # --- computing

    def _forward(self, index: int, microbatch: int) -> None:
        stage, plan = self.stages[index], self.plan
        received = self._receive(index, microbatch) if index > 0 else None
        args = plan.args[microbatch] if index == 0 else ()
        enter(Place(plan.context, index, microbatch, recording=True))
        output = self._guard(stage.forward, microbatch, received, args, plan.kwargs[microbatch], train=plan.train)
        if index == self.last:
            root = self._guard(plan.objective, microbatch, output) if plan.objective else None
            if root is not None and plan.train:
                stage.saved[microbatch].outputs = [root] if root.requires_grad else []
            return
        layout, tensors = self._guard(stage.leave, microbatch, output)
        name = (Op.F, index, microbatch)
        if self.home[index + 1] == self.rank:
            self._handed[name] = Received(layout, tensors, local=True)
        else:
            self._outbox[name] = (layout, tensors)

    def _receive(self, index: int, microbatch: int) -> Received:
        """The input of stage `index`, from this rank or from a message."""
        name = (Op.F, index - 1, microbatch)
        source = self.home[index - 1]
        if source == self.rank:
            return self._handed.pop(name)
        layout, tensors = self._take(source, name, None)
        if layout is None:
            layout = self.seen[name]
        self.seen[name] = layout
        return Received(layout, tensors, local=False)

    def _take(
        self, source: int, name: Name, metas: Sequence[TensorMeta] | None
    ) -> tuple[Layout | None, list[torch.Tensor]]:
        assert self.transport is not None
        begun = time.perf_counter()
        result = self.transport.take(source, name, metas)
        self.record.waited += time.perf_counter() - begun
        for through in self.releases.get(name, ()):  # type: ignore[call-overload]
            for work in self._sending.pop(through, ()):
                work.wait()
        return result

    def _backward(
        self, index: int, microbatch: int, run: Callable[[int, Sequence[torch.Tensor] | None], list[torch.Tensor]]
    ) -> None:
        gradients = None
        if index < self.last:
            name = (Op.B, index + 1, microbatch)
            source = self.home[index + 1]
            if source == self.rank:
                gradients = self._handed.pop(name)
            else:
                gradients = self._take(source, name, _gradients_of(self.seen[Op.F, index, microbatch]))[1]
        enter(Place(self.plan.context, index, microbatch, recording=False))
        found = self._guard(run, microbatch, gradients)
        if index == 0:
            return
        name = (Op.B, index, microbatch)
        (self._handed if self.home[index - 1] == self.rank else self._outbox)[name] = found

    def _guard(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the user's code under the scope of this stage and microbatch; name the place if it raises."""
        action = self.current
        try:
            return run(*args, **kwargs)
        except (PipelineError, ConfigError):
            raise
        except Exception as error:
            text = str(error) or type(error).__name__
            assert action is not None
            raise StageError(
                f"rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}: "
                f"{type(error).__name__}: {text}"
            ) from error

    # --- communicating

    def _send_activation(self, index: int, microbatch: int) -> None:
        assert self.transport is not None
        name = (Op.F, index, microbatch)
        layout, tensors = self._outbox.pop(name)
        peer = self.home[index + 1]
        works: list[Work] = []
        if self.plan.layouts is None:
            self.seen[name] = layout
            works += self.transport.send_header(peer, layout)
        elif layout != (expected := self.seen[name]):
            raise StageError(
                f"rank {self.rank}, stage {index}, microbatch {microbatch}: the stage returned {layout}, but for "
                f"inputs of the same shapes it returned {expected} before; if shapes depend on the data, pass "
                "dynamic_shapes=True to build_schedule"
            )
        self._sending[name] = works + self.transport.send(peer, [t.contiguous() for t in tensors])

    def _post_activation(self, index: int, microbatch: int) -> None:
        assert self.transport is not None
        name = (Op.F, index - 1, microbatch)
        known = self.plan.layouts
        metas = None if known is None else known[name].tensors
        self.transport.post(self.home[index - 1], name, metas, header=known is None)

    def _send_gradient(self, index: int, microbatch: int) -> None:
        assert self.transport is not None
        name = (Op.B, index, microbatch)
        gradients = self._outbox.pop(name)
        self._sending[name] = self.transport.send(self.home[index - 1], [g.contiguous() for g in gradients])

    def _post_gradient(self, index: int, microbatch: int) -> None:
        assert self.transport is not None
        sent = self.seen.get((Op.F, index, microbatch))
        metas = None if sent is None else _gradients_of(sent)
        self.transport.post(self.home[index + 1], (Op.B, index + 1, microbatch), metas, header=False)

    def _announce(self, when: str, action: Action) -> None:
        if action.op.is_compute:
            values = self._outbox.get((Op.F if action.op == Op.F else Op.B, action.stage, action.microbatch))
        else:
            values = self._outbox.get(message(action))
        for hook in self.hooks:
            hook(when, action, values)


def _gradients_of(layout: Layout) -> list[TensorMeta]:
    """What comes back for a message: a gradient for each of its tensors that requires one."""
    return [layout.tensors[index] for index in layout.grads]
