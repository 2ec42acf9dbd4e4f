"""Rows of tables, such as embeddings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax._describing import described
from replicax.errors import InvalidType
from replicax.variables._variable import Variable


def embedding_lookup(params: Any, ids: Any) -> jax.Array:
    """Return the rows of a table: `params[ids]`.

    Under a `ParameterServerStrategy` only these rows come from the servers. They must be looked up
    outside of functions that are differentiated; see docs/parameter_servers.md.

    Args:
      params: A variable or an array.
      ids: The numbers of the rows, an array of any shape.

    >>> import replicax as rx
    >>> table = rx.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> rx.embedding_lookup(table, [2, 0]).tolist()
    [[5.0, 6.0], [1.0, 2.0]]
    """
    if isinstance(params, Variable):
        return params.sparse_read(ids)
    if not isinstance(params, jax.Array):
        raise InvalidType(
            f"`embedding_lookup` takes a variable or an array; got {described(params)}."
        )
    return params[jnp.asarray(ids)]
