"""Chrome trace: names, processes, flows that begin and end inside their bars, and read back."""

import json
from collections import Counter
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import lower, simulate
from hocket.draw import draw_trace, read_trace
from hocket.errors import HocketError, ParseError


def events(text: str) -> list[dict]:
    return json.loads(text)["traceEvents"]


@pytest.mark.parametrize("overlap", [None, 1.5])
def test_bars_and_flows(timeline, overlap):
    drawn = timeline("dual_pipe_v", 4, 8, hop_latency=0.5, overlap_speedup=overlap)
    found = events(draw_trace(drawn))
    bars = [e for e in found if e["ph"] == "X" and e["cat"] != "message"]
    assert Counter(e["name"] for e in bars) == Counter(str(event.action) for event in drawn.events)
    assert {e["args"]["name"] for e in found if e["name"] == "process_name"} == {f"rank {r}" for r in range(4)}
    # On one thread of a process nothing overlaps, so each flow finds its bar.
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in found:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for lane in lanes.values():
        lane.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(lane))
    flows: dict[int, dict[str, dict]] = {}
    for e in found:
        if e["ph"] in "sf":
            flows.setdefault(e["id"], {})[e["ph"]] = e
            assert any(start <= e["ts"] < end for start, end in lanes[e["pid"], e["tid"]])
    assert len(flows) == len(drawn.messages)
    assert all(set(pair) == {"s", "f"} and pair["s"]["ts"] <= pair["f"]["ts"] for pair in flows.values())


def test_messages_have_threads_of_their_own(timeline):
    program = lower(timeline("1f1b", 3, 4).program)
    drawn = simulate(program, timeline("1f1b", 3, 4, hop_latency=0.5).costs)
    found = events(draw_trace(drawn))
    sent = [e for e in found if e["ph"] == "X" and e["cat"] == "message"]
    assert Counter(e["name"] for e in sent) == Counter(
        str(action) for _, _, action in program.actions() if action.op.is_send
    )
    assert {e["dur"] for e in sent} == {0.5e6}


def test_memory_is_a_counter(timeline):
    found = events(draw_trace(timeline("1f1b", 4, 8)))
    counts = [e["args"]["activations"] for e in found if e["ph"] == "C" and e["pid"] == 0]
    assert max(counts) == 4 and counts[-1] == 0


def test_two_timelines_are_two_groups_of_processes(timeline):
    found = events(draw_trace({"plan": timeline("1f1b", 2, 2), "measured": timeline("1f1b", 2, 2)}))
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "plan rank 0", 1: "plan rank 1", 2: "measured rank 0", 3: "measured rank 1"}
    assert len({e["id"] for e in found if e["ph"] == "s"}) == 2 * 4


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_read_back(timeline, scale):
    drawn = timeline("zero_bubble_v", 4, 6, hop_latency=0.25)
    again = read_trace(draw_trace(drawn, seconds_per_unit=scale), seconds_per_unit=scale)
    assert [(e.rank, e.action) for e in again] == [(e.rank, e.action) for e in drawn.events]
    assert [e.end for e in again] == pytest.approx([e.end for e in drawn.events])


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "no list 'traceEvents'"),
        ("[]", "none of the 0 events"),
        ('[{"ph":"X","name":"0F0","pid":0,"ts":"x","dur":1}]', "bar 0F0 of the trace has no number"),
        ('[{"ph":"X","name":"0F0","pid":0,"ts":0}]', "bar 0F0"),
        ('[{"ph":"X","name":"main","pid":0,"ts":0,"dur":1}, 7]', "none of the 2 events"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ParseError, match=message):
        read_trace(text)


@given(
    st.recursive(
        st.none() | st.floats() | st.text() | st.just("0F0"),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["traceEvents", "ph", "name", "pid", "ts", "dur"]), x),
    )
)
def test_any_json_is_read_or_refused(value):
    with suppress(HocketError):
        read_trace(json.dumps(value))
