"""The same training under three pipelines: tied embeddings, clipping, LR warm-up, keyed dropout, an auxiliary loss.

    python examples/trustworthy_run.py

Ten steps under 1F1B and zero bubble V on two ranks and in one process; losses, gradient norms and weights must agree.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from small_model import TIED, Block, Stage, draw_batch, loss_fn, on_ranks
from torch.optim.lr_scheduler import LinearLR

from hocket.runtime import build_schedule, clip_grad_norm_, parameter_groups

STEPS, MICROBATCHES, BOUND = 10, 4, 1e-6
RUNS = [("one process", 1, "1f1b"), ("1F1B, 2 ranks", 2, "1f1b"), ("zero bubble V, 2 ranks", 2, "zero_bubble_v")]


def train(schedule_config: str) -> dict[str, Any]:
    """What this rank saw: loss, norm and auxiliary loss of each step, the masks of each layer, the final weights."""
    info, modules = build_schedule(None, MICROBATCHES, schedule_config, Stage, loss_fn, tied=TIED, seed=1)
    schedule = info.schedule
    groups = parameter_groups(modules, [("*.bias", {"weight_decay": 0.0})])
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    warm_up = LinearLR(optimizer, 0.1, total_iters=5)
    seen: dict[str, Any] = {"loss": [], "norm": [], "aux": []}
    for step in range(STEPS):
        inputs, targets = draw_batch(step)
        optimizer.zero_grad()
        result = schedule.step(inputs, targets=targets)
        seen["norm"].append(float(clip_grad_norm_(modules, 1.0)))
        optimizer.step()
        warm_up.step()
        seen["loss"].append(float(schedule.share_loss(result)))
        seen["aux"].append(schedule.share_metrics(result)["activity"])
    blocks = [block for module in modules for block in module.modules() if isinstance(block, Block)]
    seen["masks"] = {block.layer: sorted(block.masks) for block in blocks}
    seen["weights"] = {name: value for m in modules for name, value in m.state_dict().items()}
    return seen


def compare(name: str, rows: list[dict[str, Any]], alone: dict[str, Any]) -> bool:
    """Print how far the ranks of one run are from one process; True if they agree."""
    masks = {layer: found for row in rows for layer, found in row["masks"].items()}
    weights = {name: value for row in rows for name, value in row["weights"].items()}
    worst = {
        key: max(abs(a - b) / abs(b) for row in rows for a, b in zip(row[key], alone[key], strict=True))
        for key in ("loss", "norm", "aux")
    }
    tied = weights["embed.weight"].equal(weights["lm_head.weight"])
    dropout = masks == alone["masks"]
    shown = ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
    print(f"{name:24} largest relative difference: {shown}; tied copies equal: {tied}; dropout identical: {dropout}")
    return max(worst.values()) <= BOUND and tied and dropout


def main() -> None:
    rows = {name: on_ranks(ranks, train, config) for name, ranks, config in RUNS}
    alone = rows["one process"][0]
    print("loss      " + "  ".join(f"{loss:.4f}" for loss in alone["loss"]))
    print("norm      " + "  ".join(f"{norm:.4f}" for norm in alone["norm"]))
    agree = [compare(name, found, alone) for name, found in rows.items()]
    sys.exit(0 if all(agree) else "the runs disagree")


if __name__ == "__main__":
    main()
