"""Compiled programs that are kept from one start of a program to the next."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from replicax.errors import InvalidArgument


def compilation_cache(directory: str | os.PathLike[str] | None) -> None:
    """Keep compiled programs in a directory, where later starts of the program find them.

    This sets up JAX's persistent compilation cache for all programs, however fast they compile.

    Args:
      directory: Created if it does not exist; may be shared with other programs. None keeps nothing
        from now on.
    """
    path = None if directory is None else Path(directory).expanduser().absolute()
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"`directory` of `compilation_cache` must be a directory, or be possible to "
                f"create; got {str(path)!r}: {error.strerror}."
            ) from error
    jax.config.update("jax_compilation_cache_dir", None if path is None else str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    reset_cache()  # JAX decides at the first compilation whether there is a cache, and where
