"""Interfaces for programs that were written for older APIs."""

from replicax.compat import v1

__all__ = ["v1"]
