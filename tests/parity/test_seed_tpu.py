"""The examples of the reference page 002 with TPUs and logical devices, on virtual CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import equal

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")


def strategy_of(computation_shape, num_replicas):
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=computation_shape, num_replicas=num_replicas
    )
    return rx.TPUStrategy(resolver, experimental_device_assignment=device_assignment)


def images_and_labels(strategy):
    """An iterator over two batches of eight images."""
    images = np.asarray(jax.random.normal(jax.random.key(0), (16, 8, 16, 3)))
    labels = np.arange(16, dtype=np.int32) % 4
    dataset = rx.from_tensor_slices((images, labels)).batch(8)
    return iter(strategy.experimental_distribute_dataset(dataset)), images, labels


KERNEL = np.asarray(jax.random.normal(jax.random.key(1), (3, 3, 3, 4)) * 0.3)


def model(images):
    """A small convolutional network."""
    features = jax.lax.conv_general_dilated(
        images, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.relu(features), axis=(1, 2))


def loss_fn(labels, output):
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(output), labels[:, None], axis=1))


def test_assign_to_a_logical_device():
    # Initializing TPU system with 2 logical devices and 4 replicas.
    strategy = strategy_of([1, 1, 1, 2], 4)
    assert strategy.num_replicas_in_sync == 4
    assert strategy.topology.logical_devices_per_replica == 2
    iterator = iter(strategy.experimental_distribute_dataset([np.arange(8, dtype=np.float32)]))

    def step_fn(inputs):
        output = jnp.add(inputs, inputs)
        # Add operation will be executed on logical device 0.
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step_fn, args=(next(iterator),))
    equal(strategy.gather(result, axis=0), 2 * np.arange(8))
    with pytest.raises(ValueError, match="from 0 to 1; got 2"):
        strategy.run(lambda: strategy.experimental_assign_to_logical_device(jnp.ones(2), 2))


def test_split_to_logical_devices():
    # Initializing TPU system with 8 logical devices and 1 replica.
    strategy = strategy_of([1, 2, 2, 2], 1)
    assert strategy.topology.logical_devices_per_replica == 8
    iterator, images, _ = images_and_labels(strategy)
    split = []

    def step_fn(inputs):
        inputs, _ = inputs
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        # model() function will be executed on 8 logical devices with `inputs` split 2 * 4 ways.
        output = model(inputs)
        return inputs, output

    for batch in np.split(images, 2):
        inputs, output = strategy.run(step_fn, args=(next(iterator),))
        equal(output, model(batch), 1e-5)
        equal(inputs, batch)
        split.append(inputs.sharding.shard_shape(inputs.shape))
    assert split == [(8, 4, 4, 3)] * 2
    iterator.close()


def test_replicate_to_logical_devices():
    """The page has 2 logical devices and splits by 8, which is refused; so 8 of them here."""
    pairs = strategy_of([1, 1, 1, 2], 4)
    with pytest.raises(ValueError, match=r"which is 2; got \[1, 2, 4, 1\]"):
        pairs.experimental_split_to_logical_devices(jnp.ones((2, 8, 16, 3)), [1, 2, 4, 1])
    strategy = strategy_of([1, 2, 2, 2], 1)
    iterator, images, labels = images_and_labels(strategy)

    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])
        # model() function will be executed on 8 logical devices with `inputs` split 2 * 4 ways.
        output = model(images)
        # For loss calculation, all logical devices share the same logits and labels.
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return loss_fn(labels, output)

    loss = strategy.run(step_fn, args=(next(iterator),))
    equal(loss, loss_fn(labels[:8], model(images[:8])), 1e-4)
    iterator.close()


def test_four_replicas_of_two_train_on_images_divided_in_two():
    strategy = strategy_of([1, 1, 1, 2], 4)
    iterator, images, labels = images_and_labels(strategy)
    with strategy.scope():
        kernel = rx.Variable(KERNEL, aggregation="SUM")

    def apply(kernel, images):
        features = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jax.nn.relu(features), axis=(1, 2))

    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        loss, gradient = rx.value_and_grad(
            lambda: loss_fn(labels, apply(kernel.value, images)) / 8, kernel
        )()
        kernel.assign_sub(0.1 * gradient)  # the replicas' gradients are summed
        return loss

    losses = [
        float(strategy.reduce("SUM", strategy.run(step_fn, args=(next(iterator),)), axis=None))
        for _ in range(2)
    ]
    expected, value = [], KERNEL
    for x, y in zip(np.split(images, 2), np.split(labels, 2), strict=True):
        loss, gradient = jax.value_and_grad(lambda k, x=x, y=y: loss_fn(y, apply(k, x)) / 8)(value)
        expected.append(float(loss))
        value = value - 0.1 * gradient
    equal(losses, expected, 1e-5)
    equal(kernel, value, 1e-5)
    iterator.close()
