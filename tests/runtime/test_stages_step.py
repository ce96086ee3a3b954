"""One step and one evaluation seen from outside: outputs, metrics, memory, hooks, and nothing touched by evaluate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from distributed import run_distributed
from hocket.errors import PipelineError, StageError
from hocket.program import Op, unfold
from hocket.runtime import PipelineStageInfo, build_schedule, check_finite
from hocket.runtime.p2p import Transport
from runtime.stage_cases import CONFIGS, WIDTH, Call, Case, mse, once, reference

NAMES = ("gpipe", "bfs", "zb", "zbv", "dual_pipe_v")
torch.manual_seed(0)
X, Y = torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)


class Block(nn.Module):
    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        torch.manual_seed(100 + info.current_stage)
        self.info = info
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.eval()

    def forward(self, h: torch.Tensor) -> Any:
        return torch.tanh(self.norm(self.layer(h).flatten(0, 1)).view_as(h))


def all_configs(run: Callable[[str], Any]) -> list[dict[str, Any]]:
    """What `run(config name)` gives for each of NAMES, by rank."""
    return run_distributed(lambda rank: {name: run(name) for name in NAMES}, 2, timeout=60)


# --- evaluate ---------------------------------------------------------------------------------------------------------


def _train(name: str, evaluations: bool) -> tuple[list[torch.Tensor], list[float]]:
    info, modules = build_schedule(None, 4, CONFIGS[name], Block, mse)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], 0.01)
    seen = []

    def evaluate(size: int) -> None:
        before = [(p.grad, None if p.grad is None else p.grad.clone()) for m in modules for p in m.parameters()]
        modes = [m.training for module in modules for m in module.modules()]
        x = torch.linspace(-1, 1, size * 3 * WIDTH).view(size, 3, WIDTH)
        loss = info.schedule.share_loss(info.schedule.evaluate(x, targets=x))
        seen.append(float(loss))
        for (grad, copy), p in zip(before, (p for m in modules for p in m.parameters()), strict=True):
            assert p.grad is grad and (grad is None or torch.equal(grad, copy))
        assert modes == [m.training for module in modules for m in module.modules()]

    for step in range(3):
        if evaluations:
            evaluate((16, 3, 8)[step])
        info.schedule.step(X, targets=Y)
        if evaluations:
            evaluate(1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return [p.detach() for m in modules for p in m.parameters()], seen


@once
def trained() -> list[dict[str, Any]]:
    return all_configs(lambda name: (_train(name, False), _train(name, True)))


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_leaves_training_equal_to_the_bit(name: str) -> None:
    for row in trained():
        (without, _), (with_, losses) = row[name]
        assert all(map(torch.equal, without, with_))
        assert len(losses) == 6 and losses == trained()[0][name][1][1]


def test_p48_evaluate_needs_no_targets() -> None:
    def run(rank: int) -> list[Any]:
        info, _ = build_schedule(None, 4, "1f1b", Block, mse)
        first = info.schedule.evaluate(X, return_outputs=True)
        trained = info.schedule.step(X, targets=Y)
        later = info.schedule.evaluate(X, return_outputs=True)
        return [first.loss, first.outputs, trained.loss, later.loss, later.outputs]

    first, last = run_distributed(run, 2, timeout=30)
    assert first == [None] * 5
    assert last[0] is None and last[2] is not None and last[3] is None
    assert last[1].shape == X.shape and torch.equal(last[1], last[4])


def test_p102_inference_gives_the_outputs_of_one_process() -> None:
    def run(rank: int) -> Any:
        info, _ = build_schedule(None, 3, {"schedule": "inference"}, Block)
        stepped = info.schedule.step(X, return_outputs=True)
        evaluated = info.schedule.evaluate(X, return_outputs=True)
        assert stepped.loss is None
        return stepped.outputs, evaluated.outputs

    nothing, outputs = run_distributed(run, 2, timeout=30)
    assert nothing == (None, None)
    expected = torch.cat(reference(Case(Block, [Call((X,), targets=Y)], count=3), 2).outputs[0])
    for output in outputs:
        assert not output.requires_grad
        torch.testing.assert_close(output, expected)


# --- outputs, metrics -------------------------------------------------------------------------------------------------


class Outputs(Block):
    def forward(self, h: torch.Tensor) -> Any:
        h = torch.tanh(self.layer(h))
        return {"h": h, "mean": h.mean(), "text": "t", "pair": (h[:, 0], None)} if self.info.is_last else h


def test_outputs_and_metrics_of_seven_items() -> None:
    def loss_fn(out: Any, target: torch.Tensor) -> Any:
        return mse(out["h"], target), {"items": len(target), "mean": out["mean"], "flat": torch.ones(())}

    def run(name: str) -> Any:
        info, _ = build_schedule(None, 4, CONFIGS[name], Outputs, loss_fn)
        result = info.schedule.step(X[:7], targets=Y[:7], return_outputs=True)
        assert info.schedule.step(X[:7], targets=Y[:7]).outputs is None
        return result.outputs, result.metrics, len(result.losses), info.schedule.share_metrics(result)

    rows = all_configs(run)
    for name in NAMES:
        shared = [row[name][3] for row in rows]
        assert shared[0] == shared[1]
        assert shared[0]["items"] == pytest.approx((2 * 2 * 3 + 1) / 7) and shared[0]["flat"] == pytest.approx(1)
        outputs, metrics, count, _ = next(row[name] for row in rows if row[name][0] is not None)
        assert outputs["h"].shape == (7, 3, WIDTH) and not outputs["h"].requires_grad
        assert [float(v) for v in outputs["mean"]] == [float(p.mean()) for p in outputs["h"].split([2, 2, 2, 1])]
        assert outputs["text"] == ["t"] * 4 and torch.equal(outputs["pair"][0], outputs["h"][:, 0])
        assert outputs["pair"][1] is None and count == 4 and not metrics["mean"].requires_grad
        assert shared[0]["mean"] == pytest.approx(float(outputs["h"].mean()))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_p78_outputs_are_gone_after_their_backward() -> None:
    def run(name: str) -> int:
        alive: dict[int, weakref.ref[torch.Tensor]] = {}
        checked = []

        def loss_fn(output: torch.Tensor, microbatch: int) -> torch.Tensor:
            alive[microbatch] = weakref.ref(output)
            return output.pow(2).mean()

        def gone(when: str, action: Any, tensors: Any) -> None:
            if when == "after" and action.stage == last and action.op in (Op.B, Op.W):
                del tensors
                assert alive[action.microbatch]() is None, f"output of microbatch {action.microbatch} is still there"
                checked.append(action.microbatch)

        info, _ = build_schedule(None, 4, CONFIGS[name], Block, loss_fn)
        last = info.schedule.program.num_stages - 1
        for _ in range(2):
            info.schedule.step(X)
        # Hooks hold tensors themselves, so they come after steps without.
        assert all(ref() is None for ref in alive.values())
        info.schedule.add_hook(gone)
        info.schedule.step(X)
        return len(checked)

    for name, counts in ((name, [row[name] for row in all_configs(run)]) for name in NAMES):
        assert sum(counts) >= 4, name


def test_p49_fifty_steps_leave_nothing_behind() -> None:
    def run(rank: int) -> list[int]:
        info, _ = build_schedule(None, 4, CONFIGS["zbv"], Block, mse)
        counts = []
        for step in range(50):
            result = info.schedule.step(X, targets=Y, return_outputs=step % 2 == 0)
            info.schedule.evaluate(X[: 1 + step % 4], targets=Y[: 1 + step % 4])
            del result
            if step in (9, 29, 49):
                gc.collect()
                counts.append(len(gc.get_objects()))
        return counts

    for early, middle, late in run_distributed(run, 2, timeout=60):
        assert late - middle <= 20 and middle - early <= 200, (early, middle, late)


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_see_every_action_and_its_tensors() -> None:
    def run(name: str) -> Any:
        info, _ = build_schedule(None, 4, CONFIGS[name], Block, mse)
        schedule = info.schedule
        log: list[tuple[str, str, list[tuple[int, ...]]]] = []
        some: list[str] = []

        def note(when: str, action: Any, tensors: list[torch.Tensor]) -> None:
            log.append((when, str(action), [tuple(t.shape) for t in tensors]))

        remove = schedule.add_hook(note)
        drop = schedule.add_hook(
            lambda when, action, _: some.append(f"{when} {action}"), op=Op.F, stage=1, microbatch=2
        )
        schedule.step(X, targets=Y)
        size = len(log)
        remove()
        drop()
        schedule.step(X, targets=Y)
        assert len(log) == size
        order = [str(action) for action in unfold(schedule.program.ranks[schedule.rank])]
        return log, some, order, schedule.program.num_stages - 1

    rows = all_configs(run)
    hidden = (2, 3, WIDTH)
    for name in NAMES:
        assert sorted(some for row in rows for some in row[name][1]) == ["after 1F2", "before 1F2"]
        for log, _, order, last in (row[name] for row in rows):
            assert [action for when, action, _ in log if when == "after"] == order
            assert [action for when, action, _ in log if when == "before"] == order
            for when, action, shapes in log:
                assert shapes == _expected_shapes(when, action, last, hidden), (name, when, action)


def _expected_shapes(when: str, action: str, last: int, hidden: tuple[int, ...]) -> list[tuple[int, ...]]:
    stage, op = int(action[0]), action[1:-1]
    if op == "F":
        return [hidden, ()] if when == "after" and stage == last else [hidden]
    if op in ("B", "I"):
        return [] if (when == "before" and stage == last) or (when == "after" and stage == 0) else [hidden]
    return [hidden] if op.startswith("SEND") else []


class Breaks(Block):
    """Stage 1 makes a NaN in its third forward, or an infinity in the backward of it."""

    forward_breaks = True

    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.calls = 0

    def forward(self, h: torch.Tensor) -> Any:
        self.calls += 1
        h = torch.tanh(self.layer(h))
        if self.info.current_stage == 1 and self.calls == 3:
            if self.forward_breaks:
                return h * float("nan")
            h = h * 1.0
            h.register_hook(lambda grad: grad * float("inf"))
        return h


class BreaksBackward(Breaks):
    forward_breaks = False


@pytest.mark.parametrize(
    "provider, words",
    [
        (Breaks, ["stage 1, microbatch 2, action 1F2", "output 0", "36 NaN and 0 infinite", "among 36"]),
        (BreaksBackward, ["stage 1, microbatch 2, action 1B2", "gradient of input 0"]),
    ],
)
def test_check_finite_stops_at_the_place(provider: Any, words: list[str]) -> None:
    def run(rank: int) -> str:
        info, _ = build_schedule(None, 4, CONFIGS["interleaved"], provider, mse)
        info.schedule.add_hook(check_finite)
        with pytest.raises(PipelineError) as caught:
            info.schedule.step(X, targets=Y)
        assert isinstance(caught.value, StageError) == (rank == 1)
        return str(caught.value)

    for text in run_distributed(run, 2, timeout=30):
        assert all(word in text for word in words), text


def test_without_the_check_nothing_stops() -> None:
    info, _ = build_schedule(None, 4, CONFIGS["interleaved"], Breaks, mse)
    result = info.schedule.step(X, targets=Y)
    assert result.loss is not None


def test_a_hook_that_raises_is_an_error_everywhere() -> None:
    def run(rank: int) -> str:
        info, _ = build_schedule(None, 4, CONFIGS["gpipe"], Block, mse)

        def hook(when: str, action: Any, tensors: Any) -> None:
            raise KeyError("no such key")

        info.schedule.add_hook(hook, stage=1, op=Op.B, microbatch=3)
        with pytest.raises(PipelineError) as caught:
            info.schedule.step(X, targets=Y)
        return str(caught.value)

    for text in run_distributed(run, 2, timeout=30):
        assert "stage 1, microbatch 3, action 1B3" in text and "no such key" in text


# --- what a step costs, and what it leaves to its inputs --------------------------------------------------------------


def test_a_step_of_known_shapes_sends_one_control_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> list[dict[str, int]]:
        counts: dict[str, int] = {}

        def counted(name: str) -> Any:
            original = getattr(Transport, name)

            def call(self: Transport, *args: Any, **kwargs: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return original(self, *args, **kwargs)

            return call

        for name in ("gather", "gather_text", "broadcast", "send_header"):
            monkeypatch.setattr(Transport, name, counted(name))
        info, _ = build_schedule(None, 4, CONFIGS["zbv"], Block, mse)
        found = []
        for x in (X, X, X[:, :2], X[:, :2], X, [X[:1], X[1:3], X[3:7], X[7:]], [X[:1], X[1:3], X[3:7], X[7:]]):
            counts.clear()
            info.schedule.step(x, targets=Y[:, : (2 if type(x) is not list and x.shape[1] == 2 else 3)])
            found.append(dict(counts))
        return found

    new, known = {"gather": 2, "send_header": 4}, {"gather": 1}
    # Stage 1 hands over to stage 2 on its own rank: 2 messages a microbatch, one from each rank.
    for row in run_distributed(run, 2, timeout=30):
        assert row == [new, known, new, known, known, {**new, "broadcast": 1}, known]


class Tower(nn.Module):
    """Computes a step's inputs outside of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.layer = nn.Embedding(8, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.layer(self.embed.weight.view(8, 3, WIDTH)))


def test_inputs_computed_outside_get_their_gradients() -> None:
    def run(name: str) -> Any:
        info, _ = build_schedule(None, 4, CONFIGS[name], Block, mse)
        tower, leaf = Tower(), X.clone().requires_grad_()
        info.schedule.step(tower(), targets=Y)
        info.schedule.step(tower(), targets=Y)
        info.schedule.evaluate(tower(), targets=Y)
        info.schedule.step(leaf, targets=Y)
        return [p.grad for p in (*tower.parameters(), leaf)], info.schedule.program.num_stages

    rows = all_configs(run)
    for name in NAMES:
        count = rows[0][name][1]
        stages = [Block(PipelineStageInfo(s, count)) for s in range(count)]
        tower, leaf = Tower(), X.clone().requires_grad_()
        for start in (tower(), tower(), leaf):
            mse(nn.Sequential(*stages)(start), Y).backward()
        expected = [p.grad for p in (*tower.parameters(), leaf)]
        torch.testing.assert_close(rows[0][name][0], expected)
        assert rows[1][name][0] == [None] * 4


# --- outputs and inputs go early --------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Its output is saved by nobody here, nor its input; both are larger than what is simply copied."""

    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        self.info, self.shift = info, nn.Parameter(torch.zeros(64))
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.inputs.append(StorageWeakRef(h.untyped_storage()))
        h = h + self.shift
        self.outputs.append(StorageWeakRef(h.untyped_storage()))
        return h

    def alive(self) -> tuple[int, int]:
        inputs, outputs = (sum(not r.expired() for r in refs) for refs in (self.inputs, self.outputs))
        return inputs, outputs


def _held(name: str) -> dict[str, list[tuple[int, int]]]:
    info, modules = build_schedule(None, 4, CONFIGS[name], _Residual, mse)
    seen: dict[str, list[tuple[int, int]]] = {}

    def look(when: str, action: Any, tensors: list[torch.Tensor]) -> None:
        tensors.clear()
        seen[f"{when} {action}"] = [module.alive() for module in modules]

    info.schedule.add_hook(look)
    x = torch.randn(4 * 512, 64)
    for _ in range(2):
        for module in modules:
            module.inputs.clear()
            module.outputs.clear()
        info.schedule.step(x, targets=x)
    return seen


def test_what_was_sent_or_consumed_is_not_kept_for_backward() -> None:
    """Neither the outputs that have left nor the inputs that no backward needs, on another rank and on the same."""
    first, last = (row["gpipe"] for row in run_distributed(lambda rank: {"gpipe": _held("gpipe")}, 2))
    assert first["after 0F3"][0][1] == 4  # not yet known to be through
    assert first["before 0B0"] == [(4, 0)]  # the inputs are the user's batch
    assert last["before 1B0"][0][0] <= 1
    (alone,) = run_distributed(lambda rank: _held("zbv"), 1)
    assert alone["after 1F3"][0][1] <= 1


# --- every message is waited for --------------------------------------------------------------------------------------


class _Group:
    """A process group that keeps the works which nobody has waited for."""

    def __init__(self, group: Any):
        self._group = group
        self.made = 0
        self.unwaited: set[_Work] = set()

    def send(self, *args: Any) -> Any:
        return self._keep(self._group.send(*args))

    def recv(self, *args: Any) -> Any:
        return self._keep(self._group.recv(*args))

    def _keep(self, work: Any) -> Any:
        self.made += 1
        kept = _Work(work, self.unwaited)
        self.unwaited.add(kept)
        return kept


class _Work:
    def __init__(self, work: Any, unwaited: set[_Work]):
        self._work, self._unwaited = work, unwaited

    def wait(self) -> None:
        self._work.wait()
        self._unwaited.discard(self)


class _Three(Block):
    def forward(self, h: torch.Tensor, skip: Any = None, mask: Any = None) -> Any:
        skip, mask = (h, h > 0) if skip is None else (skip + h, mask)
        h = super().forward(h) * mask + skip
        return h if self.info.is_last else (h, skip, mask)


def _works(name: str) -> tuple[int, int]:
    info, _ = build_schedule(None, 8, CONFIGS[name], _Three, mse)
    transport = info.schedule._transport
    assert transport is not None
    group: Any = _Group(transport.control)
    transport._up = transport._down = transport.control = group
    for _ in range(2):  # with headers, and without
        info.schedule.step(X, targets=Y)
    return group.made, len(group.unwaited)


def test_p01_every_work_is_waited_for() -> None:
    for row in all_configs(_works):
        for name, (made, unwaited) in row.items():
            assert made >= 2 * 8 * (3 + 1), name
            assert unwaited == 0, name
