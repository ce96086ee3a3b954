"""Parameter groups by the names of the whole model, for ordinary torch optimizers over this rank's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hocket.errors import ConfigError
from hocket.runtime.names import names_of

Match = str | Callable[[str, nn.Parameter], bool]
"""A pattern for names of the whole model, such as "*.bias" or "layers.[0-3].*", or match(name, parameter)."""


def parameter_groups(
    modules: Iterable[nn.Module] | nn.Module, rules: Sequence[tuple[Match, Mapping[str, Any]]] = ()
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: one for each rule (match, options), in order, and a last one for the rest.

    A parameter goes to the first rule that matches its name in the whole model; a tied weight goes by its source's
    name, so that all its copies get the same options. Frozen parameters are left out. Every rank gets the same number
    of groups in the same order, some of them empty, so optimizers accept a rank with nothing to train, and LR
    schedulers and checkpoints see the same groups everywhere.
    """
    for number, rule in enumerate(rules):
        if len(rule) != 2 or not (isinstance(rule[0], str) or callable(rule[0])) or "params" in rule[1]:
            raise ConfigError(
                f"rule {number} is {rule!r}; give (pattern or match(name, parameter), options), "
                "and no 'params' in the options"
            )
    groups: list[dict[str, Any]] = [{"params": [], **options} for _, options in rules]
    groups.append({"params": []})
    for parameter, names in names_of(modules).items():
        if parameter.requires_grad:
            chosen = (i for i, (match, _) in enumerate(rules) if _matches(match, names[0], parameter))
            groups[next(chosen, len(rules))]["params"].append(parameter)
    return groups


def _matches(match: Match, name: str, parameter: nn.Parameter) -> bool:
    return fnmatchcase(name, match) if isinstance(match, str) else match(name, parameter)
