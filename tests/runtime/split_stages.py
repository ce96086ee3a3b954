"""Small stages of many kinds, for the tests of the split backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Fn(nn.Module):
    """A stage of some modules and a function of them."""

    def __init__(self, function: Any, **modules: Any):
        super().__init__()
        for name, value in modules.items():
            setattr(self, name, value)
        self._function = [function]

    def forward(self, *args: Any) -> Any:
        return self._function[0](self, *args)


def linear(bias: bool = True, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, width, bias=bias)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.GELU(), linear())


class Attention(nn.Module):
    def __init__(self, causal: bool = True, mask: bool = False):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.causal, self.mask = causal, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 2, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        mask = torch.arange(t * t).view(t, t) % 3 != 1 if self.mask else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and not self.mask)
        return self.proj(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp, self.drop = Attention(), mlp(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class MoE(nn.Module):
    """Two of four experts for each token; one expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return y.view_as(x)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Conv1D(nn.Module):
    """As in GPT-2: a Linear with its matrix the other way round, no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(x.shape)


def tied() -> nn.Module:
    """An embedding whose weight is the last layer's too."""
    stage = Fn(lambda m, i: m.head(m.mlp(m.embed(i))), embed=nn.Embedding(11, WIDTH), mlp=mlp())
    stage.head = nn.Linear(WIDTH, 11, bias=False)
    stage.head.weight = stage.embed.weight
    return stage


def tied_linears() -> nn.Module:
    stage = Fn(lambda m, x: m.b(m.a(x).relu()), a=linear(), b=linear())
    stage.b.weight = stage.a.weight
    return stage


def three_d() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)
