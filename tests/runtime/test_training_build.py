"""What is built and run: only own layers, every legal config, BatchNorm, forward-only runs, and errors that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from distributed import run_distributed
from hocket import ConfigError, ScheduleError, build, parse_schedule
from hocket.errors import HocketError, StageError
from hocket.runtime import PipelineStageInfo, build_schedule, load_full_state_dict
from runtime.language import LAYERS, Part, gradients, loss_fn, tokens
from runtime.parity import WIDTH, batches, make_stage, mse, train_pipeline, train_reference

# ---- P51: BatchNorm --------------------------------------------------------------------------------------------------


def normed(info: PipelineStageInfo) -> nn.Module:
    torch.manual_seed(info.current_stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


def _batch_norm(rank: int, config: Any) -> Any:
    info, modules = build_schedule(None, 4, config, normed, mse)
    for x, y in batches(3, 16):
        info.schedule.step(x, targets=y)
    stages = info.schedule.program.placement.stages_of(rank)
    return {
        s: (m[1].running_mean, m[1].running_var, int(m[1].num_batches_tracked))
        for s, m in zip(stages, modules, strict=True)
    }


@pytest.mark.parametrize("config", ["1f1b", {"schedule": "1f1b", "num_stages_per_rank": 2}, "zero_bubble_v"], ids=str)
def test_p51_statistics_of_one_process_running_the_microbatches(config: Any) -> None:
    found = {s: value for row in run_distributed(_batch_norm, 2, config) for s, value in row.items()}
    stages = [normed(PipelineStageInfo(s, len(found))) for s in range(len(found))]
    for x, _ in batches(3, 16):
        for part in x.chunk(4):
            for stage in stages:
                part = stage(part)
    for index, stage in enumerate(stages):
        mean, variance, count = found[index]
        assert mean.equal(stage[1].running_mean)
        assert variance.equal(stage[1].running_var)
        assert count == 12


# ---- P97, P99: what a provider makes ---------------------------------------------------------------------------------


def _lazily(rank: int, config: Any, state: dict[str, torch.Tensor]) -> tuple[list[int], int, dict[str, torch.Tensor]]:
    made: list[int] = []

    def provider(info: PipelineStageInfo) -> nn.Module:
        made.append(info.current_stage)
        with torch.device("meta"):
            whole = Part(PipelineStageInfo(0, 1))
        own = {str(layer) for layer in info.layers(LAYERS)}
        for layer in range(LAYERS):
            if str(layer) not in own:
                del whole.layers[str(layer)]
        if not info.is_first:
            del whole.embed
        if not info.is_last:
            del whole.lm_head
        return whole.to_empty(device="cpu")

    info, modules = build_schedule(None, 4, config, provider, loss_fn)
    load_full_state_dict(modules, state)
    size = sum(p.untyped_storage().nbytes() for m in modules for p in m.parameters())
    x, y = tokens(8)
    info.schedule.step(x, targets=y)
    return made, size, gradients(modules)


@pytest.mark.parametrize("config", [pytest.param("1f1b", marks=pytest.mark.slow), "zero_bubble_v"])
def test_p97_only_own_layers_are_allocated(config: Any) -> None:
    model = Part(PipelineStageInfo(0, 1))
    state = {name: value.detach() for name, value in model.named_parameters()}
    rows = run_distributed(_lazily, 2, config, state)
    assert [row[0] for row in rows] == ([[0, 3], [1, 2]] if config == "zero_bubble_v" else [[0], [1]])
    total = sum(p.nbytes for p in model.parameters())
    assert rows[0][1] + rows[1][1] == total
    x, y = tokens(8)
    loss_fn(model(x), y).backward()
    mine = rows[0][2] | rows[1][2]
    for name, value in gradients([model]).items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-8)


def _refused(rank: int, case: str) -> str:
    def one_layer(info: PipelineStageInfo) -> nn.Module:
        return nn.Sequential(*[nn.Linear(2, 2) for _ in info.layers(1)])

    class NeedsMask(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    def attempt() -> None:
        if case == "one stage":
            build_schedule(None, 2, "1f1b", one_layer, mse)
        else:
            info, _ = build_schedule(None, 2, "gpipe", lambda i: make_stage(i) if i.is_first else NeedsMask(), mse)
            x, y = batches(1, 4)[0]
            info.schedule.step(x, targets=y)

    with pytest.raises(HocketError) as caught:
        attempt()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_p99_fewer_layers_than_ranks() -> None:
    for text in run_distributed(_refused, 2, "one stage"):
        assert "1 layers cannot fill 2 stages; use fewer stages per rank or ranks, or more layers" in text


def test_p101_a_stage_without_its_input() -> None:
    for text in run_distributed(_refused, 2, "no mask"):
        assert "rank 1, stage 1, microbatch 0, action 1F0" in text
        assert "'mask'" in text


# ---- P102: forward only ----------------------------------------------------------------------------------------------

SCHEDULES: list[Any] = [
    "inference",
    "gpipe",
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "zero_bubble": True},
    "zero_bubble_v",
    "dual_pipe_v",
]


def _evaluate(rank: int) -> list[Any]:
    found = []
    x, y = tokens(8)
    for config in SCHEDULES:
        info, modules = build_schedule(None, 4, config, Part, loss_fn)
        run = info.schedule.step if config == "inference" else info.schedule.evaluate
        result = run(x, targets=y, return_outputs=True)
        assert gradients(modules) == {}
        found.append((float(info.schedule.share_loss(result)), result.outputs))
    return found


def test_p102_forward_only_on_all_schedules() -> None:
    rows = run_distributed(_evaluate, 2)
    x, y = tokens(8)
    with torch.no_grad():
        logits = Part(PipelineStageInfo(0, 1))(x)
    for first, second in zip(*rows, strict=True):
        outputs = [o for o in (first[1], second[1]) if o is not None]
        assert len(outputs) == 1
        torch.testing.assert_close(outputs[0], logits)
        assert first[0] == second[0] == pytest.approx(loss_fn(logits, y).item(), rel=1e-6)


# ---- P104: any legal config ------------------------------------------------------------------------------------------

CONFIGS = st.one_of(
    st.sampled_from([{"schedule": name} for name in ("gpipe", "zero_bubble_v", "dual_pipe_v")]),
    st.builds(lambda v: {"schedule": "looped_bfs", "num_stages_per_rank": v}, st.integers(1, 3)),
    st.builds(
        lambda v, z: {"schedule": "1f1b", "num_stages_per_rank": v, "zero_bubble": z}, st.integers(1, 3), st.booleans()
    ),
)


def _fuzz(rank: int, config: Any, count: int, size: int) -> Any:
    return train_pipeline(None, config, count, batches(2, size))


def _check(config: dict[str, Any], count: int, extra: int) -> None:
    size = count + extra
    try:
        stages = build(parse_schedule(config), ranks=2, microbatches=count).num_stages
    except ScheduleError:
        return
    rows = run_distributed(_fuzz, 2, config, count, size)
    losses, parameters = train_reference(stages, count, batches(2, size))
    mine = rows[0][1] | rows[1][1]
    assert mine.keys() == parameters.keys()
    torch.testing.assert_close(mine, parameters, rtol=1e-5, atol=1e-5)
    for row in rows:
        torch.testing.assert_close(row[0], losses, rtol=1e-5, atol=1e-6)


def _bounded(examples: int) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=quiet)


@_bounded(6)
@given(config=CONFIGS, count=st.integers(1, 9), extra=st.integers(0, 7))
def test_p104_any_legal_config_trains_like_one_process(config: dict[str, Any], count: int, extra: int) -> None:
    _check(config, count, extra)


@pytest.mark.slow
@_bounded(60)
@given(config=CONFIGS, count=st.integers(1, 17), extra=st.integers(0, 9))
def test_p104_more_of_them(config: dict[str, Any], count: int, extra: int) -> None:
    _check(config, count, extra)


def test_an_error_of_one_process_names_the_place() -> None:
    info, _ = build_schedule(None, 2, "gpipe", lambda i: nn.Linear(2, 2), mse)
    with pytest.raises((StageError, ConfigError), match="stage 0"):
        info.schedule.step(torch.ones(4, 3), targets=torch.ones(4, 2))
