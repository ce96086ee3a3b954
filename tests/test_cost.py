"""CostModel: what it takes, what it refuses, and the costs it makes of others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hocket.cost import CostModel
from hocket.errors import ConfigError
from hocket.program import Op


def test_defaults_are_the_unit_costs():
    durations = CostModel().durations(3)
    assert [list(durations.compute[op]) for op in (Op.F, Op.B, Op.I, Op.W)] == [[1] * 3, [2] * 3, [1] * 3, [1] * 3]
    assert [list(row) for row in durations.hop] == [[0] * 3] * 2
    assert durations.overlap is None


def test_a_number_for_all_or_one_for_each():
    costs = CostModel([1, 2, 3], 1, (0.5, 1, 1.5), overlap_speedup=1.25)
    assert costs.per_stage("forward", 3) == (1, 2, 3)
    assert costs.per_stage("backward", 3) == (1.5, 2, 2.5)
    assert CostModel(1, 1, 1, backward=[4, 5, 6]).per_stage("backward", 3) == (4, 5, 6)
    assert costs.durations(3).overlap == 0.8
    assert CostModel(np.array([1.0, 2.0, 3.0])) == CostModel((1, 2, 3))
    assert CostModel(np.float32(2)) == CostModel(2)
    assert hash(costs) == hash(CostModel([1, 2, 3], 1, (0.5, 1, 1.5), overlap_speedup=1.25))


def test_hops_are_latency_and_bytes_over_bandwidth():
    costs = CostModel(hop_latency=0.5, bandwidth=100, message_bytes=[10, 20, 30])
    assert costs.hops(3) == ((0.6, 0.7, 0.8), (0.5, 0.6, 0.7)), "a gradient is as large as the activation it answers"
    own = CostModel(bandwidth=100, message_bytes=10, gradient_bytes=40)
    assert own.hops(2) == ((0.1, 0.1), (0.4, 0.4))
    assert CostModel(message_bytes=1e9).hops(2) == ((0, 0), (0, 0)), "no bandwidth, no limit"


REFUSED = [
    ({"forward": -1}, r"forward is -1; give a finite number of at least 0"),
    ({"forward": [1, -2]}, r"forward\[1\] is -2; give"),
    ({"forward": float("nan")}, r"forward is nan"),
    ({"backward_weight": float("inf")}, r"backward_weight is inf"),
    ({"forward": "1"}, r"forward is '1'"),
    ({"forward": True}, r"forward is True"),
    ({"forward": 10**400}, r"forward is 10+; give a finite number"),
    ({"forward": None}, r"forward is None"),
    ({"forward": []}, r"forward is empty; give one number, or one for each stage"),
    ({"static_bytes": []}, r"static_bytes is empty; give one number, or one for each rank"),
    ({"hop_latency": [1, 2]}, r"hop_latency is \[1, 2\]"),
    ({"bandwidth": 0}, r"bandwidth is 0 bytes per second, .* give None for no limit"),
    ({"overlap_speedup": 0.5}, r"overlap_speedup is 0.5; a pair is at least 1 time as fast"),
    ({"forward": [1, 2], "backward": [1, 2, 3]}, r"forward has 2 numbers and backward has 3; give each one number or"),
]


@pytest.mark.parametrize("fields, text", REFUSED)
def test_what_is_refused(fields: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        CostModel(**fields)


def test_from_mapping_refuses_what_is_none():
    with pytest.raises(ConfigError, match=r"costs are \[1, 2\]; give a mapping like"):
        CostModel.from_mapping([1, 2])


def test_a_wrong_number_of_stages_is_refused_when_it_shows():
    with pytest.raises(ConfigError, match=r"forward has 2 numbers for 4 stages; give one number, or 4"):
        CostModel([1, 2]).durations(4)
    with pytest.raises(ConfigError, match=r"static_bytes has 2 numbers for 3 ranks; give one number, or 3"):
        CostModel(static_bytes=[1, 2]).static_of(3)


def test_json_goes_both_ways():
    costs = CostModel([1, 2], 3, backward=[4, 5], bandwidth=1e9, overlap_speedup=1.5, static_bytes=7)
    text = json.dumps(costs.to_mapping())
    assert CostModel.from_mapping(json.loads(text)) == costs
    assert CostModel().to_mapping() == {}
    with pytest.raises(ConfigError, match=r"a cost model has no field 'foward'; it has forward, backward_input"):
        CostModel.from_mapping({"foward": 1})


def test_costs_of_stages_from_those_of_layers():
    layers = CostModel(
        [1, 2, 3, 4], 1, 0.5, message_bytes=[10, 20, 30, 40], gradient_bytes=[1, 2, 3, 4], activation_bytes=8
    )
    embedding, head = CostModel(5, 0, 0.25, activation_bytes=1), CostModel(7, 6, 0, activation_bytes=2)
    stages = layers.of_stages([range(1), range(1, 4)], embedding, head)
    assert stages.forward == (6, 16)
    assert stages.backward_input == (1, 9)
    assert stages.backward_weight == (0.75, 1.5)
    assert stages.backward is None
    assert stages.message_bytes == (10, 40)
    assert stages.gradient_bytes == (1, 2)
    assert stages.activation_bytes == (9, 26)
    own = CostModel(1, 1, 1, backward=3).of_stages([range(2), range(2, 3)], CostModel(1, 1, 1))
    assert own.backward == (8, 3), "a B of the embedding is its I and W where it states none"
    with pytest.raises(ConfigError, match=r"forward has 4 numbers for 5 stages"):
        layers.of_stages([range(5)])


def test_parts_and_multiples():
    costs = CostModel(4, 2, 2, backward=6, hop_latency=1, message_bytes=8, activation_bytes=16, static_bytes=5)
    half = costs.divided(2)
    assert (half.forward, half.backward, half.activation_bytes) == (2, 3, 8)
    assert (half.hop_latency, half.message_bytes, half.static_bytes) == (1, 8, 5)
    triple = costs.scaled(3)
    assert (triple.forward, triple.message_bytes, triple.activation_bytes) == (12, 24, 48)
    assert (triple.hop_latency, triple.static_bytes) == (1, 5)
    assert CostModel([1, 2]).scaled(2).forward == (2, 4)
    with pytest.raises(ConfigError, match=r"forward has 2 numbers, where one is needed, .* per layer with n_layers"):
        CostModel([1, 2]).divided(2)
