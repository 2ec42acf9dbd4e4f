"""`rx.cluster_resolver`: how a process learns of its cluster and of its own place in it."""

from replicax._public import publish as _publish
from replicax.cluster.resolvers._ray import RayClusterResolver as RayClusterResolver
from replicax.cluster.resolvers._resolver import ClusterResolver as ClusterResolver
from replicax.cluster.resolvers._simple import SimpleClusterResolver as SimpleClusterResolver
from replicax.cluster.resolvers._union import UnionResolver as UnionResolver

# Environments in the order in which strategies that are given no resolver, and `replicax doctor`,
# look for them (`_environments.py`). A line here makes one public and gives it a place.
# isort: off
# fmt: off
from replicax.cluster.resolvers._tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from replicax.cluster.resolvers._slurm import SlurmClusterResolver as SlurmClusterResolver
from replicax.cluster.resolvers._kubernetes import KubernetesClusterResolver as KubernetesClusterResolver  # noqa: E501 (one line each)
from replicax.cluster.resolvers._tpu import TPUClusterResolver as TPUClusterResolver
# fmt: on
# isort: on

UnionClusterResolver = UnionResolver

_publish(globals())
