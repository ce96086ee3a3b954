"""show and verify: what one writes the other reads, and whatever a file holds is legal or refused."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket import Program, build, lower, parse_schedule
from hocket.cli import main

SIZE = ["--ranks", "4", "--microbatches", "8"]


@pytest.mark.parametrize("lowered", [(), ("--lowered",)])
@pytest.mark.parametrize("form", ["text", "csv", "json"])
@pytest.mark.parametrize("name", ["1f1b", "dual_pipe_v", "inference"])
def test_show_is_what_verify_reads(hocket, tmp_path, name, form, lowered):
    flags = {"text": [], "csv": ["--csv"], "json": ["--json"]}[form]
    code, out, _ = hocket("show", name, *SIZE, *flags, *lowered)
    assert code == 0
    path = tmp_path / "program.csv"
    path.write_text(out)
    program = build(parse_schedule(name), ranks=4, microbatches=8)
    expected = lower(program) if lowered else program
    code, out, err = hocket("verify", str(path))
    assert (code, err) == (0, "") and out.startswith(f"legal: 4 ranks, {program.num_stages} stages, 8 microbatches")
    code, out, _ = hocket("show", str(path), "--csv")
    assert Program.from_csv(out) == expected


def test_show_json(result):
    found = result("show", "1f1b", "--num-stages-per-rank", "2", *SIZE)
    assert found["schedule"]["num_stages_per_rank"] == 2 and found["schedule"]["schedule"] == "1f1b"
    assert found["stage_to_rank"] == [0, 1, 2, 3, 0, 1, 2, 3] and found["num_microbatches"] == 8
    assert found["ranks"][3][0] == "3F0"


def test_the_schedule_may_stand_anywhere(hocket):
    plain = hocket("show", "greedy", "--policy", "gpipe", *SIZE)
    assert plain[0] == 0
    assert hocket("show", "--policy", "gpipe", *SIZE, "greedy") == plain
    assert hocket("show", *SIZE, "greedy", "--policy=gpipe") == plain
    assert hocket("show", "--lowered", "greedy", *SIZE)[0] == 0


@pytest.mark.parametrize("suffix,text", [
    (".json", '{"schedule": "1f1b", "num_stages_per_rank": 2}'),
    (".yaml", "schedule: 1f1b\nnum_stages_per_rank: 2\n"),
    (".yml", "{schedule: 1f1b, num_stages_per_rank: 2}"),
])  # fmt: skip
def test_schedules_in_files(hocket, tmp_path, suffix, text):
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    two = hocket("show", "1f1b", "--num-stages-per-rank", "2", *SIZE)
    assert hocket("show", str(path), *SIZE) == two == hocket("show", text if suffix == ".json" else str(path), *SIZE)
    one = hocket("show", str(path), "--num-stages-per-rank", "1", *SIZE)
    assert one == hocket("show", "1f1b", *SIZE)


@pytest.mark.parametrize("suffix,text,words", [
    (".yaml", "a: [", "no valid YAML"),
    (".yaml", "- 1", "expected a schedule"),
    (".yaml", "", "expected a schedule"),
    (".json", "{", "no valid JSON"),
    (".json", "[" * 100_000, "no valid JSON"),
    (".json", '{"schedule": "1f1b", "stages": 2}', "no field 'stages'"),
    (".yaml", "a: &a [*a]", ""),
])  # fmt: skip
def test_refused_schedule_files(hocket, tmp_path, suffix, text, words):
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    code, _, err = hocket("show", str(path), *SIZE)
    assert code == 1 and words in err


def test_verify_shows_the_fault(hocket, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1B1,1F1\n")
    code, out, err = hocket("verify", str(path))
    assert (code, out) == (1, "") and "1B1" in err and "^^^" in err
    code, out, err = hocket("verify", str(path), "--json")
    found = json.loads(out)
    assert code == 1 and found["legal"] is False and found["error"] in err


def check_verify(path: Path, capsys) -> None:
    """Whatever the file holds: legal, or refused with a message."""
    code = main(["verify", str(path)])
    out, err = capsys.readouterr()
    assert (code == 0 and out.startswith("legal: ")) or (code == 1 and err.startswith("hocket: ") and not out)


FUZZ = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = [
    *["0F0", "0B0", "1F0", "1B0", "0F999999999", "999999999F0", "0SEND_F0", "1RECV_F0", "-1F0"],
    *["(0F0;0B0)OVERLAP_F_B", "(0B0;0F0)OVERLAP_F_B"],
    *["rank 0:", "rank 1:", "rank", ":", ",", " ", "\n", "#", '{"ranks": [["', '"', "]]}", "["],
    *["\ufeff", "é", "٣F٣", "1e9", "0F0F0", "\0", "\r", "\x85"],
]


@FUZZ
@given(data=st.binary(max_size=200))
def test_verify_of_random_bytes(tmp_path, capsys, data):
    (tmp_path / "x").write_bytes(data)
    check_verify(tmp_path / "x", capsys)


@FUZZ
@given(words=st.lists(st.sampled_from(WORDS), max_size=30))
def test_verify_of_pieces_of_programs(tmp_path, capsys, words):
    (tmp_path / "x").write_text("".join(words), encoding="utf-8", newline="")
    check_verify(tmp_path / "x", capsys)


@FUZZ
@given(position=st.integers(0, 700), byte=st.integers(0, 255))
def test_verify_of_a_damaged_program(tmp_path, capsys, position, byte):
    data = bytearray(lower(build(parse_schedule("1f1b"), ranks=3, microbatches=5)).to_csv().encode())
    data[position % len(data)] = byte
    (tmp_path / "x").write_bytes(data)
    check_verify(tmp_path / "x", capsys)
