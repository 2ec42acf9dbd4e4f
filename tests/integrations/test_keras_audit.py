"""`rx.audit` of steps with Keras objects, whose state is put back after the eager run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from keras_models import LABELS, TABLE, dropout, keras

import replicax as rx

X, Y = TABLE[:12], LABELS[:12].astype(np.int32)


def trained(strategy, audited):
    """The weights, slots, metric and seeds after two steps."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer = dropout(), keras.optimizers.Adam(0.1)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(reduction="none")

    def replica_step(x, y):
        def loss():
            scores = model(x, training=True)
            return jnp.sum(cross_entropy(y, scores)), scores

        variables = model.trainable_variables
        (value, scores), gradients = rx.value_and_grad(loss, variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        accuracy.update_state(y, scores)
        return value

    step = rx.function(lambda batch: strategy.run(replica_step, args=batch))
    by_rows = rx.InputOptions(auto_shard_policy="DATA")
    for batch in strategy.experimental_distribute_dataset([(X, Y)] * 2, by_rows):
        if audited:
            report = rx.audit(step, batch)
            assert report.ok, str(report)
            assert report.compared > 10
        else:
            step(batch)
    everything = [*model.variables, *optimizer.variables, *accuracy.variables]
    return [np.asarray(variable.value) for variable in everything]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_with_dropout_slots_and_a_metric(replicas):
    strategy = rx.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    np.testing.assert_equal(trained(strategy, True), trained(strategy, False))
