"""Batches that end on all ranks at once, though only some ranks have data, or have different amounts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.runtime.p2p import Transport
    from hocket.runtime.watch import Watch

_HAS, _ENDED, _NONE = 1, 0, 2


def in_step(batches: Iterable[Any] | None, transport: Transport | None, watch: Watch) -> Iterator[Any]:
    """The items of `batches`, as long as every rank that has data has one more; None on a rank that has none."""
    source = None if batches is None else iter(batches)
    while True:
        state, item = _NONE, None
        with watch.call("batches"):
            if source is not None:
                try:
                    item, state = next(source), _HAS
                except StopIteration:
                    state = _ENDED
            rows = [[state]] if transport is None else transport.gather([state])
        states = {row[0] for row in rows}
        if _ENDED in states or states == {_NONE}:
            return
        yield item
