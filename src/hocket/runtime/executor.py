"""Runs this rank's list of actions on its stages: one match on the op, all else decided when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from hocket.errors import ConfigError, PeerError, PipelineError, StageError
from hocket.program import Action, Op, Program, message, recv_of, unfold
from hocket.runtime.context import Place, StepContext, enter
from hocket.runtime.failure import is_connection_error
from hocket.runtime.p2p import Transport, Work
from hocket.runtime.payload import Layout, TensorMeta
from hocket.runtime.record import Record, clock_of
from hocket.runtime.release import releases
from hocket.runtime.stage import Received, Stage

Name = tuple[Op, int, int]


class Objective(Protocol):
    """What happens to the last stage's output of a microbatch: gives what backward starts from, if anything: a loss
    and its gradient.
    """

    def __call__(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None: ...


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


_IDLE = StepPlan((), (), None, None, False, StepContext(0, 0, [], 1.0, lambda *_: None))


Hook = Callable[[str, Action, list[torch.Tensor]], None]
"""Called as hook("before" | "after", action, tensors) around an action.

tensors: before F what came in, after F what the stage returned (and the loss, on the last stage); before B and I the
gradients that came in, after them those of the stage's inputs; around a send what is sent; else nothing.
"""

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
        self.order = self.order_of(rank)
        self.last = program.num_stages - 1
        self.home = program.placement.stage_to_rank
        self.releases = releases(program, rank) if transport else {}
        # Those whose backward comes in two halves; of the others nothing need be deferred.
        self.halved = {(p.stage, p.microbatch) for a in self.order for p in a.computes if p.op == Op.I}
        # The last I or B of each stage: behind it the stage's gradients are complete, or left to its W alone.
        self.final = {part.stage: part.microbatch for a in self.order for part in a.computes if part.op in (Op.B, Op.I)}
        self.hooks: list[Hook] = []
        parameters = (p for stage in stages.values() for p in stage.module.parameters())
        self.clock = clock_of(next((p.device for p in parameters), torch.device("cpu")))
        self.record = Record(self.clock)
        self.current: Action | None = None
        """The action that runs now."""
        self.waiting: Name | None = None
        """The message for which it waits now."""
        self.plan = _IDLE
        self._clear()
        self._steps = [(action, self._bind(action)) for action in self.order]

    def awaited(self) -> tuple[str, int] | None:
        """What this rank waits for, in words, and the rank from which; None while it computes."""
        if self.waiting is None:
            return None
        kind, stage, microbatch = self.waiting
        received = recv_of(Op(kind), stage, microbatch)
        if self.current is None:
            peer = self.home[received.stage]
            return f"rank {peer} to take its messages (last {received})", peer
        return f"{received} from rank {self.home[stage]}", self.home[stage]

    def _clear(self) -> None:
        self.waiting = None
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
        """One step. Raises StageError for what the user's code raises, with rank, stage, microbatch and action, and
        PeerError where the connection to another rank fails.
        """
        self.plan = plan
        for index, microbatch in self.final.items():
            self.stages[index].final_microbatch = microbatch
        self.seen = {} if plan.layouts is None else plan.layouts
        self.record = record = Record(self.clock)
        clock, ended = record.now, record.ends.append
        try:
            if self.hooks:
                self._run_announced(record)
            else:
                for action, perform in self._steps:
                    self.current = action
                    perform()
                    ended(clock())
            self.current = None
            self._finish_sending()
        except PipelineError:
            raise
        except ConfigError as error:
            raise type(error)(f"{self._place()}: {error}") from error
        except Exception as error:
            raise self._blame(error) from error
        finally:
            enter(None)
            # The batch belongs to the user: nothing of it stays here.
            self.plan = _IDLE
            if not plan.train:
                for stage in self.stages.values():
                    stage.sync.without_backward()

    def order_of(self, rank: int) -> list[Action]:
        """The actions of `rank` in the order in which it runs them."""
        actions = self.program.ranks[rank]
        return unfold(actions) if self.run_pair is None else list(actions)

    def seconds(self, record: Record) -> tuple[float, float]:
        """Seconds that the step of `record` spent in compute actions, without waiting; and those that it waited."""
        pairs = zip(self.order, record.spans(), strict=False)
        waited = sum(record.waited.values())
        return sum(end - begin for action, (begin, end) in pairs if action.op.is_compute) - waited, waited

    def _run_announced(self, record: Record) -> None:
        for action, perform in self._steps:
            self.current = action
            if action.op.is_compute and action.op != Op.W:
                perform()  # announces itself, when its tensors are there
            else:
                sent = self._outgoing(action) if action.op.is_send else []
                self._announce("before", action, sent)
                perform()
                self._announce("after", action, sent)
            record.ends.append(record.now())

    def _finish_sending(self) -> None:
        for name, works in self._sending.items():
            self.waiting = name
            for work in works:
                work.wait()
        self.waiting = None
        self._sending.clear()
        if self.transport:
            self.transport.let_go()

    def _place(self) -> str:
        action = self.current
        if action is None:
            return f"rank {self.rank}, end of the step"
        return f"rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}"

    def _blame(self, error: Exception) -> PipelineError:
        """The error that names where this rank was."""
        action = self.current
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if action is None:
            return PeerError(f"rank {self.rank}, end of the step: a message could not be sent: {text}")
        place = self._place()
        if waited := self.awaited():
            return PeerError(f"{place}: waiting for {waited[0]}: {text}")
        if not action.op.is_compute and is_connection_error(error):
            return PeerError(f"{place}: the connection failed: {text}")
        return StageError(f"{place}: {text}")

    def _bind(self, action: Action) -> Callable[[], None]:
        """What `action` does on this rank, with all names and places looked up."""
        op, index, microbatch, parts = action
        into, out_of = (Op.F, index - 1, microbatch), (Op.F, index, microbatch)
        back_into, back_out_of = (Op.B, index + 1, microbatch), (Op.B, index, microbatch)
        stage = self.stages[index]
        match op:
            case Op.F:
                halved = (index, microbatch) in self.halved
                return partial(self._forward, action, stage, microbatch, into, out_of, halved)
            case Op.B:
                return partial(self._backward, action, stage, microbatch, back_into, back_out_of)
            case Op.I:
                return partial(self._backward, action, stage, microbatch, back_into, back_out_of)
            case Op.W:
                return partial(stage.backward_weight, microbatch)
            case Op.SEND_F:
                return partial(self._send_activation, self.home[index + 1], out_of)
            case Op.RECV_F:
                return partial(self._post_activation, self.home[index - 1], into)
            case Op.SEND_B:
                return partial(self._send_gradient, self.home[index - 1], back_out_of)
            case Op.RECV_B:
                return partial(self._post_gradient, self.home[index + 1], back_into, out_of)
            case Op.OVERLAP_F_B:
                assert self.run_pair is not None
                return partial(self.run_pair, self._bind(parts[0]), self._bind(parts[1]))

    # --- computing

    def _forward(self, action: Action, stage: Stage, microbatch: int, into: Name, out_of: Name, halved: bool) -> None:
        plan, index = self.plan, stage.index
        received = self._receive(into) if index > 0 else None
        args = plan.args[microbatch] if index == 0 else ()
        if self.hooks:
            self._announce("before", action, _tensors_of(args) if received is None else received.tensors)
        enter(Place(plan.context, index, microbatch, True))
        output = stage.forward(microbatch, received, args, plan.kwargs[microbatch], plan.train, halved)
        if index == self.last:
            root = plan.objective(microbatch, output) if plan.objective else None
            if root is not None and plan.train:
                stage.root(microbatch, *root)
            if self.hooks:
                self._announce("after", action, _tensors_of((output, root and root[0])))
            return
        layout, tensors = stage.leave(microbatch, output)
        if self.hooks:
            self._announce("after", action, tensors)
        if self.home[index + 1] == self.rank:
            self._handed[out_of] = Received(layout, tensors, True)
        else:
            self._outbox[out_of] = (layout, tensors)

    def _receive(self, name: Name) -> Received:
        """The input of a stage, from this rank or from a message."""
        source = self.home[name[1]]
        if source == self.rank:
            return self._handed.pop(name)
        layout, tensors = self._take(source, name, None)
        if layout is None:
            layout = self.seen[name]
        self.seen[name] = layout
        return Received(layout, tensors, False)

    def _take(
        self, source: int, name: Name, metas: Sequence[TensorMeta] | None
    ) -> tuple[Layout | None, list[torch.Tensor]]:
        assert self.transport is not None
        record = self.record
        begun = record.now()
        self.waiting = name
        result = self.transport.take(source, name, metas)
        for through in self.releases.get(name, ()):
            for work in self._sending.pop(through, ()):
                work.wait()
        self.waiting = None
        record.waits.append((len(record.ends), begun, record.now()))
        return result

    def _backward(self, action: Action, stage: Stage, microbatch: int, into: Name, out_of: Name) -> None:
        gradients, index = None, stage.index
        if index < self.last:
            source = self.home[index + 1]
            if source == self.rank:
                gradients = self._handed.pop(into)
            else:
                gradients = self._take(source, into, self.seen[Op.F, index, microbatch].gradients)[1]
        if self.hooks:
            self._announce("before", action, gradients or [])
        enter(Place(self.plan.context, index, microbatch, False))
        run = stage.backward_full if action.op == Op.B else stage.backward_input
        found = run(microbatch, gradients)
        if self.hooks:
            self._announce("after", action, found)
        if index > 0:
            (self._handed if self.home[index - 1] == self.rank else self._outbox)[out_of] = found

    # --- communicating

    def _send_activation(self, peer: int, name: Name) -> None:
        assert self.transport is not None
        layout, tensors = self._outbox.pop(name)
        works: list[Work] = []
        if self.plan.layouts is None:
            self.seen[name] = layout
            works += self.transport.send_header(peer, layout)
        elif layout != (expected := self.seen[name]):
            raise StageError(
                f"rank {self.rank}, stage {name[1]}, microbatch {name[2]}: the stage returned {layout}, but for "
                f"inputs of the same shapes it returned {expected} before; if shapes depend on the data, pass "
                "dynamic_shapes=True to build_schedule"
            )
        self._sending[name] = works + self.transport.send(peer, [t.contiguous() for t in tensors])

    def _post_activation(self, peer: int, name: Name) -> None:
        assert self.transport is not None
        known = self.plan.layouts
        metas = None if known is None else known[name].tensors
        self.transport.post(peer, name, metas, header=known is None)

    def _send_gradient(self, peer: int, name: Name) -> None:
        assert self.transport is not None
        gradients = self._outbox.pop(name)
        self._sending[name] = self.transport.send(peer, [g.contiguous() for g in gradients])

    def _post_gradient(self, peer: int, name: Name, forward: Name) -> None:
        assert self.transport is not None
        sent = self.seen.get(forward)
        self.transport.post(peer, name, None if sent is None else sent.gradients, header=False)

    # --- hooks

    def _announce(self, when: str, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        for hook in self.hooks:
            hook(when, action, list(tensors))

    def _outgoing(self, action: Action) -> list[torch.Tensor]:
        """The tensors that `action` is about to send."""
        waiting = self._outbox[message(action)]
        return waiting[1] if action.op == Op.SEND_F else waiting


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
