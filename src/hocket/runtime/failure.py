"""What a failure is and how it is told: by the rank where it arose to the board, and from the board to its peers."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from hocket.errors import HocketError, PeerError, PipelineError, PipelineTimeoutError

_LONGEST = 1 << 16
_TEXT, _TRACE = 6000, 4000
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


class Kind(StrEnum):
    """How a rank failed."""

    RAISED = "raised"
    INTERRUPTED = "interrupted"
    GONE = "gone"
    SILENT = "silent"


@dataclass(frozen=True)
class Failure:
    """The first failure of a pipeline: which ranks are to blame, in words, and the traceback if there is one."""

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    trace: str = ""

    def to_text(self) -> str:
        """One line of JSON."""
        text = self.text if len(self.text) <= _TEXT else self.text[:_TEXT] + " [...]"
        return json.dumps([self.kind.value, self.ranks, text, self.trace[-_TRACE:]])

    @classmethod
    def from_text(cls, data: bytes | str) -> Failure:
        """The failure that `to_text` wrote. For anything else, one that says so: a notice must never get lost."""
        try:
            if len(data) > _LONGEST:
                raise OverflowError(f"{len(data)} bytes")
            kind, ranks, text, trace = json.loads(data)
            return cls(Kind(kind), tuple(int(rank) for rank in ranks), str(text), str(trace))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return cls(Kind.RAISED, (), f"some rank failed; its notice cannot be read ({error!s:.100}): {data[:100]!r}")

    def error(self, waiting: str = "") -> PipelineError:
        """What a rank raises that did not fail itself; `waiting` says what it was waiting for."""
        lines = []
        if self.trace:
            lines += [f"the first failure was on rank {self.ranks[0] if self.ranks else '?'}:", self.trace]
        if waiting:
            lines.append(f"this rank was waiting for {waiting}")
        kind = PipelineTimeoutError if self.kind is Kind.SILENT else PeerError
        return kind("\n".join([*lines, self.text]))


def raised(rank: int, error: BaseException, where: str) -> Failure:
    """The failure of `rank` by an exception."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(Kind.INTERRUPTED, (rank,), f"rank {rank} was interrupted (Ctrl-C), {where}")
    text = str(error)
    if not isinstance(error, PipelineError):
        text = f"rank {rank}, {where}: {type(error).__name__}: {text}"
    elif f"rank {rank}" not in text:
        text = f"rank {rank}, {where}: {text}"
    return Failure(Kind.RAISED, (rank,), text, _trace_of(error.__cause__ or error))


def _trace_of(error: BaseException) -> str:
    """Where the user's code raised, without the message, which follows anyway."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return "\n".join(
        f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
        for frame in (own or frames)[-6:]
    )


def gone(peers: Sequence[int], signs: Mapping[int, str]) -> Failure:
    """The failure of ranks whose connections closed without a word."""
    who = names(peers) if peers else "a rank"
    verb = "are" if len(peers) > 1 else "is"
    cause = "killed, or out of memory"
    return Failure(
        Kind.GONE,
        tuple(peers),
        "\n".join([*_table(signs), f"{who} {verb} gone: the connection closed without a word ({cause})"]),
    )


def silent(seconds: float, blamed: Mapping[int, str], signs: Mapping[int, str]) -> Failure:
    """The failure of ranks that did not answer in time; `blamed` says of each what is wrong with it."""
    told = "; ".join(f"rank {rank} {what}" for rank, what in blamed.items()) or "all ranks wait for one another"
    return Failure(Kind.SILENT, tuple(blamed), "\n".join([*_table(signs), f"no answer within {seconds:g} s: {told}"]))


def names(ranks: Sequence[int]) -> str:
    """'rank 1' or 'ranks 1, 2'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _table(signs: Mapping[int, str]) -> list[str]:
    """What each rank was doing when it last gave a sign of life; with many ranks, the first ones."""
    if not signs:
        return []
    shown = [f"  rank {rank}: {words}" for rank, words in sorted(signs.items())]
    more = [f"  and {len(shown) - 32} more"] if len(shown) > 32 else []
    return ["what each rank was doing, as last heard (they tell twice a second):", *shown[:32], *more]


def is_connection_error(error: Any) -> bool:
    """Whether an exception comes from the transport of a process group."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, HocketError)
        and any(word in text for word in ("gloo/", "pair closure", "NCCL", "Connection", "ProcessGroup", "Timed out"))
    )
