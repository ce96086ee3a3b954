"""One gradient norm over all stages and ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Real

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.errors import ConfigError, PipelineError
from hocket.runtime.groups import Mesh, gather_numbers, group_of
from hocket.runtime.tied import is_copy


def clip_grad_norm_(
    modules: Iterable[nn.Module] | nn.Module,
    max_norm: float,
    mesh: Mesh = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole pipeline is at most `max_norm`; returns the norm before.

    modules: this rank's stages, as `build_schedule` returned them. mesh: as given to `build_schedule`. Call it on every
    rank of the pipeline. The norm is that of one process holding the whole model: tied copies count once, DTensor
    parameters in full, ranks without gradients count 0. It is a 0-d float64 tensor, the same on each rank.

    Raises PipelineError on all ranks, naming those whose gradients are not finite, if `error_if_nonfinite`; else such
    a norm is returned as it is, and gradients are scaled with it as torch.nn.utils.clip_grad_norm_ does.
    """
    for name, number in ("max_norm", max_norm), ("norm_type", norm_type):
        if not isinstance(number, Real) or not number > 0:
            raise ConfigError(f"{name} is {number!r}; give a number above 0")
    parameters = [p for p in _parameters(modules) if p.grad is not None]
    mine = _norm_power([p.grad for p in parameters if p.grad is not None and not is_copy(p)], norm_type)
    powers = [row[0] for row in gather_numbers([mine], group_of(mesh))]
    total = max(powers) if math.isinf(norm_type) else math.fsum(powers) ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        bad = [rank for rank, power in enumerate(powers) if not math.isfinite(power)]
        raise PipelineError(
            f"the gradient norm is {total}: gradients are not finite on rank {', '.join(map(str, bad)) or 'none alone'}"
            "; skip this step, or lower the learning rate or the loss scale"
        )
    norm = torch.tensor(total, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _parameters(modules: Iterable[nn.Module] | nn.Module) -> Iterator[nn.Parameter]:
    """Each parameter of this rank once, also if several stages share it."""
    seen: set[int] = set()
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"clip_grad_norm_ got a {type(module).__name__} among its modules; pass this rank's modules as "
                "build_schedule returned them, not their parameters"
            )
        for parameter in module.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _norm_power(gradients: list[torch.Tensor], norm_type: float) -> float:
    """The sum of the norms to the power of `norm_type`, in float64; the largest entry for the norm of infinity."""
    norms = [_whole(torch.linalg.vector_norm(g.detach(), norm_type, dtype=torch.float32)) for g in gradients]
    if not norms:
        return 0.0
    together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    return float(together.max() if math.isinf(norm_type) else together.pow(norm_type).sum())


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """The norm of a whole DTensor, from its shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
