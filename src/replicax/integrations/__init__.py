"""Bridges to other libraries; nothing else in replicax imports them."""

from replicax import checkpoint
from replicax.integrations._flax_checkpoint import NNX
from replicax.integrations._keras_checkpoint import KERAS

for _handler in (NNX, KERAS):
    checkpoint.register(_handler)
