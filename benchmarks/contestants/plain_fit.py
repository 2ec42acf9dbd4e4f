"""Keras by itself, on JAX: `fit` on one device, without a distribution."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
from _keras import model_of, serve_fit
from jax_shard_map import use_cpus

if __name__ == "__main__":
    use_cpus(1)
    serve_fit(model_of, {"jax": jax.__version__})
