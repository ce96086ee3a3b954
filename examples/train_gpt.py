"""Trains a small GPT to write Python, on the source of Python's own standard library, as a pipeline of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py            # what `make train` runs
    python examples/train_gpt.py --ranks 4 --schedule zero_bubble_v
    python examples/train_gpt.py --schedule '{"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": true}'
    python examples/train_gpt.py --ranks 1                       # one process: the same losses, to the bit

It runs on gloo and the CPU, and on NCCL where each rank has a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hocket import CostModel, HocketError, build, parse_schedule, simulate
from hocket.runtime import PipelineInfo, PipelineStageInfo, build_schedule

VOCABULARY = 256  # bytes need no tokenizer
Say = Callable[[str], None]

# ---- the model: each stage has some of the layers; the first one embeds, the last one predicts ---------------------


def rotary(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, so that no stage needs to be told where in the text it is."""
    angles = torch.arange(length)[:, None] * 1000.0 ** -torch.linspace(0, 1, size // 2)
    return angles.cos(), angles.sin()


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int, context: int, depth: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.query_key_value, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.out, self.down):  # small, as `depth` of them add up
            nn.init.normal_(layer.weight, std=0.5 * (2 * depth * layer.in_features) ** -0.5)
        cos, sin = rotary(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        """Normalizes the heads and turns them by their position."""
        a, b = F.rms_norm(x, x.shape[-1:]).chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query_key, value = split.permute(2, 0, 3, 1, 4).split((2, 1))
        query, key = self.turn(query_key)
        attended = F.scaled_dot_product_attention(query, key, value[0], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class Stage(nn.Module):
    """The layers of one stage of the pipeline."""

    def __init__(self, stage: PipelineStageInfo, args: argparse.Namespace):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.width) if stage.is_first else None
        if self.embed is not None:
            nn.init.normal_(self.embed.weight, std=0.5)
        layers = stage.layers(args.layers)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, args.context, args.layers) for _ in layers)
        self.norm = nn.LayerNorm(args.width) if stage.is_last else None
        self.head = nn.Linear(args.width, VOCABULARY) if stage.is_last else None
        if self.head is not None:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the text -------------------------------------------------------------------------------------------------------


def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes of the library's top modules, for training, and every tenth module to measure on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = ([f for i, f in enumerate(files) if i % 10 != 5], files[5::10])
    train, held_out = (bytearray(b"\n".join(f.read_bytes() for f in part)) for part in parts)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def draw_batch(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Passages at random places and, for each byte, the one after it. Every rank draws the same."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(text) - context, (batch,), generator=generator)
    passages = torch.stack([text[place : place + context + 1] for place in places.tolist()]).long()
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


# ---- training -------------------------------------------------------------------------------------------------------


def make_optimizer(modules: list[nn.Module], args: argparse.Namespace) -> tuple[AdamW, LambdaLR]:
    """AdamW on this rank's stages; the rate rises for a twentieth of the run, then falls along a cosine to a tenth."""
    parameters = [p for module in modules for p in module.parameters()]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW([g for g in groups if g["params"]], lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, args.steps // 20))
        return warm_up * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))

    return optimizer, LambdaLR(optimizer, rate)


def train(
    info: PipelineInfo, modules: list[nn.Module], text: Tensor, args: argparse.Namespace, say: Say
) -> list[float]:
    """All steps. Returns the loss of each where the last stage lives."""
    schedule, losses = info.schedule, []
    optimizer, scheduler = make_optimizer(modules, args)
    begun = last = time.perf_counter()
    last_step = 0
    for step in range(1, args.steps + 1):
        inputs, targets = draw_batch(text, args.batch, args.context, args.seed + step)
        result = schedule.step(inputs.to(args.device), targets=targets.to(args.device))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if result.loss is not None:
            losses.append(result.loss)
        if step == 1 or step % args.log_every == 0 or step == args.steps:
            loss = schedule.share_loss(result).item()
            now = time.perf_counter()
            speed = (step - last_step) * args.batch * args.context / (now - last)
            last, last_step = now, step
            say(
                f"step {step:4d}/{args.steps}  loss {loss:.3f}  {speed:6,.0f} tokens/s  {args.label}  "
                f"bubble {args.bubble:.1%}  {now - begun:4.0f} s"
            )
    return [float(loss) for loss in losses]


def held_out_loss(info: PipelineInfo, text: Tensor, args: argparse.Namespace) -> float:
    """The loss on modules that it was not trained on."""
    inputs, targets = draw_batch(text, 4 * args.batch, args.context, seed=0)
    result = info.schedule.evaluate(inputs.to(args.device), targets=targets.to(args.device))
    return info.schedule.share_loss(result).item()


def write(info: PipelineInfo, args: argparse.Namespace, prompts: list[bytes]) -> list[str]:
    """Goes on writing after each prompt, all prompts at once; every byte is one run through the pipeline.

    The last stage picks the bytes and tells the other ranks.
    """
    length = max(map(len, prompts))
    texts = torch.tensor([list(prompt.rjust(length, b"\n")) for prompt in prompts], device=args.device)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.sample):
        result = info.schedule.evaluate(texts[:, -args.context :].contiguous(), return_outputs=True)
        chosen = torch.zeros(len(prompts), 1, dtype=torch.long)
        if info.has_last_stage:
            chances = (result.outputs[:, -1].float().cpu() / 0.6).softmax(-1)
            chosen = torch.multinomial(chances, 1, generator=generator)
        chosen = chosen.to(args.device)
        if dist.is_initialized():
            dist.broadcast(chosen, result.loss_rank)
        texts = torch.cat((texts, chosen), 1)
    return [bytes(row).decode(errors="replace").lstrip("\n") for row in texts.tolist()]


# ---- the command ----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source of Python's standard library, as a pipeline of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    started = int(os.environ.get("WORLD_SIZE", 0))
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument(
        "--schedule",
        default="1f1b",
        help='a name (gpipe, looped_bfs, 1f1b, zero_bubble_v, dual_pipe_v, ...) or JSON, such as {"schedule": "1f1b", '
        '"num_stages_per_rank": 2, "zero_bubble": true}',
    )
    pipeline.add_argument(
        "--ranks",
        type=count,
        default=started or 2,
        help="pipeline ranks; without torchrun the script starts itself again with that many; 1: all in this process",
    )
    pipeline.add_argument("--microbatches", type=count, default=4, help="slices of the batch")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=count, default=800, help="optimizer steps")
    training.add_argument("--batch", type=count, default=8, help="passages of text in a step")
    training.add_argument("--context", type=count, default=128, help="bytes in a passage")
    training.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    training.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=count, default=4, help="transformer blocks, at least one for each stage")
    model.add_argument("--width", type=count, default=128, help="size of an activation")
    model.add_argument("--heads", type=count, default=4, help="attention heads; must divide the width")
    output = parser.add_argument_group("output")
    output.add_argument("--log-every", type=count, default=50, help="steps between two lines of progress")
    output.add_argument("--sample", type=int, default=150, help="bytes to write after each prompt in the end; 0: none")
    output.add_argument("--losses", type=Path, help="write the loss of each step to this JSON file, with all its bits")
    output.add_argument("--threads", type=count, default=1, help="of each rank; the last bits of sums depend on it")
    args = parser.parse_args()
    if problem := check(args, started):
        parser.error(problem)
    return args


def check(args: argparse.Namespace, started: int) -> str | None:
    """What is wrong with the arguments, or None; notes the schedule's label and bubble in them."""
    if started and args.ranks != started:
        return f"--ranks is {args.ranks}, but torchrun started {started}; drop --ranks or start that many"
    if args.width % (2 * args.heads):
        return f"--width {args.width} is no multiple of twice --heads {args.heads}; change one of them"
    if args.batch < args.microbatches:
        return f"--batch {args.batch} cannot fill --microbatches {args.microbatches}; raise the one or lower the other"
    try:
        config = parse_schedule(args.schedule)
        program = build(config, ranks=args.ranks, microbatches=args.microbatches)
        PipelineStageInfo(0, program.num_stages).layers(args.layers)
    except HocketError as error:
        return str(error)
    if not program.has_backward:
        return f"schedule {config.schedule!r} runs forward only; choose one that trains, such as 1f1b"
    args.bubble = simulate(program, CostModel()).bubble_fraction
    options = [f" {k}={v}" for k, v in config.model_dump(exclude={"schedule"}, exclude_defaults=True).items()]
    args.label = config.schedule + "".join(options)
    return None


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def start_again_with_torchrun(ranks: int) -> None:
    """Replaces this process by torchrun, which runs this script on `ranks` processes."""
    sys.stdout.flush()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execve(sys.executable, [*launcher, *sys.argv], {"OMP_NUM_THREADS": "1", **os.environ})


def main() -> None:
    args = parse_arguments()
    if "WORLD_SIZE" not in os.environ and args.ranks > 1:
        start_again_with_torchrun(args.ranks)
    torch.set_num_threads(args.threads)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    on_gpus = torch.cuda.device_count() >= args.ranks
    args.device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(args.device)
    if args.ranks > 1:
        dist.init_process_group("nccl" if on_gpus else "gloo")

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    text, held_out = standard_library()
    info, modules = build_schedule(
        None,
        n_microbatches=args.microbatches,
        schedule_config=args.schedule,
        model_provider=lambda stage: Stage(stage, args).to(args.device),
        loss_fn=loss_fn,
        seed=args.seed,
        init="sequential",  # the weights do not depend on the number of ranks
    )
    size = f"{args.ranks} ranks, {info.schedule.program.num_stages} stages, {args.microbatches} microbatches"
    say(f"{len(text):,} bytes of Python; {args.label}, {size}, {args.device.type}")
    losses = train(info, modules, text, args, say)
    say(f"held out  loss {held_out_loss(info, held_out, args):.3f}")
    if args.losses and info.has_last_stage:
        args.losses.write_text(json.dumps(losses))
    if args.sample:
        for sample in write(info, args, [b"def ", b"class ", b"import ", b"    for "]):
            say("-" * 80 + "\n" + sample)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
