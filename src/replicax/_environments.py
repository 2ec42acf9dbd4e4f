"""The environments in which a cluster is looked for, and the resolver of this process."""

from __future__ import annotations

from replicax import cluster_resolver
from replicax.cluster_resolver import ClusterResolver, TFConfigClusterResolver

# They are in the order of the imports in `cluster_resolver`. Resolvers without signs cannot be
# detected, so callers must pass them.
ENVIRONMENTS: tuple[type[ClusterResolver], ...] = tuple(
    thing
    for thing in vars(cluster_resolver).values()
    if isinstance(thing, type) and issubclass(thing, ClusterResolver) and thing._signs.variables
)


def default_resolver() -> ClusterResolver:
    """Return the resolver of the first environment detected, or one that finds no cluster."""
    here = (environment for environment in ENVIRONMENTS if not environment._signs.missing)
    return next(here, TFConfigClusterResolver)()
