"""How a process learns of its cluster and of its own place in it; one environment a file."""

from replicax.cluster.resolvers._kubernetes import KubernetesClusterResolver
from replicax.cluster.resolvers._resolver import ClusterResolver
from replicax.cluster.resolvers._simple import SimpleClusterResolver
from replicax.cluster.resolvers._slurm import SlurmClusterResolver
from replicax.cluster.resolvers._tf_config import TFConfigClusterResolver
from replicax.cluster.resolvers._union import UnionResolver

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
