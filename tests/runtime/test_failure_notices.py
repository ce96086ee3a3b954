"""Notices from the store, and configs as JSON: a clear outcome for any bytes, never a hang or a crash."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import ConfigError, parse_schedule
from hocket.errors import PeerError, PipelineError, PipelineTimeoutError
from hocket.runtime.board import Board, BoardError, Sign
from hocket.runtime.failure import Failure, Kind, gone, raised, silent

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=300))
def test_any_bytes_as_a_notice(data: bytes) -> None:
    assert isinstance(Failure.from_text(data).error(), PipelineError)
    assert Sign.from_bytes(data) is None or isinstance(Sign.from_bytes(data), Sign)


@given(JSON)
def test_any_json_as_a_notice(value: Any) -> None:
    data = json.dumps(value).encode()
    assert str(Failure.from_text(data).error())
    Sign.from_bytes(data)


@given(st.sampled_from(Kind), st.lists(st.integers(0, 99), max_size=5), st.text(), st.text())
def test_a_notice_there_and_back(kind: Kind, ranks: list[int], text: str, trace: str) -> None:
    failure = Failure(kind, tuple(ranks), text, trace)
    assert Failure.from_text(failure.to_text()) == failure


def test_long_notices_are_cut_and_longer_ones_refused() -> None:
    short = Failure.from_text(Failure(Kind.RAISED, (1,), "x" * 100_000, "y" * 100_000).to_text())
    assert len(short.text) < 7000
    assert short.text.startswith("xxx")
    assert len(short.trace) <= 4000
    assert "cannot be read (100000 bytes)" in Failure.from_text(b"[" * 100_000).text


@settings(deadline=1000)
@given(st.text(max_size=200) | JSON | JSON.map(json.dumps))
def test_any_text_or_json_as_a_config(value: Any) -> None:
    assert len(_refusal(value)) < 5000


@given(
    st.fixed_dictionaries(
        {"schedule": st.sampled_from(["gpipe", "1f1b", "looped_bfs", "zero_bubble_v", "dual_pipe_v", "inference"])},
        optional={"num_stages_per_rank": JSON, "zero_bubble": JSON, "other": JSON},
    )
)
def test_fields_of_any_type_in_a_config(fields: dict[str, Any]) -> None:
    _refusal(fields)


def _refusal(value: Any) -> str:
    """What the parser says of it; "" if it takes it."""
    try:
        parse_schedule(value)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_a_failure_says() -> None:
    try:
        raise KeyError("no such thing")
    except KeyError as caught:
        failure = raised(3, caught, "step 7")
    assert failure.text == "rank 3, step 7: KeyError: 'no such thing'"
    assert "test_failure_notices.py" in failure.trace
    assert isinstance(failure.error(), PeerError)
    assert raised(0, KeyboardInterrupt(), "step 7").text == "rank 0 was interrupted (Ctrl-C), step 7"
    late = silent(4.0, {2: "is asleep"}, {rank: f"step {rank}" for rank in range(40)})
    assert isinstance(late.error(), PipelineTimeoutError)
    assert late.text.splitlines()[-2:] == ["  and 8 more", "no answer within 4 s: rank 2 is asleep"]
    assert "all ranks wait for one another" in silent(4.0, {}, {}).text
    assert "ranks 1, 2 are gone" in gone([1, 2], {}).text


def _board(store: dist.Store, rank: int = 0) -> Board:
    return Board(store, "test", rank, 2, lambda beat: Sign(beat, "computing", 0.0, "step 1"))


def test_the_first_failure_counts() -> None:
    store = dist.HashStore()
    one, two = _board(store), _board(store, 1)
    first = Failure(Kind.RAISED, (0,), "first")
    try:
        assert one.find_failure(0) is None
        assert one.publish(first) == first
        assert two.publish(Failure(Kind.RAISED, (1,), "second")) == first
        assert two.failure == first
        assert one.missing("heard", [0, 1], 0.1, always=True) == [1]
        assert two.missing("heard", [0, 1], 5, always=True) == []
    finally:
        one.close()
        two.close()
    assert one.failure == first


class Hanging(dist.HashStore):
    """A store that answers nothing in time."""

    def clone(self) -> Hanging:
        return self

    def check(self, keys: list[str]) -> bool:
        import time

        time.sleep(3)
        return False


def test_a_store_that_hangs_costs_little_time() -> None:
    import time

    board = _board(Hanging())
    begun = time.monotonic()
    assert board.missing("here", [0, 1], 0.5) == [0, 1]
    assert board.signs(0.5) == {}
    mine = Failure(Kind.RAISED, (0,), "mine")
    assert board.publish(mine, 0.5) == mine
    assert time.monotonic() - begun < 2.5


def test_a_store_whose_host_is_gone() -> None:
    server: dist.TCPStore | None = dist.TCPStore(
        "127.0.0.1", 0, 2, True, timeout=timedelta(seconds=5), wait_for_workers=False
    )
    assert server is not None
    client = dist.TCPStore("127.0.0.1", server.port, 2, False, timeout=timedelta(seconds=5), wait_for_workers=False)
    board = _board(client, 1)
    assert board.find_failure(0) is None
    server = None
    with pytest.raises(BoardError, match="the process that hosts it has ended"):
        _ask_often(board)
    board.close()


def _ask_often(board: Board) -> None:
    for _ in range(100):
        board.ask(lambda store: store.check(["x"]), 1)
