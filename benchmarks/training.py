"""Real layers on 2 ranks with one thread each, over one process with one thread: hocket, torch, and the ideal.

    python benchmarks/training.py [--quick]

8 encoder layers of width 256, and an MLP of 8 x 1024 (larger messages). The ideal is the simulated makespan at the
median times of the run itself, with messages that take no time. Then ZBV with checkpointed layers over 1F1B with them,
and the first step over a later one.
"""

from __future__ import annotations

import argparse
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


def alone(rank: int, name: str, rounds: int, parts: int = 1) -> float:
    """Seconds of one process that accumulates the same microbatches; with `parts`, of the first part of the layers.

    On as many ranks as parts, that is what each core can do beside the others: no pipeline can take less.
    """
    torch.set_num_threads(1)
    model = provider(name)(PipelineStageInfo(0, parts))
    x, y = data(name)

    def step() -> None:
        for a, b in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
            (mse(model(a), b) / COUNT).backward()

    return median(alternate({"alone": step}, rounds)["alone"])


Step = Callable[[], object]


def steps(rank: int, name: str, config: dict[str, Any], checkpointed: bool) -> tuple[Any, Step, Callable[[], Step]]:
    """hocket's schedule and step, and what makes torch's step of the same config."""
    torch.set_num_threads(1)
    make = provider(name, checkpointed)
    info, _ = build_schedule(None, COUNT, config, make, mse)
    x, y = data(name)

    def torch_step() -> Step:
        program = info.schedule.program
        stages = {i: make(PipelineStageInfo(i, program.num_stages)) for i in program.placement.stages_of(rank)}
        theirs = torch_schedule(config, COUNT, stages, program.num_stages, mse)
        head, tail = info.has_first_stage, info.has_last_stage
        return lambda: theirs.step(*([x] if head else []), target=y if tail else None)

    return info.schedule, lambda: info.schedule.step(x, targets=y), torch_step


def pipeline(rank: int, name: str, config: dict[str, Any], rounds: int, checkpointed: bool, torch_too: bool) -> Any:
    schedule, ours, theirs = steps(rank, name, config, checkpointed)
    candidates = {"hocket": ours, **({"torch": theirs()} if torch_too else {})}
    found = {key: median(seconds) for key, seconds in alternate(candidates, rounds).items()}
    ratios = []
    for _ in range(3):
        ours()
        trace = schedule.trace(all_ranks=True)
        ratios.append(trace.makespan / trace.ideal_makespan())
    return {**found, "over ideal": median(ratios)}


def first_over_later(rank: int, name: str, config: dict[str, Any], of_torch: bool) -> float:
    """In processes that have computed nothing before: the first step touches all memory for the first time."""
    _, ours, theirs = steps(rank, name, config, False)
    step = theirs() if of_torch else ours
    (first,) = alternate({"": step}, 1, warm_up=0)[""]
    return first / median(alternate({"": step}, 3, warm_up=1)[""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one model")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 9
    print(machine())
    rows = []
    for name in list(MODELS)[: 1 if quick else 2]:
        floors = [
            run_distributed(alone, 2, name, rounds, 2, timeout=300)[0]
            / run_distributed(alone, 1, name, rounds, timeout=300)[0]
            for _ in range(3)
        ]
        print(f"{name}: half of the layers on each of 2 processes at once, no pipeline: {median(floors):.3f} of one")
        for config in CONFIGS:
            one = run_distributed(alone, 1, name, rounds, timeout=300)[0]
            f = run_distributed(pipeline, 2, name, config, rounds, False, True, timeout=300)[0]
            firsts = [
                [run_distributed(first_over_later, 2, name, config, of_torch, timeout=300)[0] for _ in range(3)]
                for of_torch in (False, True)
            ]
            label = " ".join(map(str, config.values()))
            rows.append(
                [
                    name,
                    label,
                    f"{f['hocket'] / one:.3f}",
                    f"{f['torch'] / one:.3f}",
                    f"{f['hocket'] / f['torch']:.3f}",
                    f"{f['over ideal']:.3f}",
                    *(f"{median(v):.2f}" for v in firsts),
                ]
            )
            print(rows[-1], flush=True)
    head = ["model", "schedule", "hocket/alone", "torch/alone", "hocket/torch", "/ideal", "first/later", "torch's"]
    print(table(head, rows))
    seconds = {
        label: run_distributed(pipeline, 2, "encoder 8 x 256", config, rounds, True, False, timeout=300)[0]["hocket"]
        for label, config in (("1f1b", {"schedule": "1f1b"}), ("zbv", {"schedule": "zero_bubble_v"}))
    }
    print(f"checkpointed layers: ZBV {seconds['zbv'] / seconds['1f1b']:.3f} x 1F1B")


if __name__ == "__main__":
    main()
