"""Directed channels between this rank and its peers: tensors, headers, and the control line on which ranks agree.

A channel a→b carries all messages from rank a to rank b in one order, that of the program; the other direction has a
queue of its own. On gloo one group, the pipeline's own, serves: messages match by (source, destination, tag), so
directions never mix, and a tag of its own separates headers from tensors. NCCL ignores tags, and runs what two ranks
exchange in one group as one queue on one communicator. So there are two groups of all ranks: one for messages to higher
ranks, one for those to lower ranks. Between two ranks each then carries one direction only, and a posted receive can
hold up only later messages of its own channel, whose order both ends share. NCCL makes a communicator for each pair and
group in use: two for each pair of neighbours, which is 2 x ranks for a loop and 2 x (ranks - 1) for a V. Headers and
control go over the gloo group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hocket.errors import PeerError
from hocket.program import Op
from hocket.runtime.payload import Layout, TensorMeta
from hocket.runtime.watch import Wait, Watch, watch_over
from hocket.runtime.wire import MAX_BYTES

Name = tuple[Op, int, int]
"""A message: (kind, producing stage, microbatch), as in `hocket.program.message`."""

# Gloo tags. The tail of a long header has its own: its receive is posted after those of later headers.
_TENSORS, _HEADER, _HEADER_TAIL, _GATHER = 11, 12, 13, 14
_HEADER_BYTES = 512


class Work(Protocol):
    def wait(self) -> object: ...


@dataclass
class _Incoming:
    """A message that this rank awaits; `metas` is None until it is known what to allocate."""

    name: Name
    metas: Sequence[TensorMeta] | None
    header: torch.Tensor | None = None
    header_work: Work | None = None
    layout: Layout | None = None
    tensors: list[torch.Tensor] | None = None
    works: list[Work] | None = None


class Transport:
    """This rank's ends of all its channels.

    group: the pipeline's process group. device: where tensors live. timeout: seconds that one wait may last. Peers are
    group ranks throughout. `connect` makes the control line, `open` the channels. A failure closes them all, but leaves
    `group` alone.
    """

    watch: Watch
    control: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float):
        self.group, self.device, self.timeout = group, device, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._name = _new_name(group)
        self._generation = 0
        self._edges: list[tuple[int, int]] = []
        self.prepare()

    def prepare(self) -> None:
        """Begin to watch over connections still to be made; those made before must not be used any more."""
        name = f"{self._name}/{self._generation}"
        self._generation += 1
        self._store: dist.Store = self.group.get_group_store()  # type: ignore[attr-defined]
        self.watch = Watch(self._store, name, self.rank, self.size, self.timeout)
        watch_over(self, self.watch)

    def connect(self, *, again: bool = False) -> None:
        """Wait until all ranks are here, and connect with them. All within `watch.call`."""
        self.watch.join("reset" if again else "build_schedule")
        self.watch.waiting = Wait("connections to all ranks")
        store = dist.PrefixStore(f"{self._name}/{self._generation}/gloo", self._store)
        # Not known to torch.distributed, so nobody else uses it, and it closes when nothing refers to it any more.
        made: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.timeout + 60))
        self.control = self._up = self._down = made
        self.watch.group, self.watch.waiting = made, None
        self._incoming: dict[int, deque[_Incoming]] = {}
        self._ready: dict[Name, _Incoming] = {}
        self._taken: list[Work] | None = None

    def open(self, edges: Iterable[tuple[int, int]]) -> None:
        """Make the directed channels (source, target) of the program ready; all ranks give the same edges."""
        self._edges = sorted(edges)
        if self.device.type != "cpu":
            self._up, self._down = _twin(self.group, "up"), _twin(self.group, "down")
            self.watch.lanes = [self._up, self._down]
            self._warm_up()

    def renew(self) -> None:
        """Connect anew after a failure."""
        self.connect(again=True)
        self.open(self._edges)

    def _lane(self, source: int, target: int) -> dist.ProcessGroup:
        """The group that carries the channel source→target."""
        return self._up if source < target else self._down

    # --- sending

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[Work]:
        """Start sending contiguous `tensors` to `peer`; they must stay unchanged until the works are done."""
        lane = self._lane(self.rank, peer)
        return [lane.send([_wire(t)], peer, _TENSORS) for t in tensors if t.numel()]

    def send_header(self, peer: int, layout: Layout) -> list[Work]:
        """Tell `peer` what the next message of this channel is."""
        data = layout.to_bytes()
        first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        raw = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
        first[: min(len(raw), _HEADER_BYTES)] = raw[:_HEADER_BYTES]
        works: list[Work] = [self.control.send([first], peer, _HEADER)]
        if len(raw) > _HEADER_BYTES:
            works.append(self.control.send([raw[_HEADER_BYTES:].contiguous()], peer, _HEADER_TAIL))
        return works

    # --- receiving

    def post(self, peer: int, name: Name, metas: Sequence[TensorMeta] | None, *, header: bool) -> None:
        """Post the receive of message `name` from `peer`, the next one of that channel.

        `metas` says what its tensors are; None where that is not known yet: either a header tells it (`header`), or
        `take` does.
        """
        message = _Incoming(name, metas)
        if header:
            message.header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            message.header_work = self.control.recv([message.header], peer, _HEADER)
        queue = self._incoming.get(peer)
        if queue is None:
            queue = self._incoming[peer] = deque()
        self._ready[name] = message
        if metas is not None and not queue:
            self._start(peer, message, metas)
        else:
            queue.append(message)

    def take(
        self, peer: int, name: Name, metas: Sequence[TensorMeta] | None
    ) -> tuple[Layout | None, list[torch.Tensor]]:
        """Wait for message `name`; gives the layout of its header, if it had one, and its tensors.

        `metas` tells what the tensors are where `post` did not know it yet.
        """
        message = self._ready.pop(name)
        if message.works is None:
            message.metas = message.metas if message.metas is not None else metas
            self._start_until(peer, message)
        assert message.works is not None
        assert message.tensors is not None
        for work in message.works:
            work.wait()
        # Until the next message: gloo's thread may still be at the end of this receive, and the one who lets go of it
        # waits for that.
        self._taken = message.works
        return message.layout, message.tensors

    def let_go(self) -> None:
        """At the end of a step: nothing of its messages stays."""
        self._taken = None

    def _start_until(self, peer: int, wanted: _Incoming) -> None:
        """Start the receives of this channel, in order, up to `wanted` and as far as layouts are known."""
        queue = self._incoming[peer]
        while queue and (wanted.works is None or queue[0].metas is not None):
            message = queue.popleft()
            if message.metas is None:
                message.layout = self._read_header(peer, message)
                message.metas = message.layout.tensors
            self._start(peer, message, message.metas)

    def _start(self, peer: int, message: _Incoming, metas: Sequence[TensorMeta]) -> None:
        lane = self._lane(peer, self.rank)
        message.tensors = [torch.empty(m.shape, dtype=m.dtype, device=self.device) for m in metas]
        message.works = [lane.recv([_wire(t)], peer, _TENSORS) for t in message.tensors if t.numel()]

    def _read_header(self, peer: int, message: _Incoming) -> Layout:
        if message.header is None or message.header_work is None:
            raise PeerError(f"message {message.name} from rank {peer} came before this rank could know its layout")
        message.header_work.wait()
        raw = message.header.numpy().tobytes()
        length = int.from_bytes(raw[:8], "little")
        if length > MAX_BYTES + 8:
            raise PeerError(f"message {message.name} from rank {peer} announces a layout of {length} bytes")
        data = raw[8 : 8 + length]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self.control.recv([rest], peer, _HEADER_TAIL).wait()
            data += rest.numpy().tobytes()
        return Layout.from_bytes(data)

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        self._incoming.clear()
        self._ready.clear()
        self._taken = None

    # --- control

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's `numbers` (64-bit, equally many on each), by rank: the one control exchange of a step.

        As Bruck et al. do it (IEEE TPDS 8(11), 1997): each round a rank gets what the one 1, 2, 4, ... places ahead
        has; after log2(ranks) rounds all have all. Rank 0, which ends its step last and begins the next, so finds what
        it needs already on its way: nothing of it depends on rank 0 itself.
        """
        rows = torch.empty(self.size, len(numbers), dtype=torch.int64)
        rows[0] = torch.tensor(numbers)
        rounds = [(have, min(have, self.size - have)) for have in (1 << i for i in range((self.size - 1).bit_length()))]
        self.watch.waiting = Wait("all ranks to come to this call")
        arriving = [
            self.control.recv([rows[have : have + count]], (self.rank + have) % self.size, _GATHER)
            for have, count in rounds
        ]
        leaving = []
        for (have, count), work in zip(rounds, arriving, strict=True):
            leaving.append(self.control.send([rows[:count]], (self.rank - have) % self.size, _GATHER))
            work.wait()
        for work in leaving:
            work.wait()
        self.watch.waiting = None
        found = rows.tolist()
        return found[-self.rank :] + found[: -self.rank] if self.rank else found

    def gather_floats(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's `numbers` (float64, equally many on each), by rank."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = torch.empty(self.size * len(numbers), dtype=torch.float64)
        self._all_gather(everyone, mine)
        return everyone.view(self.size, len(numbers)).tolist()

    def gather_text(self, text: str) -> list[str]:
        """Every rank's `text`, by rank; cut after 4000 bytes."""
        data = text.encode()[:4000].ljust(4000, b"\0")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = torch.empty(self.size * len(data), dtype=torch.uint8)
        self._all_gather(everyone, mine)
        rows = everyone.view(self.size, len(data))
        return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """`tensor` (on the CPU) of rank `source`, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self.watch.waiting = Wait(f"rank {source} to share a value", source)
        self.control.broadcast([tensor], options).wait()
        self.watch.waiting = None
        return tensor

    def exchange(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """`tensor`, contiguous, of each of `ranks`, in their order; this rank is one of them."""
        self.watch.waiting = Wait(f"ranks {', '.join(map(str, ranks))} to exchange a tied weight")
        found = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in ranks]
        works = []
        for peer, theirs in zip(ranks, found, strict=True):
            if peer != self.rank:
                works += self.send(peer, [tensor])
                works.append(self._lane(peer, self.rank).recv([_wire(theirs)], peer, _TENSORS))
        for work in works:
            work.wait()
        self.watch.waiting = None
        return found

    def _all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        self.watch.waiting = Wait("all ranks to come to this call")
        self.control._allgather_base(everyone, mine).wait()
        self.watch.waiting = None

    def _warm_up(self) -> None:
        """Open every communicator before the first step, edge by edge in one order for all, with one fixed dtype."""
        token = torch.zeros(1, dtype=torch.float32, device=self.device)
        for source, target in self._edges:
            lane = self._lane(source, target)
            if source == self.rank:
                lane.send([token], target, 0).wait()
            elif target == self.rank:
                lane.recv([token], source, 0).wait()
        torch.accelerator.synchronize(self.device)


_built: dict[str, int] = {}


def _new_name(group: dist.ProcessGroup) -> str:
    """What this pipeline's keys in the store begin with: pipelines of a group are counted, alike on all ranks."""
    count = _built[group.group_name] = _built.get(group.group_name, 0) + 1
    return f"hocket/{count}"


def _twin(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """A second group of the same ranks, in the same order."""
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(minutes=30),
        use_local_synchronization=True,
        group_desc=f"hocket {purpose}",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as backends take it: those that know few dtypes move its bytes."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()  # else its memory would go without the pending sign
    if tensor.device.type == "cpu" or tensor.dtype in _NCCL_DTYPES:
        return tensor
    return tensor.reshape(-1).view(torch.uint8)


_NCCL_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
