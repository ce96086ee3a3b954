"""What test_failure_launched runs: `python failing_train.py WHAT [RANK]` under a launcher; the fault is in step 1."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
from hocket.runtime import build_schedule, init_process_group  # noqa: E402
from runtime.failing import MICROBATCHES, WIDTH, Fault, Fragile  # noqa: E402

what = sys.argv[1]
rank = int(os.environ["RANK"])
fault = Fault(what=what, rank=int(sys.argv[2]) if len(sys.argv) > 2 else 1, step=1 if what in ("raise", "kill") else 99)
init_process_group("gloo", join_timeout=6 if what == "join" else 60, timeout=300)
schedule = build_schedule(
    None,
    MICROBATCHES,
    "1f1b",
    lambda info: Fragile(info, rank, fault),
    lambda output, target: (output - target).square().mean(),
)[0].schedule
for step in range(1_000_000 if what == "endless" else 4):
    x = torch.zeros(8, WIDTH)
    schedule.step(x, targets=x)
    if step == 0:
        print("training", flush=True)
if what == "none":
    time.sleep(1.5 * rank)
