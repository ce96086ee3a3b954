"""(F, I, W) gives every bit that plain autograd gives, for each kind of stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.runtime.backward import SplitMethod
from runtime.split_cases import Case, check
from runtime.split_stages import (
    WIDTH,
    Attention,
    Block,
    Fn,
    LoRA,
    MoE,
    Scaled,
    Square,
    linear,
    mlp,
    three_d,
    tied,
    tied_linears,
)

DEFERRED, AUTOGRAD, FULL = SplitMethod.DEFERRED, SplitMethod.AUTOGRAD, SplitMethod.FULL


def bf16_with_fp32_grads(module: nn.Module) -> None:
    module.bfloat16()
    for p in module.parameters():
        p.grad_dtype = torch.float32


def preallocated(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5)


def freeze(*names: str) -> Any:
    return lambda module: [module.get_parameter(name).requires_grad_(False) for name in names]


def wide_grads(outputs: Any) -> list[torch.Tensor | None]:
    """As the backward of a sum gives them: one number seen in all places."""
    return [torch.ones(()).expand(t.shape) for t in outputs]


AUTOCAST = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731

CASES: dict[str, Case] = {
    # Linear
    "linear_2d": Case(linear),
    "linear_2d_no_bias": Case(lambda: linear(bias=False)),
    "linear_3d": Case(linear, three_d),
    "linear_3d_no_bias": Case(lambda: linear(bias=False), three_d),
    "linear_1d": Case(mlp, lambda: torch.randn(WIDTH), bound=1e-6),
    "linear_transposed_input": Case(lambda: Fn(lambda m, x: m.a(x.transpose(0, 1)), a=linear()), three_d, bound=1e-6),
    "linear_no_rows": Case(mlp, lambda: torch.randn(0, WIDTH)),
    "linear_expanded_gradient": Case(mlp, three_d, grads=wide_grads),
    "output_is_a_view": Case(lambda: Fn(lambda m, x: m.a(x).view(2, -1), a=mlp()), three_d),
    "same_linear_twice": Case(lambda: Fn(lambda m, x: m.a(m.a(x).relu()), a=linear())),
    "tied_linears": Case(tied_linears, late=["a.weight"]),
    "tied_embedding_and_head": Case(tied, lambda: torch.randint(11, (2, 5)), bound=1e-6, late=["mlp.0.weight"]),
    "linear_and_its_weight_elsewhere": Case(
        lambda: Fn(lambda m, x: m.a(x) + F.linear(x, m.a.weight), a=linear()), bound=1e-6, late=[]
    ),
    "subclass_without_forward": Case(lambda: type("Mine", (nn.Linear,), {})(WIDTH, WIDTH)),
    "subclass_with_forward": Case(lambda: Scaled(WIDTH, WIDTH), method=AUTOGRAD, late=["weight", "bias"]),
    "instance_forward": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()),
        prepare=lambda m: setattr(m.a, "forward", lambda x: F.linear(x, m.a.weight) * 2),
        late=["b.weight"],
    ),
    "keyword_call": Case(lambda: Fn(lambda m, x: m.b(m.a(input=x)), a=linear(), b=linear()), late=["b.weight"]),
    # other layers
    "embedding": Case(
        lambda: Fn(lambda m, i: m.mlp(m.embed(i)), embed=nn.Embedding(11, WIDTH), mlp=mlp()),
        lambda: torch.randint(11, (2, 5)),
    ),
    "layer_norm": Case(lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH))),
    "rms_norm": Case(lambda: nn.Sequential(nn.RMSNorm(WIDTH), linear(), nn.RMSNorm(WIDTH))),
    "batch_norm": Case(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())),
    "norms_alone": Case(lambda: nn.LayerNorm(WIDTH), method=FULL),
    "dropout": Case(lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear())),
    "sdpa_causal": Case(Attention, three_d),
    "sdpa_mask": Case(lambda: Attention(mask=True), three_d),
    "block": Case(Block, three_d),
    "block_dropout": Case(lambda: Block(0.3), three_d),
    "three_blocks": Case(lambda: nn.Sequential(Block(), Block(), Block()), three_d),
    "multihead_attention": Case(
        lambda: Fn(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(WIDTH, 2)),
        three_d,
        AUTOGRAD,
        late=["a.in_proj_weight", "a.out_proj.weight"],
    ),
    "encoder_layer": Case(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True),
        three_d,
        late=["linear1.weight", "linear2.weight"],
    ),
    "moe": Case(MoE, three_d),
    "lora": Case(LoRA),
    "conv1d": Case(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 3)),
        lambda: torch.randn(2, 4, 9),
        AUTOGRAD,
        late=["0.weight", "2.weight"],
    ),
    "conv1d_shared": Case(
        lambda: Fn(lambda m, x: m.a(m.a(x)), a=nn.Conv1d(4, 4, 3)), lambda: torch.randn(2, 4, 9), AUTOGRAD
    ),
    "gru": Case(lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(WIDTH, WIDTH)), three_d, AUTOGRAD, late=["a.weight_ih_l0"]),
    "lstm": Case(lambda: Fn(lambda m, x: m.a(x), a=nn.LSTM(WIDTH, WIDTH, 2)), three_d, AUTOGRAD),
    "weight_norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), mlp()), late=["1.0.weight"]
    ),
    "weight_norm_alone": Case(lambda: nn.utils.parametrizations.weight_norm(linear()), method=AUTOGRAD),
    "chunk": Case(lambda: Fn(lambda m, x: m.a(x).chunk(2, dim=-1), a=linear())),
    "unbind_and_join": Case(
        lambda: Fn(lambda m, x: m.b(torch.stack(m.a(x).unbind(1)[::2])), a=linear(), b=linear()), three_d
    ),
    "in_place_relu": Case(
        lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)), three_d
    ),
    "in_place_add": Case(lambda: Fn(lambda m, x: m.a(x).add_(1.0).mul_(m.b(x)), a=linear(), b=linear()), three_d),
    "custom_function": Case(lambda: Fn(lambda m, x: m.b(Square.apply(m.a(x))), a=linear(), b=linear())),
    "gradient_inside": Case(
        lambda: Fn(
            lambda m, x: torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)[0] + m.b(x),
            a=linear(),
            b=linear(),
        ),
        bound=1e-6,
        late=[],
    ),
    # what the stage's outputs and inputs depend on
    "unused_parameter": Case(lambda: Fn(lambda m, x: m.a(x), a=linear(), b=linear())),
    "frozen_weight": Case(mlp, prepare=freeze("0.weight"), late=["2.weight"]),
    "frozen_bias": Case(mlp, prepare=freeze("0.bias", "2.bias")),
    "frozen_stage": Case(mlp, method=FULL, prepare=lambda m: m.requires_grad_(False)),
    "no_parameters": Case(lambda: nn.Sequential(nn.ReLU(), nn.Softmax(-1)), method=FULL),
    "output_of_parameters_only": Case(
        lambda: Fn(lambda m, x: (m.a(x), m.b(m.p), m.p * 2), a=linear(), b=linear(), p=nn.Parameter(torch.ones(2, 8)))
    ),
    "output_of_parameters_only_autograd": Case(
        lambda: Fn(
            lambda m, x: (m.a(x), m.p * 2, m.a.weight.sum()), a=nn.Conv1d(4, 4, 3), p=nn.Parameter(torch.ones(2))
        ),
        lambda: torch.randn(2, 4, 9),
        AUTOGRAD,
    ),
    "output_without_gradient": Case(
        lambda: Fn(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()),
        grads=lambda outputs: [torch.ones_like(outputs[0]), None],
    ),
    "no_output_has_a_gradient": Case(mlp, grads=lambda outputs: [None], method=DEFERRED),
    "output_is_the_input": Case(lambda: Fn(lambda m, x: (x, m.a(x)), a=linear())),
    "same_output_twice": Case(lambda: Fn(lambda m, x: (y := m.a(x), y), a=linear())),
    "ignores_its_input": Case(lambda: Fn(lambda m, x: m.a(m.p), a=linear(), p=nn.Parameter(torch.ones(2, WIDTH)))),
    "ignores_its_input_autograd": Case(
        lambda: Fn(lambda m, x: m.a(m.p), a=nn.Conv1d(4, 4, 3), p=nn.Parameter(torch.ones(2, 4, 9))), method=AUTOGRAD
    ),
    "one_of_two_inputs": Case(
        lambda: Fn(lambda m, x, y: m.a(x), a=linear()), lambda: (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    ),
    "input_without_gradient": Case(mlp, inputs_require_grad=False),
    "input_without_gradient_conv": Case(
        lambda: nn.Conv1d(4, 4, 3), lambda: torch.randn(2, 4, 9), AUTOGRAD, inputs_require_grad=False
    ),
    "scalar_output": Case(lambda: Fn(lambda m, x: m.a(x).square().mean(), a=mlp()), grads=lambda outputs: [None]),
    # precision
    "autocast_bf16": Case(lambda: nn.Sequential(Block(), linear()), three_d, around=AUTOCAST),
    "autocast_bf16_weight_elsewhere": Case(
        lambda: Fn(lambda m, x: m.a(x) + F.linear(x, m.a.weight), a=linear()), around=AUTOCAST, bound=2e-2, late=[]
    ),
    "bf16": Case(lambda: Block().bfloat16(), lambda: three_d().bfloat16()),
    "bf16_with_fp32_grads": Case(Block, lambda: three_d().bfloat16(), prepare=bf16_with_fp32_grads),
    "float64": Case(lambda: Block().double(), lambda: three_d().double(), bound=1e-14),
    "preallocated_grad": Case(
        lambda: nn.Sequential(Block(), linear()), three_d, prepare=preallocated, late=[], bound=1e-6
    ),
    "transposed_weight": Case(
        linear, prepare=lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach().t().contiguous().t()))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_autograd(name: str) -> None:
    check(CASES[name])
