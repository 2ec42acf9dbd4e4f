"""The examples of the reference pages with datasets, translated.

`tf.data.Dataset` becomes Grain where the page makes up its data, and stays where it reads TFRecord
files. `...` in the pages is filled in with sums.
"""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import record_dataset
from support import equal

import replicax as rx

# The pages leave it to the library how workers share a dataset.
pytestmark = pytest.mark.filterwarnings("ignore:.* workers share this dataset by rows")

GLOBAL_BATCH_SIZE = 4


@pytest.fixture
def strategy(mirrored_strategy):
    return mirrored_strategy


@pytest.fixture(params=[lambda f: f, rx.function], ids=["eager", "compiled"])
def function(request):
    return request.param


def numbers(count):
    return grain.MapDataset.source(np.arange(count, dtype=np.float32))


# Strategy (page 002).


@pytest.mark.parametrize("rows", [8, 10])
def test_the_custom_training_loop(strategy, function, rows):
    my_strategy, dataset, epochs = strategy, numbers(rows).batch(GLOBAL_BATCH_SIZE), 3
    with my_strategy.scope():

        @function
        def distribute_train_epoch(dataset):
            def replica_fn(input):
                return jnp.sum(input)

            total_result = 0
            for x in dataset:
                per_replica_result = my_strategy.run(replica_fn, args=(x,))
                total_result += my_strategy.reduce(rx.ReduceOp.SUM, per_replica_result, axis=None)
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
        for _ in range(epochs):
            train_result = distribute_train_epoch(dist_dataset)
            equal(train_result, np.arange(rows).sum())


def check_totals(strategy, totals):
    """The sums of the rows of each step, in the order of the files unless workers share them."""
    if strategy.topology.spans_processes:
        equal(np.sum(totals), np.arange(16.0).sum())
    else:
        equal(totals, np.arange(16.0).reshape(4, 4).sum(1))


def test_distribute_a_dataset_of_record_files(strategy, function, tmp_path):
    dataset = record_dataset(tmp_path)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    replica_fn = function(jnp.sum)
    totals = []
    for x in dist_dataset:
        totals.append(strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None))
    check_totals(strategy, totals)


def test_the_element_spec_as_input_signature(strategy, tmp_path):
    dist_dataset = strategy.experimental_distribute_dataset(record_dataset(tmp_path))

    @rx.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        return jnp.sum(inputs)

    totals = [
        strategy.reduce("SUM", strategy.run(train_step, args=(x,)), axis=None) for x in dist_dataset
    ]
    check_totals(strategy, totals)


@pytest.mark.parametrize(
    "name",
    ["distribute_datasets_from_function", "experimental_distribute_datasets_from_function"],
)
def test_distribute_datasets_from_a_function(strategy, name):
    # The page's 8. With more than 4 replicas more: Grain cannot slice endless batches of one row.
    global_batch_size = max(8, 2 * strategy.num_replicas_in_sync)

    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = grain.MapDataset.source([np.float32([1.0])]).repeat().batch(batch_size)
        return d[input_context.input_pipeline_id :: input_context.num_input_pipelines]

    ds = getattr(strategy, name)(dataset_fn)

    def train(ds):
        @rx.function(input_signature=[ds.element_spec])
        def step_fn(inputs):
            return inputs

        results = []
        for batch in ds:
            results.append(strategy.run(step_fn, args=(batch,)))
            if len(results) == 3:  # the dataset never ends
                break
        return results

    for replica_results in train(ds):
        equal(strategy.gather(replica_results, axis=0), np.ones((global_batch_size, 1)))


def test_make_a_numpy_dataset(strategy):
    numpy_input = np.ones([10], dtype=np.float32)
    with pytest.warns(DeprecationWarning, match="experimental_make_numpy_dataset"):
        dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dataset = dataset.batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    totals = [strategy.reduce("SUM", x, axis=0) for x in dist_dataset]
    equal(totals, [2.0] * 5)


def test_reduce_of_a_last_partial_batch(function):
    """A global batch of 8 over 2 replicas; the last one has 6 rows, of which replica 1 gets 2.

    That division is the page's; TensorFlow 2.21 gives each replica 3, as we do by default.
    """
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    options = rx.InputOptions(partial_batches="in_order")
    dataset = strategy.experimental_distribute_dataset(numbers(14).batch(8), options)
    mean = function(lambda x: strategy.reduce("MEAN", x, axis=0))
    full, partial = dataset
    equal(mean(full), np.arange(8).mean())
    assert [np.asarray(part).tolist() for part in partial.values] == [[8, 9, 10, 11], [12, 13]]
    equal(mean(partial), np.arange(8, 14).mean())
    # What the page warns of: a mean of means counts the rows of replica 1 double.
    means = strategy.run(jnp.mean, args=(partial,))
    equal(strategy.reduce("MEAN", means, axis=None), (9.5 + 12.5) / 2)


# MultiWorkerMirroredStrategy (page 003).


def test_your_own_training_loop(strategy, function):
    random = np.random.RandomState(0)
    x = random.random((2, 5)).astype(np.float32)
    y = random.randint(2, size=(2, 1))

    def dataset_fn(ctx):
        dataset = rx.from_tensor_slices((x, y))
        return dataset.repeat().batch(1, drop_remainder=True)

    replicas = strategy.num_replicas_in_sync
    dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    with strategy.scope():
        model = rx.Variable(np.zeros((5, 2), np.float32))
        optimizer = rx.Optimizer(optax.sgd(0.1))

    def loss_of(features, labels, weights=model):
        losses = optax.softmax_cross_entropy_with_integer_labels(features @ weights, labels[:, 0])
        return jnp.sum(losses) / replicas

    @function
    def train_step(iterator):
        def step_fn(inputs):
            features, labels = inputs

            loss, grads = rx.value_and_grad(loss_of, [model])(features, labels)
            optimizer.apply_gradients(zip(grads, [model], strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(step_fn, args=(next(iterator),)), axis=None)

    iterator = iter(dist_dataset)
    losses = [float(train_step(iterator)) for _ in range(6)]
    iterator.close()
    weights, expected = jnp.zeros((5, 2)), []
    local = len(strategy.topology.local_replicas)  # every worker reads for its own ones
    for step in range(6):
        rows = [(step * local + replica % local) % 2 for replica in range(replicas)]
        loss, gradient = jax.value_and_grad(loss_of, argnums=2)(x[rows], y[rows], weights)
        weights -= 0.1 * gradient
        expected.append(loss)
    equal(losses, expected, 1e-5)
    equal(model.numpy(), weights, 1e-5)
