"""simulate, compare, plan and draw: the figures of the library, in text, JSON and files."""

import pytest

from hocket import CostModel, build, lower, parse_schedule, simulate

SIZE = ["--ranks", "4", "--microbatches", "8"]


def test_simulate_json_is_the_timeline(result):
    found = result(
        "simulate", "1f1b", "--zero-bubble", *SIZE, "--forward", "1,2,1,1", "--lowered", "--mode", "rendezvous"
    )
    program = lower(build(parse_schedule({"schedule": "1f1b", "zero_bubble": True}), ranks=4, microbatches=8))
    timeline = simulate(program, CostModel(forward=(1, 2, 1, 1)), "rendezvous")
    assert found["mode"] == "rendezvous"
    for name in ("makespan", "span", "lower_bound", "bubble_fraction"):
        assert found[name] == getattr(timeline, name)
    for name in ("busy", "idle", "peak_in_flight", "peak_bytes"):
        assert found[name] == list(getattr(timeline, name))


def test_costs_from_all_sides(result, tmp_path):
    expected = result("simulate", "1f1b", *SIZE, "--forward", "2", "--hop-latency", "0.5")
    path = tmp_path / "costs.yaml"
    path.write_text("forward: 2\nhop_latency: 9\n")
    assert result("simulate", "1f1b", *SIZE, "--costs", '{"forward": 2, "hop_latency": 0.5}') == expected
    assert result("simulate", "1f1b", *SIZE, "--costs", str(path), "--hop-latency", "0.5") == expected
    assert result("simulate", "1f1b", *SIZE, "--costs", str(path), "--backward", "none") != expected


def test_simulate_text(hocket):
    code, out, _ = hocket("simulate", "gpipe", *SIZE, "--activation-bytes", "1073741824")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["makespan", "33"]
    assert lines[-1].split() == ["3", "24", "9", "8", "8", "GiB"]


def test_compare(result, hocket):
    found = result("compare", *SIZE, "--schedules", "gpipe,1f1b", "--stages-per-rank", "1", "--memory", "4")
    assert {row["schedule"]["schedule"] for row in found} == {"gpipe", "1f1b"}
    assert found[0]["fits"] and not found[-1].get("fits")
    code, out, err = hocket("compare", *SIZE, "--schedules", "gpipe,1f1b", "--stages-per-rank", "1")
    assert code == 0 and err == "" and "gpipe" in out and "makespan" in out.splitlines()[0]


def test_plan(result, hocket):
    found = result("plan", "1f1b", *SIZE, "--layers", "10")
    assert [stage["layers"] for stage in found["stages"]] == [[0, 3], [3, 6], [6, 8], [8, 10]]
    counts = ["--partition", "counts", "--layer-counts", "1,2,3,4"]
    found = result("plan", "1f1b", *SIZE, "--layers", "10", *counts)
    assert [stage["layers"][1] for stage in found["stages"]] == [1, 3, 6, 10]
    events = result("plan", "1f1b", *SIZE, "--layers", "10", "--rank", "2")
    assert events[0] == {"tick": 2, "ticks": 1, "action": "2F0"}
    code, out, _ = hocket("plan", "1f1b", *SIZE, "--layers", "10")
    assert code == 0 and "10 layers in 4 stages on 4 ranks" in out


@pytest.mark.parametrize(
    "name,head",
    [
        ("x.txt", b"rank 0"),
        ("x.svg", b"<?xml"),
        ("x.png", b"\x89PNG"),
        ("x.html", b"<!doctype"),
        ("x.json", b'{"disp'),
    ],
)
def test_draw_to_files(hocket, tmp_path, name, head):
    path = tmp_path / name
    assert hocket("draw", "1f1b", *SIZE, "--output", str(path)) == (0, "", "")
    assert path.read_bytes().startswith(head)


def test_draw_beside_a_measured_run(hocket, tmp_path):
    trace = tmp_path / "trace.json"
    hocket("draw", "gpipe", *SIZE, "--output", str(trace))
    for name in ("both.svg", "both.html", "both.json"):
        code, _, err = hocket("draw", "1f1b", *SIZE, "--measured", str(trace), "--output", str(tmp_path / name))
        assert (code, err) == (0, "")
    code, out, _ = hocket("draw", "1f1b", *SIZE, "--measured", str(trace), "--width", "80")
    assert code == 0 and out.count("rank 0") == 2 and "\nmeasured\n" in out


def test_draw_takes_the_width_of_the_terminal(hocket, monkeypatch):
    monkeypatch.setenv("COLUMNS", "47")
    assert max(map(len, hocket("draw", "1f1b", *SIZE)[1].splitlines())) in range(40, 48)
