"""Saving and exiting when a machine is about to be preempted."""

from replicax.termination._config import TerminationConfig
from replicax.termination._handler import PreemptionCheckpointHandler

__all__ = ["PreemptionCheckpointHandler", "TerminationConfig"]
