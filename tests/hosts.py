"""Two hosts on one machine: network namespaces joined by veth, or by a relay that delays each frame."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACE = "eth0"

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


@dataclass
class Hosts:
    """The names of two namespaces; `cut` severs the line between them."""

    names: tuple[str, str]
    relay: Relay | None = None

    def popen(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on one of the hosts."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], text=True, **options)

    def cut(self) -> None:
        """Sever the line: nothing gets through any more, and neither side is told."""
        if self.relay is not None:
            self.relay.delay = None
            return
        # Frames vanish, while both interfaces stay up, as with a broken switch.
        _ip("-n", self.names[0], "neigh", "replace", ADDRESSES[1], "lladdr", "02:00:00:00:00:99", "dev", INTERFACE)
        _ip("-n", self.names[1], "neigh", "replace", ADDRESSES[0], "lladdr", "02:00:00:00:00:99", "dev", INTERFACE)


class Relay(threading.Thread):
    """Carries the frames between two taps, each `delay` seconds later; None drops them."""

    def __init__(self, taps: tuple[int, int], delay: float):
        super().__init__(daemon=True)
        self.taps, self.delay, self.ended = taps, delay, False

    delay: float | None

    def run(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self.ended:
            wait = 0.1 if not under_way else max(0.0, min(0.1, under_way[0][0] - time.monotonic()))
            for tap in select.select(self.taps, [], [], wait)[0]:
                with contextlib.suppress(OSError):
                    frame = os.read(tap, 65536)
                    if self.delay is not None:
                        count += 1
                        other = self.taps[1 - self.taps.index(tap)]
                        heapq.heappush(under_way, (time.monotonic() + self.delay, count, other, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(under_way)
                with contextlib.suppress(OSError):
                    os.write(tap, frame)


def why_not() -> str | None:
    """Why this machine can make no namespaces, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    name = f"hk{os.getpid()}t"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return made.stderr.strip() or None if made.returncode else None


@contextlib.contextmanager
def two_hosts(delay: float | None = None) -> Iterator[Hosts]:
    """Two namespaces that reach each other by `ADDRESSES`; with `delay`, each frame takes that many seconds."""
    names = (f"hk{os.getpid()}a", f"hk{os.getpid()}b")
    relay = None
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if delay is None:
            _ip(
                "link",
                "add",
                "hkveth0",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "hkveth1",
                "netns",
                names[1],
            )
        else:
            relay = Relay((_tap("hkveth0", names[0]), _tap("hkveth1", names[1])), delay)
        for index, name in enumerate(names):
            _ip("-n", name, "link", "set", f"hkveth{index}", "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{ADDRESSES[index]}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
        if relay is not None:
            relay.start()
        yield Hosts(names, relay)
    finally:
        if relay is not None:
            relay.ended = True
            if relay.is_alive():
                relay.join(2)
            for tap in relay.taps:
                os.close(tap)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _tap(name: str, namespace: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    _ip("link", "set", name, "netns", namespace)
    return tap


def torchrun_on(hosts: Hosts, host: int, python: str, script: Path, *words: str, log: Path) -> subprocess.Popen[str]:
    """torchrun with one process on one of the hosts; its output goes to `log`."""
    command = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}"]
    command += [f"--master-addr={ADDRESSES[0]}", "--master-port=29511", str(script), *words]
    # The file outlives the process that writes it.
    with log.open("w") as out:
        return hosts.popen(
            host,
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
        )
