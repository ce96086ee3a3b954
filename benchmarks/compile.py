"""How long it takes to make an executable program: build, lower and verify, beside torch.distributed.pipelining.

    python benchmarks/compile.py [--quick] [--rounds N]

Interleaved zero bubble with two stages per rank. torch's figure is what the constructor of its schedule takes: it makes
the lists of all ranks and adds sends and receives, as `build` and `lower` do; it does not check them. At 64 ranks and
1024 microbatches that is about a minute, so `--quick` compares at 32 x 256. `one rank` is what a rank pays that makes
its own list only. Last, the time of imports, each in an interpreter of its own, less that of an empty one.

Medians of one run, all in turn. Nothing here waits, so what counts are the CPU seconds of the process, which are wall
seconds where it has a core to itself; the wall seconds of the whole stand in brackets.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket import Interleaved1F1BConfig, Program, build, lower, verify
from hocket.passes import lower_rank

CONFIG = Interleaved1F1BConfig(num_stages_per_rank=2, zero_bubble=True)
SIZES = ((8, 32), (64, 256), (64, 1024), (256, 1024))


@dataclass(frozen=True)
class Seconds:
    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu:.3f} s ({self.wall:.3f})"


def timed(run: Callable[[], object]) -> Seconds:
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def median(found: Sequence[Seconds]) -> Seconds:
    return Seconds(statistics.median(s.cpu for s in found), statistics.median(s.wall for s in found))


def total(found: Sequence[Seconds]) -> Seconds:
    return Seconds(sum(s.cpu for s in found), sum(s.wall for s in found))


def steps(ranks: int, microbatches: int) -> list[Seconds]:
    """Build, lower, verify."""
    kept: list[Program] = []
    built = timed(lambda: kept.append(build(CONFIG, ranks=ranks, microbatches=microbatches)))
    lowered = timed(lambda: kept.append(lower(kept[0])))
    return [built, lowered, timed(lambda: verify(kept[1]))]


def one_rank(ranks: int, microbatches: int) -> Seconds:
    return timed(lambda: lower_rank(build(CONFIG, ranks=ranks, microbatches=microbatches), ranks // 2))


def torch_schedule(ranks: int, microbatches: int) -> Seconds:
    """The time in which torch makes the same schedule, over stages that hold nothing but their numbers."""
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Numbers(_PipelineStageBase):
        def __init__(self, index: int):
            self.stage_index, self.num_stages = index, 2 * ranks
            self.group_rank, self.group_size, self.group = 0, ranks, None
            self.submod, self.device, self.has_backward = None, None, True
            self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(2 * ranks)}

    Numbers.__abstractmethods__ = frozenset()
    stages = [Numbers(0), Numbers(ranks)]
    return timed(lambda: ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=lambda *_: None))


def table_of_sizes(rounds: int) -> None:
    print("| ranks x microbatches | compute actions | build | lower | verify | sum | µs per action | one rank |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, microbatches in SIZES:
        actions = ranks * microbatches * 6
        runs, alone = [], []
        for _ in range(rounds * 4 if actions < 10_000 else rounds):
            runs.append(steps(ranks, microbatches))
            alone.append(one_rank(ranks, microbatches))
        parts = " | ".join(f"{median(step).cpu:.3f}" for step in zip(*runs, strict=True))
        whole = median([total(run) for run in runs])
        rate = f"{whole.cpu / actions * 1e6:.2f}"
        print(f"| {ranks} x {microbatches} | {actions:,} | {parts} | {whole} | {rate} | {median(alone)} |", flush=True)


def against_torch(ranks: int, microbatches: int, rounds: int) -> None:
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(total(steps(ranks, microbatches)))
        theirs.append(torch_schedule(ranks, microbatches))
        ours.append(total(steps(ranks, microbatches)))
    a, b = median(ours), median(theirs)
    print(f"{ranks} x {microbatches}: hocket {a}, torch {b}, torch / hocket {b.cpu / a.cpu:.1f}", flush=True)


def imports(rounds: int) -> None:
    def of(statement: str) -> Seconds:
        before = os.times()
        subprocess.run([sys.executable, "-c", statement], check=True)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Seconds(cpu, after.elapsed - before.elapsed)

    statements = ("pass", "import hocket", "import numpy", "import torch")
    runs = [[of(statement) for statement in statements] for _ in range(rounds)]
    empty, *rest = (median(column) for column in zip(*runs, strict=True))
    for statement, found in zip(statements[1:], rest, strict=True):
        print(f"{statement}: {Seconds(found.cpu - empty.cpu, found.wall - empty.wall)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="compare with torch at 32 x 256")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    steps(2, 4)  # imports and caches are not what is measured
    table_of_sizes(options.rounds)
    print()
    against_torch(*((32, 256) if options.quick else (64, 1024)), rounds=options.rounds if options.quick else 1)
    imports(options.rounds)


if __name__ == "__main__":
    main()
