"""What a backward in two halves costs: one full backward, hocket's I and W, and torch's, in one run.

    python benchmarks/split_backward.py [--quick]

Operations are counted with the formulas of torch.utils.flop_counter. Time is CPU time of I + W, or of the full
backward, of one stage and microbatch, the candidates in turn round after round; a ratio is the median of the rounds'
own ratios. Memory is what operations have made since F began and what still lives, without parameters' gradients.
torch is torch.distributed.pipelining's stage_backward_input and stage_backward_weight. One thread, .grad allocated.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from harness import machine, table
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from hocket.runtime.backward import BackwardSplitter

Stage = Callable[[], nn.Module]


class Block(nn.Module):
    """Pre-norm block with GELU, as in GPT-2."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gated(nn.Module):
    """Block of RMSNorm, rotated queries and keys, and a gated MLP of 8/3 the width, as in Llama."""

    def __init__(self, width: int):
        super().__init__()
        inner = 8 * width // 3 // 32 * 32
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angle = torch.arange(t, dtype=x.dtype)[:, None] / 100 ** torch.linspace(0, 1, q.shape[-1] // 2)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (z * cos + torch.cat([-z.chunk(2, -1)[1], z.chunk(2, -1)[0]], -1) * sin for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], checkpointed: bool = False):
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(layers), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


# --- the candidates: each makes (forward, input half, weight half) on a module of its own -----------------------------


class Full:
    """One full backward in the first half."""

    split = False

    def __init__(self, stage: Stage, x: torch.Tensor):
        torch.manual_seed(0)
        self.module, self.x = stage(), x
        self.splitter = BackwardSplitter(self.module, split=self.split)
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p)

    def forward(self) -> None:
        self.leaf = self.x.detach().requires_grad_()
        with self.splitter.forward_scope(0):
            self.y = self.module(self.leaf)
        self.grad = torch.ones_like(self.y)

    def first(self) -> None:
        self.splitter.backward_input(0, [self.y], [self.grad], [self.leaf])
        del self.y, self.leaf, self.grad

    def second(self) -> None:
        self.splitter.backward_weight(0)


class Hocket(Full):
    split = True


class Torch(Full):
    def first(self) -> None:
        weights = self.module.parameters()
        _, self.groups = stage_backward_input([self.y], [self.grad], [self.leaf], weights)
        del self.y, self.leaf, self.grad

    def second(self) -> None:
        stage_backward_weight(self.module.parameters(), self.groups)
        del self.groups


CANDIDATES: dict[str, type[Full]] = {"full": Full, "hocket": Hocket, "torch": Torch}


def make(stage: Stage, x: torch.Tensor) -> dict[str, Full]:
    return {name: kind(stage, x) for name, kind in CANDIDATES.items()}


# --- measurements -----------------------------------------------------------------------------------------------------


class Flops(TorchDispatchMode):
    """As FlopCounterMode counts, which knows no in-place ops, and which torch's split cannot run under."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = torch.ops.aten.addmm if func is torch.ops.aten.addmm_.default else func._overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


def flops(candidate: Full) -> int:
    candidate.forward()
    with Flops() as counter:
        candidate.first()
        candidate.second()
    return counter.total


def forwards(candidate: Full) -> int:
    """Forwards of blocks from F to W."""
    seen = [0]

    def count(*args: Any) -> None:
        seen[0] += 1

    handles = [layer.register_forward_pre_hook(count) for layer in candidate.module.layers]
    candidate.forward()
    candidate.first()
    candidate.second()
    for handle in handles:
        handle.remove()
    return seen[0]


def seconds(candidates: dict[str, Full], rounds: int, warm_up: int = 2) -> dict[str, list[tuple[float, float, float]]]:
    """CPU seconds of F, I and W of each, round after round."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in candidates}
    clock = time.process_time_ns
    gc.disable()
    for index in range(warm_up + rounds):
        for name, candidate in candidates.items():
            times = [clock()]
            for part in (candidate.forward, candidate.first, candidate.second):
                part()
                times.append(clock())
            if index >= warm_up:
                found[name].append(tuple((b - a) / 1e9 for a, b in itertools.pairwise(times)))
        gc.collect()
    gc.enable()
    return found


class Live(TorchDispatchMode):
    """Notes the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[Any, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.sizes[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        return sum(size for reference, size in self.sizes.values() if not reference.expired())


def memory(candidate: Full) -> tuple[int, int, int]:
    """Bytes after F, after I and after W. The output and the input's gradient are gone to the neighbours by then."""
    given = {
        t.untyped_storage().data_ptr() for p in candidate.module.parameters() for t in (p, p.grad) if t is not None
    }
    found = []
    with Live() as live:
        for part in (candidate.forward, candidate.first, candidate.second):
            part()
            for pointer in given & live.sizes.keys():
                del live.sizes[pointer]
            found.append(live.bytes())
    return found[0], found[1], found[2]


# --- tables -----------------------------------------------------------------------------------------------------------


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def time_row(label: str, candidates: dict[str, Full], rounds: int) -> list[str]:
    found = seconds(candidates, rounds)
    both = {name: [i + w for _, i, w in rows] for name, rows in found.items()}
    ahead = {name: [f for f, _, _ in rows] for name, rows in found.items()}
    row = [label, f"{statistics.median(both['full']) * 1e3:.2f}"]
    for name in ("hocket", "torch"):
        row += [f"{statistics.median(both[name]) * 1e3:.2f}", f"{ratio(both[name], both['full']):.2f}"]
    halves = [statistics.median(row[part] for row in found["hocket"]) for part in (1, 2)]
    return [*row, f"{halves[1] / sum(halves):.2f}", f"{ratio(ahead['hocket'], ahead['full']):.2f}"]


TIME_HEAD = ["stage", "full ms", "hocket I+W ms", "/full", "torch I+W ms", "/full", "W/(I+W)", "F hocket/full"]


def blocks(count: int, width: int, checkpointed: bool = False) -> Stage:
    return lambda: Blocks([Block(width) for _ in range(count)], checkpointed)


def encoder(count: int) -> Stage:
    return lambda: Blocks([nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(count)])


def convolutions(count: int) -> Stage:
    return lambda: Blocks([nn.Conv1d(64, 64, 3, padding=1) for _ in range(count)])


def operations_table() -> str:
    rows = []
    for label, checkpointed in (("4 blocks of width 256", False), ("the same, checkpointed", True)):
        found = make(blocks(4, 256, checkpointed), torch.randn(2, 64, 256))
        counts = {name: flops(candidate) for name, candidate in found.items()}
        runs = {name: forwards(candidate) / 4 for name, candidate in found.items()}
        row = [label, f"{counts['full'] / 1e9:.2f}"]
        for name in ("hocket", "torch"):
            row += [f"{counts[name] / counts['full']:.3f}", f"{runs[name]:g}"]
        rows.append(row)
    return table(["stage", "full GFLOP", "hocket/full", "forwards a block", "torch/full", "forwards a block"], rows)


def memory_table() -> str:
    rows = []
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "GPT block": Block,
        "GPT block, dropout": lambda width: Block(width, 0.1),
        "Llama block": Gated,
        "encoder layer": lambda width: nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True),
    }
    for (label, kind), width in itertools.product(kinds.items(), (256,)):
        stage = lambda: Blocks([kind(width) for _ in range(4)])  # noqa: E731, B023
        for name, candidate in make(stage, torch.randn(4, 64, width)).items():
            f, i, w = memory(candidate)
            rows.append([f"4 x {label} of {width}", name, f"{f / 2**20:.2f}", f"{i / f:.2f}", f"{w / f:.2f}"])
    return table(["stage", "", "MiB after F", "after I/F", "after W/F"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; no stage of 256 layers, no width 1024")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(machine())
    print("\nOperations of I + W\n")
    print(operations_table())
    print("\nLive memory\n")
    print(memory_table())
    print("\nCPU time, blocks of 4 x 64 tokens\n")
    rows = []
    for width, rounds in ((64, 200), (256, 30), (512, 20), *(() if quick else ((1024, 8),))):
        for checkpointed in (False, True) if width == 256 else (False,):
            label = f"2 blocks of width {width}" + (", checkpointed" if checkpointed else "")
            found = make(blocks(2, width, checkpointed), torch.randn(4, 64, width))
            rows.append(time_row(label, found, rounds // (4 if quick else 1)))
    found = make(convolutions(4), torch.randn(4, 64, 64))
    rows.append(time_row("4 convolutions of width 64", found, 20 if quick else 100))
    print(table(TIME_HEAD, rows))
    print("\nCPU time by depth, encoder layers of width 16, 2 x 8 tokens\n")
    rows = []
    for depth, rounds in ((4, 100), (16, 40), (64, 12), *(() if quick else ((256, 4),))):
        found = make(encoder(depth), torch.randn(2, 8, 16))
        rows.append(time_row(f"{depth} layers", found, rounds // (4 if quick else 1)))
    print(table(TIME_HEAD, rows))


if __name__ == "__main__":
    main()
