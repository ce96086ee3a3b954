"""What a checkpoint holds of one rank: tensors by name for torch.distributed.checkpoint, and plain values beside them.

Model tensors are saved under their names in the whole model, a tied weight under each of its names; optimizer state as
"optimizer/<key>/<name>", under the source's name if tied. Everything else is plain values: hyperparameters by name of
the parameter, LR schedulers, RNG states.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import ConfigError
from hocket.runtime.names import find_alias, names_of, state_of

PREFIX = "optimizer/"
_NOT_HYPER = {"params", "param_names"}

Named = dict[str, Any]


def dump(part: Named) -> bytes:
    """Plain values as bytes for torch.load with weights_only=True. Raises ConfigError for what that cannot read."""
    buffer = io.BytesIO()
    for key, value in part.items():
        trial = io.BytesIO()
        try:
            torch.save(value, trial)
            trial.seek(0)
            torch.load(trial, weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"the checkpoint cannot hold {key!r}: {error}; give numbers, strings, tensors, "
                "and lists and dicts of them"
            ) from error
    torch.save(part, buffer)
    return buffer.getvalue()


def restore(data: bytes) -> Any:
    """The values that `dump` wrote, tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


# --- the model


def model_state(modules: Sequence[nn.Module]) -> tuple[Named, Named]:
    """Parameters and persistent buffers of this rank, and what else its modules save."""
    tensors: Named = {}
    others: Named = {}
    for module in modules:
        for name, (_, value) in state_of(module).items():
            (tensors if isinstance(value, torch.Tensor) else others)[name] = value
    return tensors, others


def refuse_meta(tensors: Named) -> None:
    """Raise ConfigError if a tensor has no storage to load into."""
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise ConfigError(
            f"cannot load into {listed(empty)}: on the meta device; call module.to_empty(device=...) in the provider"
        )


def set_model_state(modules: Sequence[nn.Module], values: Named) -> None:
    """Load `values`, by names of the whole model, into all modules."""
    for module in modules:
        module.load_state_dict({own: values[name] for name, (own, _) in state_of(module).items()})


# --- the optimizer


def optimizer_state(optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]) -> tuple[Named, Named, Named]:
    """This rank's optimizer tensors and other state by "optimizer/<key>/<name>", and hyperparameters by name."""
    names = names_of(modules)
    tensors: Named = {}
    values: Named = {}
    hyper: Named = {}
    for parameter, group in _members(optimizers):
        if parameter not in names:
            raise ConfigError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is in none of the modules; "
                "pass the modules it was made for"
            )
        name = names[parameter][0]
        hyper[name] = _hyperparameters(group)
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                (tensors if isinstance(value, torch.Tensor) else values)[f"{PREFIX}{key}/{name}"] = value
    return tensors, values, hyper


def groups_of(optimizers: Sequence[Optimizer]) -> list[Named | None]:
    """Hyperparameters of all groups in order; None for a group without parameters here."""
    return [_hyperparameters(g) if g["params"] else None for o in optimizers for g in o.param_groups]


class OptimizerPlan:
    """What of a checkpoint's optimizer state belongs to this rank's parameters, whatever the ties are now and then."""

    def __init__(self, modules: Sequence[nn.Module], saved: Named, metadata: Named):
        self.saved = saved
        aliases: dict[str, tuple[str, ...]] = saved["aliases"]
        self.names: dict[nn.Parameter, str] = {}
        keys_of: dict[str, list[str]] = {}
        for full in [*metadata, *saved["optimizer_values"]]:
            if full.startswith(PREFIX):
                key, name = full.removeprefix(PREFIX).split("/", 1)
                keys_of.setdefault(name, []).append(key)
        for parameter, names in names_of(modules).items():
            found = (find_alias(name, aliases, saved["hyperparameters"]) for name in names)
            self.names[parameter] = next((name for name in found if name is not None), names[0])
        self.keys = {parameter: keys_of.get(name, []) for parameter, name in self.names.items()}
        self._metadata = metadata

    def targets(self) -> Named:
        """Empty tensors to read the state into, by the names in the checkpoint."""
        found: Named = {}
        for parameter, keys in self.keys.items():
            for key in keys:
                full = f"{PREFIX}{key}/{self.names[parameter]}"
                meta = self._metadata.get(full)
                if isinstance(meta, TensorStorageMetadata):
                    found[full] = _empty(parameter, meta)
        return found

    def load(self, optimizers: Sequence[Optimizer], tensors: Named) -> None:
        """Give the optimizers their state and their groups' hyperparameters."""
        number = 0
        for optimizer in optimizers:
            state = optimizer.state_dict()
            state["state"] = {}
            index = 0
            for group, written in zip(optimizer.param_groups, state["param_groups"], strict=True):
                written.update(self._group(number, group["params"]))
                number += 1
                for parameter in group["params"]:
                    found = self._state(parameter, tensors)
                    if found:
                        state["state"][index] = found
                    index += 1
            optimizer.load_state_dict(state)

    def _state(self, parameter: nn.Parameter, tensors: Named) -> Named:
        names = {key: f"{PREFIX}{key}/{self.names[parameter]}" for key in self.keys.get(parameter, [])}
        values = self.saved["optimizer_values"]
        return {key: tensors[full] if full in tensors else values[full] for key, full in names.items()}

    def _group(self, number: int, parameters: Sequence[nn.Parameter]) -> Named:
        """The saved hyperparameters of a group of this rank; all its parameters must have had the same."""
        hyper = self.saved["hyperparameters"]
        known = [self.names[p] for p in parameters if self.names.get(p) in hyper]
        if not known:
            groups = self.saved["groups"]
            return groups[number] if number < len(groups) and groups[number] and not parameters else {}
        first = hyper[known[0]]
        for name in known[1:]:
            for key, value in hyper[name].items():
                if not _same(value, first.get(key, value)):
                    raise ConfigError(
                        f"group {number} of the optimizer puts together {known[0]!r}, saved with "
                        f"{key}={first.get(key)}, "
                        f"and {name!r}, saved with {key}={value}; make the groups as in the saved run"
                    )
        return first


def _empty(parameter: nn.Parameter, meta: TensorStorageMetadata) -> torch.Tensor:
    dtype = meta.properties.dtype
    if isinstance(parameter, DTensor) and meta.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if len(meta.size) else torch.device("cpu")
    return torch.zeros(meta.size, dtype=dtype, device=device)


def _members(optimizers: Sequence[Optimizer]) -> Iterator[tuple[nn.Parameter, Named]]:
    return ((p, group) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


def _hyperparameters(group: Named) -> Named:
    return {key: value for key, value in group.items() if key not in _NOT_HYPER}


# --- LR schedulers and randomness


def set_lr_state(scheduler: LRScheduler, state: Named) -> None:
    """Load an LR scheduler saved on a rank with other groups: what is listed by group is taken from this rank's."""
    scheduler.load_state_dict(_fitted(state, scheduler.state_dict(), scheduler.optimizer.param_groups))


def _fitted(saved: Named, mine: Named, groups: Sequence[Named]) -> Named:
    found = dict(saved)
    for key, value in saved.items():
        own = mine.get(key)
        if key == "_schedulers" and isinstance(own, list):
            found[key] = [_fitted(a, b, groups) for a, b in zip(value, own, strict=True)]
        elif isinstance(own, list) and isinstance(value, list) and len(own) == len(groups) != len(value):
            source = {"base_lrs": "initial_lr", "_last_lr": "lr"}.get(key)
            found[key] = [group[source] for group in groups] if source else own
    return found


def rng_state() -> dict[str, torch.Tensor]:
    """This process's own torch generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in order for an error, cut if they are many."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
