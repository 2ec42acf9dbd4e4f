"""Saving and ending when a machine is about to be taken away."""

from replicax.termination._config import TerminationConfig
from replicax.termination._handler import PreemptionCheckpointHandler

__all__ = ["PreemptionCheckpointHandler", "TerminationConfig"]
