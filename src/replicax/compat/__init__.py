"""Interfaces for programs that were written for older ones."""

from replicax.compat import v1

__all__ = ["v1"]
