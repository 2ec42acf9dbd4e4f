"""Starting the workers of a cluster on this machine, and stopping them together.

The launcher speaks to workers only through the environment: `TF_CONFIG`, and the number of logical
devices. A worker cannot tell a launched run from one that was started by hand.
"""

from replicax.launch._environment import environments, free_ports
from replicax.launch._gang import Gang, Outcome, Patience
from replicax.launch._launcher import launch

__all__ = ["Gang", "Outcome", "Patience", "environments", "free_ports", "launch"]
