"""The registry: names, parsing, what it refuses and how, and a schedule added from outside."""

from __future__ import annotations

import gc
import json
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from hocket.errors import ConfigError, ScheduleError
from hocket.program import Action, Op, Placement, Program
from hocket.schedules import (
    DualPipeVConfig,
    GPipeConfig,
    GreedyConfig,
    InferenceConfig,
    Interleaved1F1BConfig,
    LoopedBFSConfig,
    ScheduleConfig,
    ZeroBubbleVConfig,
    build,
    build_rank,
    config_type_of,
    parse_schedule,
    register_schedule,
    registry,
    schedule_names,
)

NAMES = {
    "inference",
    "gpipe",
    "looped_bfs",
    "1f1b",
    "zero_bubble_v",
    "dual_pipe_v",
    "greedy",
    "zb_h2",
    "v_half",
    "v_min",
}


@pytest.mark.parametrize(
    "text,config",
    [
        ('{"schedule": "inference"}', InferenceConfig()),
        ('{"schedule": "gpipe"}', GPipeConfig()),
        ('{"schedule": "looped_bfs", "num_stages_per_rank": 2}', LoopedBFSConfig(num_stages_per_rank=2)),
        (
            '{"schedule": "1f1b", "num_stages_per_rank": 3, "zero_bubble": true}',
            Interleaved1F1BConfig(num_stages_per_rank=3, zero_bubble=True),
        ),
        ('{"schedule": "zero_bubble_v"}', ZeroBubbleVConfig()),
        ('{"schedule": "dual_pipe_v"}', DualPipeVConfig()),
        (
            '{"schedule": "greedy", "policy": "gpipe", "num_stages_per_rank": 2}',
            GreedyConfig(policy="gpipe", num_stages_per_rank=2),
        ),
    ],
)
def test_json_forms(text, config):
    assert parse_schedule(json.loads(text)) == parse_schedule(text) == parse_schedule(config) == config
    assert parse_schedule(config.model_dump()) == parse_schedule(config.model_dump_json()) == config


def test_names():
    assert set(schedule_names()) >= NAMES
    for name in schedule_names():
        assert parse_schedule(name) == config_type_of(name)() and parse_schedule(name).schedule == name


def test_configs_are_frozen_strict_and_documented():
    config = Interleaved1F1BConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.zero_bubble = True  # type: ignore[misc]
    with pytest.raises(ValidationError, match="stages"):
        Interleaved1F1BConfig(stages=2)  # type: ignore[call-arg]
    for value in (0, True, "2", 2.5):
        with pytest.raises(ValidationError):
            Interleaved1F1BConfig(num_stages_per_rank=value)  # type: ignore[arg-type]
    assert len({config, Interleaved1F1BConfig(), Interleaved1F1BConfig(zero_bubble=True)}) == 2
    for name in schedule_names():
        config_type = config_type_of(name)
        assert all(field.description for field in config_type.model_fields.values()), name
        assert config_type.__doc__


@pytest.mark.parametrize(
    "source,texts",
    [
        ("gpip", ["unknown schedule 'gpip'", "did you mean 'gpipe'?", "zero_bubble_v"]),
        ({"schedule": "1F1B"}, ["'1F1B'", "did you mean '1f1b'"]),
        (
            {"schedule": "1f1b", "stage_per_rank": 2},
            ["'1f1b'", "'stage_per_rank'", "did you mean 'num_stages_per_rank'"],
        ),
        ({"schedule": "1f1b", "x": 2, 3: 4}, ["'x', '3'", "num_stages_per_rank, zero_bubble, warmup"]),
        ({"schedule": "gpipe", "num_stages_per_rank": 2}, ["'gpipe'", "it takes no fields"]),
        ({"schedule": "looped_bfs", "num_stages_per_rank": 0}, ["num_stages_per_rank=0", "greater than or equal to 1"]),
        ({"schedule": "1f1b", "warmup": "long"}, ["warmup='long'", "'standard', 'short' or 'deep'"]),
        ({"num_stages_per_rank": 2}, ["under 'schedule'", "'num_stages_per_rank'", "gpipe"]),
        ({}, ["no keys"]),
        ({"schedule": 7}, ["got 7"]),
        ('{"schedule": ', ["no valid JSON"]),
        ('{"schedule": "1f1b", "zero_bubble": true, "zero_bubble": false}', ["the field 'zero_bubble' twice"]),
        (12, ["int 12"]),
        (ScheduleConfig(schedule="loose"), ["ScheduleConfig has no builder", "@register_schedule"]),
    ],
)
def test_parse_refuses(source, texts):
    with pytest.raises(ConfigError) as caught:
        parse_schedule(source)
    for text in texts:
        assert text in str(caught.value)


def test_build_refuses_counts():
    with pytest.raises(ScheduleError, match="ranks must be at least 1, got 0; raise ranks"):
        build(GPipeConfig(), ranks=0, microbatches=4)
    with pytest.raises(ScheduleError, match="microbatches must be at least 1, got -2"):
        build_rank(GPipeConfig(), 0, ranks=1, microbatches=-2)
    with pytest.raises(ConfigError, match=r"ranks must be a whole number, got 2\.0"):
        build(GPipeConfig(), ranks=2.0, microbatches=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="microbatches must be a whole number, got True"):
        build(GPipeConfig(), ranks=2, microbatches=True)
    with pytest.raises(ScheduleError, match="10 ranks x 10000000 microbatches are 100,000,000 forwards and more"):
        build(GPipeConfig(), ranks=10, microbatches=10_000_000)
    with pytest.raises(ConfigError, match=r"rank 2 is outside 0\.\.1"):
        build_rank(GPipeConfig(), 2, ranks=2, microbatches=4)
    with pytest.raises(ConfigError, match="got dict"):
        build({"schedule": "gpipe"}, ranks=2, microbatches=4)  # type: ignore[arg-type]


def test_dual_pipe_v_refuses_few_microbatches():
    with pytest.raises(ScheduleError) as caught:
        build(DualPipeVConfig(), ranks=4, microbatches=7)
    for text in ("dual_pipe_v", "8 for 4 ranks", "got 7", "raise microbatches", "'zero_bubble_v'"):
        assert text in str(caught.value)
    assert build(DualPipeVConfig(), ranks=4, microbatches=8).num_microbatches == 8
    with pytest.raises(ScheduleError, match="got 7"):
        build_rank(DualPipeVConfig(), 0, ranks=4, microbatches=7)


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


class EchoConfig(ScheduleConfig):
    """Each microbatch alone: forward through all stages, then back."""

    schedule: Literal["echo"] = "echo"
    """Name of the schedule."""

    repeats: int = Field(default=1, ge=1)
    """Only here to be parsed."""


@pytest.mark.usefixtures("own_registry")
def test_a_third_party_adds_a_schedule():
    @register_schedule(EchoConfig)
    def build_echo(config: EchoConfig, ranks: int, microbatches: int) -> Program:
        rows = [
            [Action(op, rank, microbatch) for microbatch in range(microbatches) for op in (Op.F, Op.B)]
            for rank in range(ranks)
        ]
        return Program(Placement.loop(ranks), tuple(map(tuple, rows)), microbatches)

    assert parse_schedule({"schedule": "echo", "repeats": 2}) == EchoConfig(repeats=2)
    program = build(parse_schedule("echo"), ranks=2, microbatches=2)
    assert program.to_csv() == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
    assert build_rank(EchoConfig(), 1, ranks=2, microbatches=2) == program.ranks[1]
    assert "echo" in schedule_names()

    class AgainConfig(ScheduleConfig):
        """The same name once more."""

        schedule: Literal["echo"] = "echo"

    with pytest.raises(ConfigError, match=r"'echo' of .*AgainConfig is taken by .*EchoConfig; choose another"):
        register_schedule(AgainConfig)


@pytest.mark.usefixtures("own_registry")
def test_registration_refuses_what_cannot_work():
    class NamelessConfig(ScheduleConfig):
        """Without a default name."""

    with pytest.raises(ConfigError, match="NamelessConfig has no name"):
        register_schedule(NamelessConfig)

    register_schedule(EchoConfig)(lambda config, ranks, microbatches: [])  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="builder of schedule 'echo' returned list"):
        build(EchoConfig(), ranks=1, microbatches=1)


@pytest.mark.usefixtures("own_registry")
def test_build_leaves_the_collector_as_it_was():
    seen = []

    @register_schedule(EchoConfig)
    def build_echo(config: EchoConfig, ranks: int, microbatches: int) -> Program:
        seen.append(gc.isenabled())
        raise ScheduleError("no echo here")

    for enabled in (True, False):
        gc.enable() if enabled else gc.disable()
        try:
            with pytest.raises(ScheduleError, match="no echo"):
                build(EchoConfig(), ranks=1, microbatches=1)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen == [False, False]
