"""Faces for programs that were written for older interfaces."""

from replicax.compat import v1

__all__ = ["v1"]
