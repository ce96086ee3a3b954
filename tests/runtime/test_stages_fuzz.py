"""Random stages, structures, dtypes, splits, schedules and calls on two ranks equal one process.

HOCKET_FUZZ=200 tries as many groups of random cases; by default a few fixed ones.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from distributed import run_distributed
from hocket.runtime import PipelineStageInfo
from runtime.stage_cases import CONFIGS, WIDTH, Call, Case, Ran, assert_same, merge_ranks, reference, run_case

LENGTH = 3


class Pair(NamedTuple):
    first: Any
    second: Any


# --- templates: what a stage returns, as nests of names of leaves -----------------------------------------------------

PLAIN = {"none": None, "number": 1.5, "text": "t", "raw": b"\0", "big": 2**65, "dtype": torch.bfloat16}
"""Leaves that are values."""
TENSORS = (
    *("h", "double", "half", "complex", "conj", "transposed", "wide", "strided", "mean", "int", "bool", "detached"),
    *("empty", "unused", "weight", "again", "in-place", "buffer"),
)
leaves = st.sampled_from([*TENSORS, *TENSORS, *PLAIN])
templates = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def build(template: Any, stage: FuzzStage, h: torch.Tensor) -> Any:
    """The value that `template` describes, made of `h`."""
    match template:
        case Pair():
            return Pair(*(build(item, stage, h) for item in template))
        case tuple() | list():
            return type(template)(build(item, stage, h) for item in template)
        case dict():
            return {key: build(item, stage, h) for key, item in template.items()}
        case name if name in PLAIN:
            return PLAIN[name]
        case "h":
            return h * 1
        case "double":
            return h.double()
        case "half":
            return h.bfloat16()
        case "complex":
            return torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
        case "conj":
            return torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()).conj()
        case "transposed":
            return h.transpose(0, 1)
        case "wide":
            return h.expand(2, *h.shape)
        case "strided":
            return h[..., ::2]
        case "mean":
            return h.mean()
        case "int":
            return (h.detach() > 0).long()
        case "bool":
            return h.detach() > 0
        case "detached":
            return h.detach()
        case "empty":
            return h[:0]
        case "unused":
            return stage.other(h)
        case "weight":
            return stage.layer.weight
        case "again":
            return h
        case "in-place":
            return h + 0
        case "buffer":
            return stage.count
    raise AssertionError(template)


def read(template: Any, value: Any) -> list[torch.Tensor]:
    """What the next stage makes of it: terms for its own hidden state."""
    match template:
        case Pair():
            assert type(value) is Pair
            return [term for t, v in zip(template, value, strict=True) for term in read(t, v)]
        case tuple() | list():
            assert type(value) is type(template)
            return [term for t, v in zip(template, value, strict=True) for term in read(t, v)]
        case dict():
            assert list(value) == list(template)
            return [term for key in template for term in read(template[key], value[key])]
        case name if name in PLAIN:
            assert type(value) is type(PLAIN[name]) and value == PLAIN[name]
            return []
        case "complex" | "conj":
            assert value.dtype is torch.complex64
            return [torch.view_as_real(value.resolve_conj()).flatten(-2)]
        case "transposed":
            return [value.transpose(0, 1)]
        case "wide":
            return [value[1] * value[0]]
        case "strided":
            return [value.repeat_interleave(2, -1)]
        case "int" | "bool" | "detached":
            assert not value.requires_grad
            return [value.float() * 0.1]
        case "empty" | "mean" | "weight" | "buffer":
            return [value.sum() * 0.1]
        case "unused":
            return []
        case "in-place":
            assert not (value.requires_grad and value.is_leaf)
            return [value.mul_(0.5)]
    return [value.float()]


# --- stages -----------------------------------------------------------------------------------------------------------


class FuzzStage(nn.Module):
    """Reads the template of the stage before, computes, and returns its own."""

    def __init__(self, info: PipelineStageInfo, spec: Spec):
        super().__init__()
        torch.manual_seed(100 + info.current_stage)
        self.info, self.spec = info, spec
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(2))
        if spec.frozen == info.current_stage:
            self.requires_grad_(False)

    def run(self, args: tuple[Any, ...], named: dict[str, Any], pos: Any) -> Any:
        self.count += 1
        if self.info.is_first:
            h = args[0]["x"][0] + args[1].sum() * 0.1
        else:
            template = self.spec.template(self.info.current_stage - 1)
            value = named if type(template) is dict else args if type(template) is tuple else args[0]
            if type(template) is dict:
                value = {key: value[key] for key in template}
            terms = read(template, value)
            h = sum(terms, torch.zeros(())) / max(len(terms), 1)
            # The shape may be lost on the way, when only scalars travel.
            h = h.expand(self.spec.rows, LENGTH, WIDTH) if h.dim() < 3 else h
        if pos is not None:
            h = h + (pos.mean() if pos.dim() != 3 or pos.shape[0] != h.shape[0] else pos)
        h = torch.tanh(self.layer(h))
        return h if self.info.is_last else build(self.spec.template(self.info.current_stage), self, h)


class TakesAll(FuzzStage):
    def forward(self, *args: Any, **named: Any) -> Any:
        return self.run(args, named, named.get("pos"))


class TakesPos(FuzzStage):
    def forward(self, *args: Any, a: Any = None, b: Any = None, c: Any = None, pos: Any = None) -> Any:
        return self.run(args, {"a": a, "b": b, "c": c}, pos)


class TakesNone(FuzzStage):
    def forward(self, *args: Any, a: Any = None, b: Any = None, c: Any = None) -> Any:
        return self.run(args, {"a": a, "b": b, "c": c}, None)


STAGES = {"all": TakesAll, "pos": TakesPos, "none": TakesNone}


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """All that was drawn of one case."""

    config: str
    count: int
    templates: tuple[Any, ...]
    kinds: tuple[str, ...]
    frozen: int
    calls: tuple[tuple[int, bool], ...]
    """Of each call: the items of its batch, and whether it evaluates."""
    pos: str
    divided: bool
    reduction: str
    targets: str
    dynamic: bool
    rows: int = 2
    """Rows that a stage makes up where none arrive."""

    def template(self, stage: int) -> Any:
        return self.templates[stage % len(self.templates)]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    config = draw(st.sampled_from(list(CONFIGS)))
    count = draw(st.integers(4 if config == "dual_pipe_v" else 1, 6))
    # Without a tensor of its length a batch cannot be told at the end of the pipeline, so "h" always rides along.
    inner = draw(st.lists(templates, min_size=1, max_size=3))
    carried = [draw(st.sampled_from([("h", t), [t, "h"], {"a": "h", "b": t}, Pair("h", t)])) for t in inner]
    sizes = st.integers(count, 10)
    return Spec(
        config=config,
        count=count,
        templates=tuple(carried),
        kinds=tuple(draw(st.lists(st.sampled_from(list(STAGES)), min_size=4, max_size=4))),
        frozen=draw(st.sampled_from([-1, -1, 0, 1])),
        calls=tuple(draw(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=3))),
        pos=draw(st.sampled_from(["absent", "batch", "dim 1", "whole", "function", "list"])),
        divided=draw(st.booleans()),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        targets=draw(st.sampled_from(["tensor", "dict", "index"])),
        dynamic=draw(st.booleans()),
    )


def halve(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [value * index for index in range(count)]


def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
    if isinstance(target, int):
        return (output * (target + 1)).pow(2).mean()
    return nn.functional.mse_loss(output, target["y"][0] if isinstance(target, dict) else target)


def case_of(spec: Spec) -> Case:
    torch.manual_seed(1)
    rules: dict[str | int, Any] = {
        1: "whole",
        "pos": {"dim 1": 1, "whole": "whole", "function": halve}.get(spec.pos, 0),
    }
    if spec.pos in ("absent", "batch", "list"):
        del rules["pos"]
    return Case(
        lambda info: STAGES[spec.kinds[info.current_stage % 4]](info, spec),
        [_call(spec, size, evaluate) for size, evaluate in spec.calls],
        loss_fn,
        spec.count,
        {"split": rules, "loss_reduction": spec.reduction, "dynamic_shapes": spec.dynamic},
    )


def _call(spec: Spec, size: int, evaluate: bool) -> Call:
    x, table = torch.randn(size, LENGTH, WIDTH), torch.randn(size, 2)
    cuts = [*sorted(torch.randperm(size - 1)[: spec.count - 1].add(1).tolist()), size]
    bounds = list(zip([0, *cuts], cuts, strict=False))
    shape = (LENGTH, size, WIDTH) if spec.pos == "dim 1" else (size, LENGTH, WIDTH)
    pos: Any = torch.randn(*shape)
    if spec.pos == "list":
        pos = list(pos.split([end - begin for begin, end in bounds]) if spec.divided else pos.tensor_split(spec.count))
    first: Any = [{"x": (x[begin:end], "note")} for begin, end in bounds] if spec.divided else {"x": (x, "note")}
    y = torch.randn(size, LENGTH, WIDTH)
    targets: Any = {"tensor": y, "dict": {"y": [y], "note": 1}, "index": None}[spec.targets]
    return Call((first, table), {} if spec.pos == "absent" else {"pos": pos}, targets, evaluate)


def run_specs(rank: int, group: list[Spec]) -> list[Ran]:
    found = []
    for spec in group:
        try:
            with warnings.catch_warnings():
                # A drawn model may have no stage that takes the drawn keyword.
                warnings.filterwarnings("ignore", "no stage takes the keyword")
                found.append(run_case(case_of(spec), CONFIGS[spec.config]))
        except Exception as error:
            error.add_note(f"on rank {rank}: {spec}")
            raise
    return found


EXAMPLES = int(os.environ.get("HOCKET_FUZZ", "4"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="HOCKET_FUZZ" not in os.environ,
    phases=[Phase.generate],
)
@given(st.lists(specs(), min_size=6, max_size=6))
def test_random_cases_equal_one_process(group: list[Spec]) -> None:
    rows = run_distributed(run_specs, 2, group, timeout=60)
    for spec, *ran in zip(group, *rows, strict=True):
        got = merge_ranks(ran)
        try:
            assert_same(got, reference(case_of(spec), got.num_stages), 2e-4)
        except AssertionError as error:
            error.add_note(str(spec))
            raise
