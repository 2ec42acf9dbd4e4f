"""Train an embedding table of a million rows on parameter servers, of which a step needs few.

    pip install 'replicax[ray]'
    python examples/large_embedding.py
    python examples/large_embedding.py --workers 4 --servers 2 --rows 10000000

Each row of the table stands for an item, and learns how much it is liked. A step fetches the rows
of its batch only, and sends back what is to be added to these. Here Ray starts the workers and the
servers on this machine; with `rx.cluster_resolver.RayClusterResolver(workers, servers,
address="...")` they are on the machines of a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

WIDTH, BATCH, RATE = 16, 256, 0.5


def taste_of(items: np.ndarray) -> np.ndarray:
    """Return how much an item is liked, which the table must find out."""
    return np.sin(items.astype(np.float32))


def batches_of(rows: int, popular: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches without end; most people look at the same few items."""
    random = np.random.default_rng(seed)
    while True:
        items = random.integers(0, popular, BATCH) * (rows // popular)
        yield {"items": items.astype(np.int32), "likes": taste_of(items)}


def dataset_of(rows: int, popular: int) -> Callable[[], object]:
    """Return the function that makes the dataset of a worker."""

    def dataset() -> object:
        worker = rx.coordinator.experimental_get_current_worker_index()
        return lambda: batches_of(rows, popular, seed=int(worker))

    return dataset


def train(workers: int, servers: int, rows: int, popular: int, steps: int) -> list[float]:
    """Train, and return the mean losses of tenths of the steps."""
    strategy = rx.ParameterServerStrategy(
        rx.cluster_resolver.RayClusterResolver(num_workers=workers, num_ps=servers),
        variable_partitioner=rx.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=1 << 20, max_shards=servers
        ),
    )
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = rx.Variable(np.zeros((rows, WIDTH), np.float32), name="table")
        weight = rx.Variable(np.full(WIDTH, 0.25, np.float32), name="weight")

    def loss_fn(found: jax.Array, weight: jax.Array, likes: jax.Array) -> jax.Array:
        return jnp.mean((found @ weight - likes) ** 2)

    @rx.function
    def step(iterator: Iterator[dict[str, jax.Array]]) -> jax.Array:
        batch = next(iterator)
        found = rx.embedding_lookup(table, batch["items"])  # these rows only
        loss, (of_rows, of_weight) = jax.value_and_grad(loss_fn, argnums=(0, 1))(
            found, weight.value, batch["likes"]
        )
        # Where an item occurs twice, both of its gradients count.
        table.scatter_sub(rx.IndexedSlices(RATE * BATCH / 16 * of_rows, batch["items"]))
        weight.assign_sub(0.01 * of_weight)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(dataset_of(rows, popular)))
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
    values = np.asarray(coordinator.fetch(losses))
    assert isinstance(table, rx.parts.ServerVariable)
    parts = [part.shape[0] for part in table.variables]
    click.echo(f"The table has {rows} rows, in parts of {parts} on {servers} servers.")
    return [float(each.mean()) for each in np.array_split(values, 10)]


@click.command()
@click.option("--workers", default=2, show_default=True)
@click.option("--servers", default=2, show_default=True)
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--popular", default=2_000, show_default=True, help="The items that are looked at.")
@click.option("--steps", default=600, show_default=True)
def main(workers: int, servers: int, rows: int, popular: int, steps: int) -> None:
    """Train a large embedding table on parameter servers."""
    for tenth, loss in enumerate(train(workers, servers, rows, popular, steps)):
        click.echo(f"steps to {(tenth + 1) * steps // 10:4}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
