"""Stop and go: a run saved on one pipeline and resumed on others.

    python examples/stop_and_go.py [FOLDER]

Six steps under 1F1B on two ranks, saved after three. The checkpoint is resumed on the same pipeline, in one process,
under zero bubble V and interleaved 1F1B on two ranks, and on four; steps four to six must be those of the first run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from small_model import TIED, Stage, draw_batch, loss_fn, on_ranks
from torch.optim.lr_scheduler import OneCycleLR

from hocket.runtime import build_schedule, clip_grad_norm_, load_checkpoint, parameter_groups, save_checkpoint

STEPS, SAVE_AT, MICROBATCHES, BOUND = 6, 3, 4, 1e-6
FIRST: Any = "1f1b"
LATER: list[tuple[str, int, Any]] = [
    ("1F1B, 2 ranks, as before", 2, "1f1b"),
    ("one process", 1, "gpipe"),
    ("zero bubble V, 2 ranks", 2, "zero_bubble_v"),
    ("interleaved, 2 ranks", 2, {"schedule": "1f1b", "num_stages_per_rank": 2}),
    ("1F1B, 4 ranks", 4, "1f1b"),
]


def train(folder: Path, schedule_config: Any, resume: bool) -> dict[str, Any]:
    """Losses and norms of the steps this run makes, and its weights at the end."""
    info, modules = build_schedule(None, MICROBATCHES, schedule_config, Stage, loss_fn, tied=TIED, seed=1)
    schedule = info.schedule
    groups = parameter_groups(modules, [("*.bias", {"weight_decay": 0.0})])
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    if resume:
        loaded = load_checkpoint(folder, modules, schedule=schedule, optimizer=optimizer, lr_scheduler=scheduler)
        assert loaded.extra == {"batches seen": SAVE_AT}
    seen: dict[str, Any] = {"loss": [], "norm": []}
    saved = None
    while schedule.steps < STEPS:
        inputs, targets = draw_batch(schedule.steps)
        optimizer.zero_grad()
        result = schedule.step(inputs, targets=targets)
        seen["norm"].append(float(clip_grad_norm_(modules, 1.0)))
        optimizer.step()
        scheduler.step()
        seen["loss"].append(float(schedule.share_loss(result)))
        if schedule.steps == SAVE_AT and not resume:
            saved = save_checkpoint(
                folder,
                modules,
                schedule=schedule,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                extra={"batches seen": schedule.steps},
                async_=True,  # the next steps go on while it is written
            )
    if saved is not None:
        saved.wait()
    seen["weights"] = {name: value for m in modules for name, value in m.state_dict().items()}
    return seen


def weights_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for row in rows for name, value in row["weights"].items()}


def compare(name: str, rows: list[dict[str, Any]], first: list[dict[str, Any]], exact: bool) -> bool:
    """Print how far a resumed run is from the run that never stopped; True if near enough."""
    theirs = {key: first[0][key][SAVE_AT:] for key in ("loss", "norm")}
    worst = {
        key: max(abs(a - b) / abs(b) for row in rows for a, b in zip(row[key], theirs[key], strict=True))
        for key in theirs
    }
    mine, before = weights_of(rows), weights_of(first)
    worst["weights"] = max(float((mine[n] - before[n]).abs().max() / before[n].abs().max()) for n in before)
    shown = ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
    print(f"{name:26} largest relative difference: {shown}")
    # AdamW divides by small numbers: weights may be a little further apart than losses.
    return mine.keys() == before.keys() and max(worst["loss"], worst["norm"]) <= (0.0 if exact else BOUND)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        first = on_ranks(2, train, folder, FIRST, False)
        print("loss      " + "  ".join(f"{loss:.4f}" for loss in first[0]["loss"]))
        near = []
        for name, ranks, config in LATER:
            rows = on_ranks(ranks, train, folder, config, True)
            near.append(compare(name, rows, first, exact=(ranks, config) == (2, FIRST)))
    sys.exit(0 if all(near) else "a resumed run went another way")


if __name__ == "__main__":
    main()
