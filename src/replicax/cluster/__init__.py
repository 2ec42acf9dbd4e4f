"""The processes that work together, and the ways in which they learn of each other."""

from replicax.cluster._link import Exchange
from replicax.cluster._members import Members
from replicax.cluster._progress import Progress, is_users
from replicax.cluster._session import Session, current, join, session
from replicax.cluster._spec import ClusterSpec
from replicax.cluster.resolvers._resolver import ClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "Exchange",
    "Members",
    "Progress",
    "Session",
    "current",
    "is_users",
    "join",
    "session",
]
