"""What a training step needs on devices that need not be there: memory, communication, time."""

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
