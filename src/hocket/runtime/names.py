"""Parameters and buffers under the names of the whole model, also inside wrappers and where weights are tied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.errors import ConfigError

_TRANSPARENT = {"_orig_mod", "_checkpoint_wrapped_module"}
_NAMES = "_hocket_tied_names"


def whole_name(root: nn.Module, name: str) -> str:
    """`name` as `root` gives it, without what DistributedDataParallel, torch.compile and the like put in."""
    kept = []
    module: Any = root
    for part in name.split("."):
        inside = part in _TRANSPARENT or (part == "module" and isinstance(module, DistributedDataParallel))
        if not inside:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def as_modules(modules: Iterable[nn.Module] | nn.Module) -> list[nn.Module]:
    """One module or several, as a list."""
    return [modules] if isinstance(modules, nn.Module) else list(modules)


def state_of(module: nn.Module) -> dict[str, tuple[str, Any]]:
    """The state dict of `module` by names of the whole model: (the module's own name, the value)."""
    return {whole_name(module, name): (name, value) for name, value in module.state_dict().items()}


def place_tied(parameter: torch.Tensor, names: tuple[str, ...]) -> None:
    """Note all names of a tied weight, its source first, on the parameter that this rank has of it."""
    setattr(parameter, _NAMES, names)


def names_of(modules: Iterable[nn.Module] | nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """This rank's parameters, each once, with all names it has in the whole model: a tied one has its source's first.

    Raises ConfigError if two parameters have one name.
    """
    found: dict[nn.Parameter, list[str]] = {}
    owner: dict[str, nn.Parameter] = {}
    for module in as_modules(modules):
        for own, parameter in module.named_parameters(remove_duplicate=False):
            name = whole_name(module, own)
            if owner.setdefault(name, parameter) is not parameter:
                raise ConfigError(
                    f"two parameters of this rank are named {name!r}; name them as in the whole model, such as "
                    "layers.4.weight in the stage that holds layer 4"
                )
            found.setdefault(parameter, []).append(name)
    return {
        parameter: tuple(dict.fromkeys([*getattr(parameter, _NAMES, ()), *names])) for parameter, names in found.items()
    }


def find_alias(name: str, aliases: Mapping[str, tuple[str, ...]], there: Any) -> str | None:
    """The first of `name` and the names tied to it that is in `there`, or None."""
    return next((alias for alias in (name, *aliases.get(name, ())) if alias in there), None)
