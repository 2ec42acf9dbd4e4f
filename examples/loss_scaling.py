"""Mixed precision by hand: gradients in float16, with a loss scale that adapts itself.

    python examples/loss_scaling.py

Small gradients vanish in float16, so the loss is multiplied by a scale before it is
differentiated. Where that makes gradients overflow on any replica, the step is skipped on all of
them and the scale is halved; after some good steps it is doubled. Skipping means that
`apply_gradients` is called inside `lax.cond`, in one compiled program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

STEPS, GROW_EVERY, GLOBAL_BATCH = 60, 10, 32


def main() -> tuple[float, list[float]]:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    random = np.random.default_rng(0)
    features = random.normal(size=(GLOBAL_BATCH, 4)).astype(np.float32)
    labels = features @ np.array([[1], [-2], [3], [0.5]], np.float32)

    with strategy.scope():
        weights = rx.Variable(np.zeros((4, 1), np.float32), name="weights")
        scale = rx.Variable(2.0**20, trainable=False, name="scale")  # too large: it will adapt
        good_steps = rx.Variable(0, trainable=False, name="good_steps")
        optimizer = rx.Optimizer(optax.sgd(0.1))

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        context = rx.get_replica_context()

        def scaled_loss() -> tuple[jax.Array, jax.Array]:
            half = weights.value.astype(jnp.float16)
            errors = (x.astype(jnp.float16) @ half).astype(jnp.float32) - y
            loss = jnp.sum(errors**2) / GLOBAL_BATCH
            return loss * scale, loss

        (_, loss), gradient = rx.value_and_grad(scaled_loss, weights, has_aux=True)()
        half_gradient = gradient.astype(jnp.float16)  # what would travel over the wire
        finite = jnp.all(jnp.isfinite(half_gradient)).astype(jnp.int32)
        everywhere = context.all_reduce("SUM", finite) == context.num_replicas_in_sync

        def apply() -> int:
            unscaled = half_gradient.astype(jnp.float32) / scale
            optimizer.apply_gradients([(unscaled, weights)])

            def count(strategy: rx.Strategy) -> None:
                grow = (good_steps + 1) % GROW_EVERY == 0
                scale.assign(jnp.where(grow, scale * 2, scale.value))
                good_steps.assign_add(1)

            context.merge_call(count)
            return 0

        def skip() -> int:
            def shrink(strategy: rx.Strategy) -> None:
                scale.assign(scale / 2)
                good_steps.assign(0)

            context.merge_call(shrink)
            return 0

        jax.lax.cond(everywhere, apply, skip)
        return loss

    @rx.function
    def train_step(x: rx.PerReplica, y: rx.PerReplica) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    pipeline = rx.from_tensor_slices((features, labels)).batch(GLOBAL_BATCH).repeat(STEPS)
    loss, scales = float("inf"), []
    for step, (x, y) in enumerate(strategy.experimental_distribute_dataset(pipeline)):
        loss = float(train_step(x, y))
        scales.append(float(scale))
        if step % 10 == 9:
            applied = int(optimizer.iterations)
            print(f"step {step + 1}: loss {loss:.5f}, scale {scales[-1]:.0f}, applied {applied}")
    return loss, scales


if __name__ == "__main__":
    main()
