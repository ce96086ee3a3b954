"""Real layers on 2 ranks with one thread each, over one process with one thread: hocket, torch, and the ideal.

    python benchmarks/training.py [--quick]

8 encoder layers of width 256, and an MLP of 8 x 1024 (larger messages). The ideal is the simulated makespan at the
median times of the run itself, with messages that take no time. Then ZBV with checkpointed layers over 1F1B with them,
and the first step over a later one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import alternate, machine, median, run_distributed, table, torch_schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.runtime import PipelineStageInfo, build_schedule

COUNT, LAYERS = 8, 8
CONFIGS: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "zero_bubble": True},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], checkpointed: bool = False):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(layers), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder 8 x 256": (encoder, (2, 128, 256)),
    "mlp 8 x 1024": (perceptron, (256, 1024)),
}


def provider(name: str, checkpointed: bool = False) -> Callable[[PipelineStageInfo], nn.Module]:
    def make(info: PipelineStageInfo) -> nn.Module:
        return Layers([MODELS[name][0]() for _ in info.layers(LAYERS)], checkpointed)

    return make


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = MODELS[name][1]
    size = (COUNT * shape[0], *shape[1:])
    return torch.randn(size), torch.randn(size)


def alone(rank: int, name: str, rounds: int) -> float:
    """Seconds of one process that accumulates the same microbatches."""
    torch.set_num_threads(1)
    model = provider(name)(PipelineStageInfo(0, 1))
    x, y = data(name)

    def step() -> None:
        for a, b in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
            (mse(model(a), b) / COUNT).backward()

    return median(alternate({"alone": step}, rounds)["alone"])


def pipeline(rank: int, name: str, config: dict[str, Any], rounds: int, checkpointed: bool, torch_too: bool) -> Any:
    torch.set_num_threads(1)
    make = provider(name, checkpointed)
    info, _ = build_schedule(None, COUNT, config, make, mse)
    x, y = data(name)
    begun = time.perf_counter()
    info.schedule.step(x, targets=y)
    first = time.perf_counter() - begun
    candidates: dict[str, Any] = {"hocket": lambda: info.schedule.step(x, targets=y)}
    if torch_too:
        program = info.schedule.program
        stages = {i: make(PipelineStageInfo(i, program.num_stages)) for i in program.placement.stages_of(rank)}
        theirs = torch_schedule(config, COUNT, stages, program.num_stages, mse)
        head, tail = info.has_first_stage, info.has_last_stage
        candidates["torch"] = lambda: theirs.step(*([x] if head else []), target=y if tail else None)
    found = {key: median(seconds) for key, seconds in alternate(candidates, rounds).items()}
    ratios = []
    for _ in range(3):
        info.schedule.step(x, targets=y)
        trace = info.schedule.trace(all_ranks=True)
        ratios.append(trace.makespan / trace.ideal_makespan())
    return {**found, "first": first, "over ideal": median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one model")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 9
    print(machine())
    rows = []
    for name in list(MODELS)[: 1 if quick else 2]:
        for config in CONFIGS:
            one = run_distributed(alone, 1, name, rounds, timeout=300)[0]
            f = run_distributed(pipeline, 2, name, config, rounds, False, True, timeout=300)[0]
            label = " ".join(map(str, config.values()))
            rows.append(
                [
                    name,
                    label,
                    f"{f['hocket'] / one:.3f}",
                    f"{f['torch'] / one:.3f}",
                    f"{f['hocket'] / f['torch']:.3f}",
                    f"{f['over ideal']:.3f}",
                    f"{f['first'] / f['hocket']:.2f}",
                ]
            )
            print(rows[-1], flush=True)
    print(table(["model", "schedule", "hocket/alone", "torch/alone", "hocket/torch", "/ideal", "first/later"], rows))
    seconds = {
        label: run_distributed(pipeline, 2, "encoder 8 x 256", config, rounds, True, False, timeout=300)[0]["hocket"]
        for label, config in (("1f1b", {"schedule": "1f1b"}), ("zbv", {"schedule": "zero_bubble_v"}))
    }
    print(f"checkpointed layers: ZBV {seconds['zbv'] / seconds['1f1b']:.3f} x 1F1B")


if __name__ == "__main__":
    main()
