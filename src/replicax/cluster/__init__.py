"""Which processes work together, and how they learn of each other."""

from replicax.cluster._members import Members
from replicax.cluster._progress import Progress, is_users
from replicax.cluster._session import Session, current, join, session
from replicax.cluster._spec import ClusterSpec
from replicax.cluster.resolvers import (
    ClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "Members",
    "Progress",
    "Session",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
    "current",
    "is_users",
    "join",
    "session",
]
