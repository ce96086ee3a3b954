"""How a stage's backward is split: decided when the stage is built, with the reason in words."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hocket.runtime.data_parallel import is_wrapped
from hocket.runtime.deferred import plain_parameters, rule_of


class SplitMethod(enum.Enum):
    """What I leaves to W."""

    DEFERRED = "deferred weight products"
    AUTOGRAD = "autograd graph cut in two"
    FULL = "full backward in I"


@dataclass(frozen=True)
class SplitChoice:
    """How a stage's backward is split, and why in words."""

    method: SplitMethod
    reason: str


def choose_split(module: nn.Module) -> SplitChoice:
    """The method for `module` as it is now, wrapped, compiled, frozen and hooked as it will be trained."""
    if is_wrapped(module):
        return SplitChoice(SplitMethod.FULL, "a data parallel wrapper reduces its gradients while backward runs")
    if not any(p.requires_grad for p in module.parameters()):
        return SplitChoice(SplitMethod.FULL, "no parameter requires grad, so there is nothing to leave to W")
    if _is_compiled(module):
        return SplitChoice(SplitMethod.FULL, "the stage is compiled as a whole, and so is its backward")
    weights = _weights(module)
    if not weights:
        return SplitChoice(SplitMethod.FULL, "it has no weights but embeddings and vectors, whose gradients are cheap")
    layers = deferrable(module)
    mine = {id(p): p for layer in layers for p in layer._parameters.values() if p is not None and id(p) in weights}
    share = sum(p.numel() for p in mine.values()) / sum(p.numel() for p, _ in weights.values())
    rest = _listed(owner for key, (_, owner) in weights.items() if key not in mine)
    compiled = _listed(m for m in module.modules() if _is_compiled(m))
    if mine and (share >= 0.5 or compiled):
        reason = f"{_listed(layers)} with {share:.0%} of the weights"
        return SplitChoice(SplitMethod.DEFERRED, reason + (f"; done in I: those of {rest}" if rest else ""))
    if compiled:
        return SplitChoice(SplitMethod.FULL, f"its weights are in compiled modules ({compiled})")
    if isinstance(module, torch.jit.ScriptModule):
        return SplitChoice(SplitMethod.FULL, "it is a TorchScript module, whose graph is not known")
    reason = f"most weights are in modules that cannot be deferred ({rest}); checked for each microbatch"
    return SplitChoice(SplitMethod.AUTOGRAD, reason)


def deferrable(module: nn.Module) -> list[nn.Module]:
    """The modules inside whose weight products can be deferred, each once; not those in compiled code."""
    return [m for m in _uncompiled(module) if _can_defer(m)]


def _can_defer(module: nn.Module) -> bool:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # MultiheadAttention takes its weight and never calls it.
    rule = rule_of(module)
    parameters = rule and plain_parameters(module, rule)
    return bool(parameters) and not any(_is_held(p) for p in parameters if p is not None)


def _is_held(parameter: nn.Parameter) -> bool:
    """True if someone keeps the parameter's accumulator, as wrappers do that reduce gradients in hooks on it.

    One that nobody keeps is made anew each time, and forgets what was noted on it.
    """
    if not parameter.requires_grad:
        return False
    edges: Any = get_gradient_edge
    edges(parameter).node.metadata["hocket"] = True
    return edges(parameter).node.metadata.pop("hocket", False)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        found = stack.pop()
        if found not in seen and not _is_compiled(found):
            seen.add(found)
            yield found
            stack.extend(reversed(list(found.children())))


def _weights(module: nn.Module) -> dict[int, tuple[nn.Parameter, nn.Module]]:
    """The trainable parameters whose gradients take time, by id, with a module that owns them.

    Those are products, so no vectors; unless a registered type says that its vector is its weight.
    """
    return {
        id(p): (p, owner)
        for owner in module.modules()
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        for name, p in owner.named_parameters(recurse=False)
        if p.requires_grad and (p.dim() > 1 or ((rule := rule_of(owner)) and name == rule.parameters[0]))
    }


def _listed(modules: Iterable[nn.Module]) -> str:
    """As in '12 Linear, 2 Conv1d'."""
    names = Counter(type(module).__name__ for module in dict.fromkeys(modules))
    return ", ".join(f"{count} {name}" for name, count in names.most_common())
