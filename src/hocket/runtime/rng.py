"""Randomness that depends on where it is drawn in the model and the batch, not on which rank runs it or when."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch

from hocket.errors import ConfigError
from hocket.runtime.context import here


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and strings: the same everywhere, different where any part differs."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def keyed_rng(
    key: int | str | None = None,
    *,
    seed: int | None = None,
    step: int | None = None,
    microbatch: int | None = None,
) -> Generator[None]:
    """Within this scope torch draws by (seed, step, microbatch, key) alone; afterwards it goes on as if nothing was.

    Put it around dropout in a layer's forward, with the layer's number as key: the masks are then the same under every
    schedule, any number of ranks, and when activation checkpointing runs forward again. Inside a step of a schedule
    the seed, the step and the microbatch are known, and the stage is the default key; elsewhere give all of them, as
    a single process does that must draw the same. Raises ConfigError if something is missing.
    """
    place = here()
    if place is not None:
        seed = place.step.seed if seed is None else seed
        step = place.step.step if step is None else step
        microbatch = place.microbatch if microbatch is None else microbatch
        key = place.stage if key is None else key
    known = {"seed": seed, "step": step, "microbatch": microbatch, "key": key}
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise ConfigError(f"keyed_rng outside a step of a schedule needs {', '.join(missing)} as well; pass them")
    with isolated_rng(derive_seed("keyed", *(value for value in known.values() if value is not None))):
        yield


@contextmanager
def isolated_rng(seed: int) -> Generator[None]:
    """Draw from `seed` within this scope, on the CPU and the current accelerator; restore both states behind it."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [torch.accelerator.current_device_index()] if kind is not None else []
    with torch.random.fork_rng(devices, device_type=kind.type if kind is not None else "cuda"):
        # Not torch.manual_seed: where CUDA is not in use, it keeps each call and its stack for later, forever.
        torch.default_generator.manual_seed(seed)
        if kind is not None:
            torch.get_device_module(kind).manual_seed(seed)
        yield
