"""The tutorial "Distributed input" as a replicax program.

    python examples/ports/input.py --replicas 2
    replicax launch --workers 2 examples/ports/input.py    # the same losses

In an environment with replicax[demo]. A softmax regression learns scanned digits; each epoch gets
its batches in another way. docs/ports/input.md has it beside the TensorFlow program.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import grain
import jax
import jax.numpy as jnp
import optax
from starting_point import digits, initial_weights, record

import replicax as rx

GLOBAL_BATCH = 64
Batch = tuple[rx.PerReplica, rx.PerReplica]


def show(way: str, losses: list[float]) -> list[float]:
    """Print how an epoch went."""
    rx.print(f"{way}: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


@click.command()
@click.option("--replicas", type=int, help="Use so many virtual devices of this process alone.")
@click.option("--losses", "path", help="A file to write the losses of all steps to, as JSON.")
def main(replicas: int | None, path: str | None) -> None:
    """Train for five epochs, each with another way to go through the data."""
    if replicas is None:  # what the launcher, or TF_CONFIG, says
        strategy = rx.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    learn, test = ((images.reshape(-1, 64), labels) for images, labels in digits())

    with strategy.scope():
        weights = {
            name: rx.Variable(value, name=name)
            for name, value in initial_weights({"output": (64, 10)}).items()
        }
        optimizer = rx.Optimizer(optax.sgd(0.5))
    variables = list(weights.values())

    def logits_of(images: jax.Array) -> jax.Array:
        return images @ weights["output_kernel"] + weights["output_bias"]

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        """Take a step with the rows that this replica has, which may be none."""

        def loss_fn() -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(images), labels)
            return rx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

        loss, gradients = rx.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def step(batch: Batch) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    # One dataset of global batches, which the strategy divides. Workers read all of it, and keep
    # their replicas' rows; the last batch has 29.
    options = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    batches = rx.from_tensor_slices(learn).batch(GLOBAL_BATCH)
    dataset = strategy.experimental_distribute_dataset(batches, options)
    images, labels = dataset.element_spec
    rx.print(f"A replica's full share: images {images.shape}, labels {labels.shape}")

    # 1. A loop in Python. The signature is that of a full share; the last, smaller one passes.
    with_signature = rx.function(step, input_signature=[dataset.element_spec])
    by_loop = show("for", [float(with_signature(batch)) for batch in dataset])

    # 2. A function that takes its batches itself.
    @rx.function
    def step_from(iterator: rx.DistributedIterator) -> jax.Array:
        return step(next(iterator))

    def until_exhausted(iterator: rx.DistributedIterator) -> Iterator[float]:
        while True:
            try:
                loss = step_from(iterator)
            except StopIteration:
                return
            yield float(loss)

    by_next = show("next in a function", list(until_exhausted(iter(dataset))))

    # 3. Asking whether there is one more.
    compiled, iterator, by_optional = rx.function(step), iter(dataset), []
    while (optional := iterator.get_next_as_optional()).has_value():
        by_optional.append(float(compiled(optional.get_value())))
    show("get_next_as_optional", by_optional)

    # 4. A dataset per worker, with batches for one replica: the function takes the worker's rows.
    def rows_of_worker(context: rx.InputContext) -> grain.MapDataset:
        mine = rx.from_tensor_slices(learn).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return mine.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))

    of_workers = strategy.distribute_datasets_from_function(rows_of_worker)
    by_function = show("from a function", [float(compiled(batch)) for batch in of_workers])

    # 5. The loop in a function.
    @rx.function
    def epoch(dataset: rx.DistributedDataset) -> jax.Array | float:
        total, steps = 0.0, 0
        for batch in dataset:
            total += step(batch)
            steps += 1
        return total / steps

    mean = float(epoch(dataset))
    rx.print(f"for in a function: mean loss {mean:.4f}")

    # No dataset at all: a value for each replica.
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(
            array[context.replica_id_in_sync_group :: context.num_replicas_in_sync]
            for array in test
        )
    )
    hits = strategy.run(lambda x, y: jnp.argmax(logits_of(x), -1) == y, args=shares)
    accuracy = float(strategy.reduce("MEAN", hits, axis=0))
    rx.print(f"Test accuracy on {len(test[1])} unseen digits: {accuracy:.4f}")
    if path is not None and rx.is_first_worker():
        loss = [*by_loop, *by_next, *by_optional, *by_function]
        curves = {"loss": loss, "mean_loss_of_last_epoch": [mean], "test_accuracy": [accuracy]}
        record(path, f"replicax {rx.__version__}, JAX {jax.__version__}", curves)


if __name__ == "__main__":
    main()
