"""The environments in which a cluster is looked for, and the resolver of this process."""

from __future__ import annotations

from replicax import cluster_resolver
from replicax.cluster_resolver import ClusterResolver, TFConfigClusterResolver

# In the order of the imports of `cluster_resolver`. Resolvers without signs must be given.
ENVIRONMENTS: tuple[type[ClusterResolver], ...] = tuple(
    thing
    for thing in vars(cluster_resolver).values()
    if isinstance(thing, type) and issubclass(thing, ClusterResolver) and thing._signs.variables
)


def default_resolver() -> ClusterResolver:
    """Return the resolver of the first environment that is here; else one that finds no cluster."""
    here = (environment for environment in ENVIRONMENTS if not environment._signs.missing)
    return next(here, TFConfigClusterResolver)()
