"""Memory, communication and time of a training step, on devices that need not exist."""

from replicax._public import publish as _publish
from replicax.planning._collectives import Collective, Origin
from replicax.planning._estimate import Estimate
from replicax.planning._plan import Memory, Plan, PlannedVariable, Scaling
from replicax.planning._planner import plan, scaling

__all__ = [
    "Collective",
    "Estimate",
    "Memory",
    "Origin",
    "Plan",
    "PlannedVariable",
    "Scaling",
    "plan",
    "scaling",
]

_publish(globals())
