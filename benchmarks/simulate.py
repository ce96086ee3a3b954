"""Time and memory of build, lower, verify and simulate from 8 x 32 to 256 x 1024 (ranks x microbatches).

    python benchmarks/simulate.py [--quick] [--schedule NAME-or-JSON] [--rounds N]

Each size runs in a process of its own. A step is linear in the number of actions if its time per action stays level:
the last line of the table says by how much it grows from the smallest size to the largest. `--quick` leaves out the two
large sizes. Needs no torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SIZES = ((8, 32), (64, 256), (64, 1024), (256, 1024))
STEPS = ("build", "lower", "verify", "simulate")


def measure(schedule: str, ranks: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Least CPU seconds of each step over `rounds`, the number of actions, and the growth of the process in bytes."""
    from hocket import CostModel, build, lower, parse_schedule, simulate, verify

    config, costs = parse_schedule(schedule), CostModel(hop_latency=0.1, activation_bytes=2, weight_bytes=1)
    verify(lower(build(config, ranks=2, microbatches=4)))  # imports and caches are not what is measured
    before, seconds = resident("VmRSS"), dict.fromkeys(STEPS, float("inf"))
    found: dict[str, Any] = {}
    for _ in range(rounds):
        program = timed(seconds, "build", lambda: build(config, ranks=ranks, microbatches=microbatches))
        lowered = timed(seconds, "lower", lambda program=program: lower(program))
        timed(seconds, "verify", lambda lowered=lowered: verify(lowered))
        timed(seconds, "simulate", lambda lowered=lowered: figures(simulate(lowered, costs, "rendezvous", check=False)))
        found = {"compute": sum(map(len, program.ranks)), "all": sum(map(len, lowered.ranks))}
        del program, lowered
    return {"seconds": seconds, "bytes": resident("VmHWM") - before, **found}


def figures(timeline: Any) -> tuple[float, float, float, float]:
    """What a user asks of a timeline."""
    return timeline.makespan, timeline.bubble_fraction, max(timeline.peak_in_flight), max(timeline.peak_bytes)


def timed(seconds: dict[str, float], step: str, run: Callable[[], Any]) -> Any:
    """Run one step and keep its time if it is the least so far."""
    gc.collect()
    begun = time.process_time()
    result = run()
    seconds[step] = min(seconds[step], time.process_time() - begun)
    return result


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes; 0 where /proc has no such thing."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except (OSError, StopIteration):
        return 0


def table(sizes: Sequence[tuple[int, int]], found: Sequence[dict[str, Any]]) -> str:
    """Seconds and microseconds per action, memory, and how the time per action grows."""
    head = ["ranks x microbatches", "actions", *(f"{step} s (us/action)" for step in STEPS), "MB", "bytes/action"]
    rows, rates = [head], []
    for (ranks, microbatches), result in zip(sizes, found, strict=True):
        actions = {step: result["compute" if step == "build" else "all"] for step in STEPS}
        rates.append([result["seconds"][step] / actions[step] for step in STEPS])
        cells = [f"{result['seconds'][s]:.3f} ({1e6 * r:.2f})" for s, r in zip(STEPS, rates[-1], strict=True)]
        memory = [f"{result['bytes'] / 1e6:.0f}", f"{result['bytes'] / result['all']:.0f}"]
        rows.append([f"{ranks} x {microbatches}", f"{result['all']:,}", *cells, *memory])
    rows.append(
        ["last / first", "", *(f"{last / first:.2f}" for first, last in zip(rates[0], rates[-1], strict=True)), "", ""]
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size in a child and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the two large sizes")
    parser.add_argument("--schedule", default="1f1b", help="name or JSON of a schedule")
    parser.add_argument("--rounds", type=int, default=0, help="runs of each size; the least time counts")
    parser.add_argument("--only", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measure(options.schedule, *options.only, max(1, options.rounds))))
        return
    sizes, found = SIZES[:2] if options.quick else SIZES, []
    for ranks, microbatches in sizes:
        rounds = options.rounds or (20 if ranks * microbatches < 1000 else 3)
        command = [sys.executable, __file__, "--schedule", options.schedule, "--rounds", str(rounds)]
        child = subprocess.run([*command, "--only", str(ranks), str(microbatches)], stdout=subprocess.PIPE, check=True)
        found.append(json.loads(child.stdout))
    print(f"{options.schedule}: CPU seconds, the least of a few runs; memory is what the process grew by, at its peak")
    print(table(sizes, found))


if __name__ == "__main__":
    main()
