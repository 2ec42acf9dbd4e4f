"""The environment variables by which a resolver is found, and those that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from replicax.cluster._spec import as_index, shown
from replicax.errors import ClusterError


@final
@dataclass(frozen=True, slots=True)
class Signs:
    """The variables by which an environment is recognised.

    Args:
      variables: All of these must be set; none for a resolver that must be given to a strategy.
      names_come_later: Whether the names of workers resolve only once the workers have started.
      to_look: Arguments with which the resolver only looks, and changes nothing.
    """

    variables: tuple[str, ...] = ()
    names_come_later: bool = False
    to_look: Mapping[str, object] = field(default_factory=dict)

    @property
    def present(self) -> list[str]:
        return [name for name in self.variables if name in os.environ]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.variables if name not in os.environ]


def required(*names: str, advice: str) -> str:
    """Return the first of these variables that is set.

    Args:
      names: Variables that mean the same, in order of preference.
      advice: What to do if none is set, as a sentence.
    """
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    raise ClusterError(
        f"The environment variable {' or '.join(names)} is needed to find the cluster; it is not "
        f"set. {advice}"
    )


def required_number(*names: str, advice: str) -> int:
    """Return the value of the first variable set, a number, 0 or more; see `required`."""
    text = required(*names, advice=advice)
    number = as_index(text)
    if number is None:
        raise ClusterError(
            f"The environment variable {' or '.join(names)} is a number, 0 or more; got "
            f"{shown(text)}. {advice}"
        )
    return number
