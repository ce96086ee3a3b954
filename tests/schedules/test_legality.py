"""Every builder for every small shape: complete, in order, free of deadlock, no faster than work allows."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ScheduleError
from hocket.program import Op, Program
from hocket.schedules import build, build_rank, config_type_of, schedule_names
from schedules.paper_replay import replay


def all_configs(stages_per_rank=(1, 2, 3)):
    """Every registered schedule with every value of its fields, with so many stages per rank."""
    configs = []
    for name in schedule_names():
        config_type = config_type_of(name)
        variants = [{}]
        for field in config_type.options():
            values = {
                "num_stages_per_rank": stages_per_rank,
                "zero_bubble": (False, True),
                "warmup": ("short", "deep"),
                "policy": ("gpipe", "interleaved_1f1b"),
            }[field]
            variants = [variant | {field: value} for variant in variants for value in values]
        configs += [config_type(**variant) for variant in variants]
    return configs


def refused(config, ranks, microbatches):
    """What the definitions rule out."""
    if config.schedule == "dual_pipe_v":
        return microbatches < 2 * ranks
    if config.schedule == "greedy":
        few = config.policy == "interleaved_1f1b" and microbatches < ranks
        return config.num_stages_per_rank > ranks or few
    return False


def check(program, config, ranks, microbatches):
    assert (program.num_ranks, program.num_microbatches) == (ranks, microbatches)
    assert not program.is_lowered
    found = defaultdict(list)
    for rank, _, action in program.actions():
        assert action.computes
        for op, stage, microbatch, _ in action.computes:
            assert program.placement.rank_of(stage) == rank
            found[op.name, stage].append(microbatch)
            if op in (Op.B, Op.W):
                found["gradients", stage].append(microbatch)
    in_order = list(range(microbatches))
    for stage in range(program.num_stages):
        assert found["F", stage] == in_order
        if program.has_backward:
            assert found["gradients", stage] == in_order
            assert sorted(found["B", stage] + found["I", stage]) == in_order
            assert found["I", stage] == found["W", stage]
    assert program.has_backward == (config.schedule != "inference")
    stages_per_rank = program.num_stages // ranks
    times = replay(program)
    work = stages_per_rank * microbatches * (3 if program.has_backward else 1)
    path = program.num_stages * (2 if program.has_backward else 1)
    assert times.makespan >= max(work, path)
    assert max(times.peaks) <= stages_per_rank * microbatches or not program.has_backward


@pytest.mark.parametrize("config", all_configs(), ids=str)
def test_every_shape(config):
    for ranks in range(1, 9):
        for microbatches in (1, 2, 3, 5, 7, 8, 9, 12, 13, 15, 16):
            if refused(config, ranks, microbatches):
                with pytest.raises(ScheduleError, match=f"got .*{microbatches}|num_stages_per_rank="):
                    build(config, ranks=ranks, microbatches=microbatches)
            else:
                check(build(config, ranks=ranks, microbatches=microbatches), config, ranks, microbatches)


shapes = {
    "config": st.sampled_from(all_configs((1, 2, 3, 4))),
    "ranks": st.integers(1, 12),
    "microbatches": st.integers(1, 40),
}


@given(**shapes)
@settings(max_examples=150, deadline=None)
def test_any_shape_is_legal_and_survives_its_files(config, ranks, microbatches):
    if refused(config, ranks, microbatches):
        return
    program = build(config, ranks=ranks, microbatches=microbatches)
    check(program, config, ranks, microbatches)
    assert Program.from_csv(program.to_csv()) == program
    assert Program.from_text(program.to_text()) == program


@given(rank=st.integers(0, 11), **shapes)
@settings(max_examples=80, deadline=None)
def test_one_rank_alone_is_the_same(config, ranks, microbatches, rank):
    if refused(config, ranks, microbatches) or rank >= ranks:
        return
    program = build(config, ranks=ranks, microbatches=microbatches)
    assert build_rank(config, rank, ranks=ranks, microbatches=microbatches) == program.ranks[rank]


@given(hop=st.floats(0, 3), forward=st.floats(0.1, 3), weight=st.floats(0.1, 3), **shapes)
@settings(max_examples=60, deadline=None)
def test_costs_change_times_and_never_legality(config, ranks, microbatches, hop, forward, weight):
    if refused(config, ranks, microbatches):
        return
    program = build(config, ranks=ranks, microbatches=microbatches)
    times = replay(program, forward=forward, weight=weight, hop=hop)
    assert times.span <= times.makespan + 1e-9


def test_one_rank_has_no_bubble():
    for config in all_configs():
        if not refused(config, 1, 6):
            program = build(config, ranks=1, microbatches=6)
            per_microbatch = 3 if program.has_backward else 1
            assert replay(program).makespan == program.num_stages * 6 * per_microbatch


def test_inference_waits_for_nothing():
    config = config_type_of("inference")(num_stages_per_rank=3)
    for microbatches in range(4, 13):
        assert replay(build(config, ranks=4, microbatches=microbatches)).makespan == 3 * microbatches + 3
