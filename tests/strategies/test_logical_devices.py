"""Replicas of several logical devices: the same values, divided over the devices as asked."""

import math
import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica, shares

import replicax as rx

pytestmark = pytest.mark.one_process  # several have tests/multiprocess/test_logical_devices.py

SHAPES = [(4, 2), (2, 4), (1, 8), (2, 3), (2, 1)]


def make(replicas, devices):
    cpus = [f"CPU:{index}" for index in range(replicas * devices)]
    return rx.MirroredStrategy(cpus, logical_devices_per_replica=devices)


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]} of {shape[1]}")
def strategy(request):
    return make(*request.param)


@pytest.fixture(params=[lambda f: f, rx.function], ids=["eager", "compiled"])
def wrap(request):
    return request.param


def shards_of(array):
    """The shape of what one device has."""
    return array.sharding.shard_shape(array.shape)


# The three methods.


def test_split_keeps_the_values_and_divides_them(strategy, wrap):
    count = strategy.topology.logical_devices_per_replica
    rows = np.arange(strategy.num_replicas_in_sync * 2 * 24, dtype=np.float32).reshape(-1, 24)

    def step_fn(x):
        x = strategy.experimental_split_to_logical_devices(x, [1, count])
        return x * 2

    result = strategy.run(wrap(step_fn), args=(shares(strategy, rows),))
    components_equal(strategy, result, np.split(rows * 2, strategy.num_replicas_in_sync))
    for replica, component in enumerate(strategy.experimental_local_results(result)):
        assert component.devices() == set(strategy.topology.devices[replica])
        assert shards_of(component) == (2, 24 // count)


def test_replicate_brings_all_of_it_to_every_device(strategy, wrap):
    count = strategy.topology.logical_devices_per_replica
    rows = np.arange(strategy.num_replicas_in_sync * 24, dtype=np.float32)

    def step_fn(x):
        x = strategy.experimental_split_to_logical_devices(x, [count])
        return strategy.experimental_replicate_to_logical_devices(x + 1)

    result = strategy.run(wrap(step_fn), args=(shares(strategy, rows),))
    components_equal(strategy, result, np.split(rows + 1, strategy.num_replicas_in_sync))
    for component in strategy.experimental_local_results(result):
        assert shards_of(component) == (24,)


def test_assign_keeps_the_value(strategy, wrap):
    last = strategy.topology.logical_devices_per_replica - 1

    def step_fn(x):
        return strategy.experimental_assign_to_logical_device(x + x, last)

    values = np.arange(strategy.num_replicas_in_sync, dtype=np.float32)
    result = strategy.run(wrap(step_fn), args=(per_replica(strategy, list(values)),))
    components_equal(strategy, result, list(2 * values))


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ([2], r"one number for each dimension; got \[2\] for a tensor of shape \(4, 6\)"),
        ([1, 2, 1], r"one number for each dimension"),
        ([2, 2], r"number of logical devices of a replica, which is 2; got \[2, 2\]"),
        ([1, 1], r"which is 2; got \[1, 1\]"),
        ([0, 2], r"whole numbers"),
        ([1.0, 2.0], r"whole numbers"),
        (2, r"whole numbers.*got 2"),
    ],
)
def test_splits_that_make_no_sense(wrap, dimensions, words):
    strategy = make(2, 2)

    def step_fn(x):
        return strategy.experimental_split_to_logical_devices(x, dimensions)

    with pytest.raises(ValueError, match=words):
        strategy.run(wrap(step_fn), args=(jnp.ones((4, 6)),))


def test_a_size_that_does_not_divide(wrap):
    strategy = make(2, 4)

    def step_fn(x):
        return strategy.experimental_split_to_logical_devices(x, [1, 4])

    with pytest.raises(ValueError, match=r"\(4, 6\).*\[1, 4\]: 6 is not divisible by 4"):
        strategy.run(wrap(step_fn), args=(jnp.ones((4, 6)),))


@pytest.mark.parametrize("number", [-1, 2, 1.0, "0"])
def test_a_logical_device_that_is_not_there(wrap, number):
    strategy = make(2, 2)

    def step_fn(x):
        return strategy.experimental_assign_to_logical_device(x, number)

    with pytest.raises(ValueError, match=r"2 logical device\(s\).*from 0 to 1; got"):
        strategy.run(wrap(step_fn), args=(1.0,))


def test_replicas_of_one_device_have_one_logical_device(two, wrap):
    def step_fn(x):
        x = two.experimental_split_to_logical_devices(x, [1, 1])
        x = two.experimental_assign_to_logical_device(x, 0)
        return two.experimental_replicate_to_logical_devices(x)

    result = two.run(wrap(step_fn), args=(np.ones((2, 2), np.float32),))
    components_equal(two, result, [np.ones((2, 2))] * 2)
    with pytest.raises(ValueError, match="which is 1"):
        two.run(lambda: two.experimental_split_to_logical_devices(jnp.ones(2), [2]))


@pytest.mark.parametrize("dimensions", [[6, 1], [1, 6], [2, 3], [3, 2]])
def test_any_way_to_divide_can_be_expressed(dimensions, wrap):
    strategy = make(1, 6)
    x = np.arange(36.0, dtype=np.float32).reshape(6, 6)

    def step_fn(x):
        return strategy.experimental_split_to_logical_devices(x, dimensions)

    result = strategy.run(wrap(step_fn), args=(x,))
    equal(result, x)
    assert shards_of(result) == (6 // dimensions[0], 6 // dimensions[1])


def test_outside_of_replicas_all_devices_are_meant(wrap):
    strategy = make(2, 2)

    def split(x):
        return strategy.experimental_split_to_logical_devices(x, [2, 1])

    with strategy.scope():
        result = wrap(split)(jnp.ones((4, 4)))
    equal(result, np.ones((4, 4)))


# Variables.


def test_a_variable_is_divided_and_stays_so(strategy, wrap):
    topology = strategy.topology
    count = topology.logical_devices_per_replica
    start = np.arange(2 * 24, dtype=np.float32).reshape(2, 24)
    with strategy.scope():
        with strategy.extended.partition([1, count]):
            weight = rx.Variable(start, aggregation="MEAN")
            made = rx.Variable(lambda: jnp.full((2, 24), 3.0))
        whole = rx.Variable(start)
    assert weight.partition == (1, count)
    assert whole.partition is None
    equal(weight, start)
    equal(made, np.full((2, 24), 3.0))

    def check(variable, expected):
        equal(variable, expected)
        for copy in variable.values:
            equal(copy, expected)
            assert shards_of(copy.value) == (2, 24 // count)

    check(weight, start)
    check(made, np.full((2, 24), 3.0))
    strategy.run(wrap(lambda: weight.assign_add(jnp.ones((2, 24)))))
    check(weight, start + 1)
    strategy.run(wrap(lambda: weight.assign(jnp.zeros((2, 24)))))
    check(weight, np.zeros((2, 24)))
    weight.assign(start)
    check(weight, start)
    weight.assign_sub(np.ones((2, 24), np.float32))
    check(weight, start - 1)
    strategy.extended.update(weight, lambda v, x: v.assign(x), args=(start,))
    check(weight, start)
    strategy.extended.update(weight, lambda v: v.assign_add(jnp.ones((2, 24))))
    check(weight, start + 1)


def test_the_initial_value_of_a_callable_is_made_in_parts():
    """On no device as a whole, and with the same random numbers as otherwise."""
    strategy = make(1, 4)
    seen = []

    def initial():
        value = jax.random.normal(jax.random.key(0), (8, 64))
        seen.append(value)
        return value

    with strategy.scope(), strategy.extended.partition([1, 4]):
        weight = rx.Variable(initial)
    assert len(seen) == 1
    assert isinstance(seen[0], jax.core.Tracer), "it is traced, and made by a program"
    equal(weight, jax.random.normal(jax.random.key(0), (8, 64)))
    assert shards_of(weight.value) == (8, 16)


def test_partitions_that_make_no_sense():
    strategy = make(2, 2)
    with strategy.scope():
        with pytest.raises(ValueError, match=r"which is 2; got \[3\]"):
            strategy.extended.partition([3]).__enter__()
        with strategy.extended.partition([2, 1]):
            with pytest.raises(ValueError, match="one number for each dimension"):
                rx.Variable(jnp.ones(4))
            assert rx.Variable(1.0).partition is None, "there is nothing to divide"
            with pytest.raises(ValueError, match="3 is not divisible by 2"):
                rx.Variable(jnp.ones((3, 2)))
            with pytest.raises(ValueError, match="ON_READ variable 'total' cannot be divided"):
                rx.Variable(jnp.ones((2, 2)), name="total", synchronization="ON_READ")


def test_variables_with_one_copy_need_replicas_of_one_device():
    class Mixed(rx.Strategy):
        def __init__(self):
            topology = rx.Topology.of(["CPU:0", "CPU:1"], logical_devices_per_replica=2)
            placement = rx.parts.OneDevicePlacement()
            super().__init__(rx.StrategyExtended(self, topology=topology, placement=placement))

    with Mixed().scope(), pytest.raises(ValueError, match="MirroredPlacement"):
        rx.Variable(1.0)


def test_the_state_of_an_optimizer_is_divided_like_its_variable(strategy, wrap):
    count = strategy.topology.logical_devices_per_replica
    start = np.ones((24, 2), np.float32)
    with strategy.scope():
        with strategy.extended.partition([count, 1]):
            weight = rx.Variable(start)
        bias = rx.Variable(np.zeros(2, np.float32))
        optimizer = rx.Optimizer(optax.adam(0.1))

    def step_fn(x):
        def loss_fn():
            return jnp.sum((x @ weight.value + bias.value) ** 2) / 8

        loss, gradients = rx.value_and_grad(loss_fn, [weight, bias])()
        optimizer.apply_gradients(zip(gradients, [weight, bias], strict=True))
        return loss

    rows = np.linspace(0, 1, 8 * 24, dtype=np.float32).reshape(8, 24)
    step = wrap(step_fn)
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=(shares(strategy, rows),)), axis=None))
        for _ in range(3)
    ]

    weights, state = (jnp.asarray(start), jnp.zeros(2)), None
    tx = optax.adam(0.1)
    state = tx.init(weights)
    expected = []
    for _ in range(3):
        loss, gradients = jax.value_and_grad(
            lambda weights: jnp.sum((rows @ weights[0] + weights[1]) ** 2) / 8
        )(weights)
        expected.append(float(loss))
        updates, state = tx.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
    equal(losses, expected, 1e-4)
    equal(weight, weights[0], 1e-4)
    equal(bias, weights[1], 1e-4)
    slots = [v for v in optimizer.variables if v.shape == (24, 2)]
    assert len(slots) == 2
    for variable in (weight, *slots):
        assert shards_of(variable.value) == (24 // count, 2)


def test_initial_values_that_cannot_be_traced():
    strategy = make(2, 2)

    def initial():
        scale = float(jnp.sum(jnp.ones(2)))
        return jnp.full((2, 4), scale)

    with strategy.scope(), strategy.extended.partition([1, 2]):
        weight = rx.Variable(initial)
    equal(weight, np.full((2, 4), 2.0))
    assert shards_of(weight.value) == (2, 2)


def test_an_optimizer_can_be_made_and_used_where_variables_are_divided(wrap):
    strategy = make(2, 2)
    with strategy.scope(), strategy.extended.partition([2]):
        weight = rx.Variable(np.ones(4, np.float32))
        optimizer = rx.Optimizer(optax.adam(0.1))

        def step():
            optimizer.apply_gradients([(jnp.ones(4), weight)])

        strategy.run(wrap(step))
    assert int(optimizer.iterations) == 1
    for variable in (weight, *(v for v in optimizer.variables if v.shape)):
        assert shards_of(variable.value) == (2,)


def test_whatever_an_update_assigns_the_layout_stays():
    """An array on the user's own mesh counts too."""
    strategy = make(2, 4)
    with strategy.scope():
        whole = rx.Variable(np.zeros(8, np.float32))
        with strategy.extended.partition([4]):
            divided = rx.Variable(np.zeros(8, np.float32))
    for variable, size in ((whole, 8), (divided, 2)):
        meshes = [jax.sharding.Mesh(np.array(d), ("x",)) for d in strategy.topology.devices]
        arrays = iter(
            jax.device_put(
                np.ones(8, np.float32),
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
            )
            for mesh in meshes
        )
        strategy.extended.update(variable, lambda v, arrays=arrays: v.assign(next(arrays)))
        variable.assign_add(np.ones(8, np.float32))
        strategy.run(rx.function(lambda v=variable: v.value + 1))
        equal(variable, np.full(8, 2.0))
        assert shards_of(variable.value) == (size,)


def test_updates_can_lay_out_values(wrap):
    strategy = make(2, 4)
    with strategy.scope(), strategy.extended.partition([4, 1]):
        weight = rx.Variable(lambda: jnp.ones((8, 4)))

    def change():
        strategy.extended.update(
            weight,
            lambda v, g: v.assign_sub(strategy.experimental_split_to_logical_devices(g, [4, 1])),
            args=(jnp.ones((8, 4)),),
        )

    with strategy.scope():
        wrap(change)()
    equal(weight, np.zeros((8, 4)))


def test_only_the_strategy_that_runs_can_lay_out_values(two):
    other = make(2, 2)
    with pytest.raises(RuntimeError, match="Call the method of the strategy that runs"):
        two.run(lambda: other.experimental_split_to_logical_devices(jnp.ones(2), [2]))


def test_another_thread_reads_while_steps_reuse_memory():
    strategy = make(2, 2)
    with strategy.scope(), strategy.extended.partition([2]):
        weight = rx.Variable(lambda: jnp.zeros(8), aggregation="SUM")
    step = rx.function(lambda: strategy.run(lambda: weight.assign_add(jnp.ones(8))))
    step()
    seen, done, failed = [], threading.Event(), []

    def read():
        while not done.is_set():
            try:
                seen.append(np.asarray(weight.value))
            except RuntimeError as error:  # "Array has been deleted"
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        step()
    done.set()
    reader.join()
    assert not failed
    assert all(np.ptp(value) == 0 and value[0] % 2 == 0 for value in seen)


# Programs.


WIDTH, HEADS, TOKENS = 32, 4, 6


def block_parameters():
    keys = iter(jax.random.split(jax.random.key(1), 8))
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return [
        {name: jax.random.normal(next(keys), shape) * 0.2 for name, shape in shapes.items()}
        for _ in range(2)
    ]


DIVIDED = {"qkv": 1, "out": 0, "up": 1, "down": 0}  # which dimension, as Megatron does


def apply_block(parameters, x):
    rows = x.shape[0]
    q, k, v = jnp.split(x @ parameters["qkv"], 3, axis=-1)
    heads = [
        t.reshape(rows, TOKENS, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3) for t in (q, k, v)
    ]
    scores = jax.nn.softmax(heads[0] @ heads[1].swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS))
    mixed = (scores @ heads[2]).transpose(0, 2, 1, 3).reshape(rows, TOKENS, WIDTH)
    x = x + mixed @ parameters["out"]
    return x + jax.nn.gelu(x @ parameters["up"]) @ parameters["down"]


def loss_of(blocks, x):
    for parameters in blocks:
        x = apply_block(parameters, x)
    return jnp.sum(x**2) / 8


@pytest.mark.parametrize(("replicas", "devices"), [(4, 2), (2, 4), (1, 4)])
def test_a_transformer_block_divided_equals_the_whole_one(replicas, devices):
    strategy = make(replicas, devices)
    parameters = block_parameters()
    with strategy.scope():
        blocks = []
        for block in parameters:
            blocks.append({})
            for name, value in block.items():
                parts = [1, 1]
                parts[DIVIDED[name]] = devices
                with strategy.extended.partition(parts):
                    blocks[-1][name] = rx.Variable(value, name=name)
        optimizer = rx.Optimizer(optax.sgd(1.0))
    variables = [v for block in blocks for v in block.values()]

    @rx.function
    def step(x):
        def replica_fn(x):
            def loss_fn():
                return loss_of([{n: v.value for n, v in b.items()} for b in blocks], x)

            loss, gradients = rx.value_and_grad(loss_fn, variables)()
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None)

    rows = np.asarray(jax.random.normal(jax.random.key(2), (8, TOKENS, WIDTH)))
    x = shares(strategy, rows)
    compiled = step.lower(x).compile()
    loss = step(x)

    expected, gradients = jax.value_and_grad(loss_of)(parameters, rows)
    equal(loss, expected, 1e-4)
    for block, before, gradient in zip(blocks, parameters, gradients, strict=True):
        for name, variable in block.items():
            scale = np.abs(gradient[name]).max()
            equal((before[name] - variable.value) / scale, gradient[name] / scale, 1e-5)
            parts = [1, 1]
            parts[DIVIDED[name]] = devices
            assert shards_of(variable.value) == tuple(
                size // part for size, part in zip(variable.shape, parts, strict=True)
            )

    # A device has its part of the parameters, its rows, and the number of iterations.
    total = sum(v.size * 4 for block in parameters for v in block.values())
    rows_here = rows.nbytes // replicas
    assert compiled.memory_analysis().argument_size_in_bytes <= total // devices + rows_here + 1024
    kinds = Counter(collectives_in(compiled.as_text()))
    assert set(kinds) <= {"all-reduce", "all-to-all", "collective-permute", "all-gather"}
    # Each block sums twice over the devices of a replica, forward, and backward too, but for the
    # gradient of the rows, which nobody wants.
    assert kinds["all-reduce"] >= 7
    assert not any(
        shape == variable.shape
        for shape in gathered_shapes(compiled.as_text())
        for variable in variables
    ), "no parameter is gathered"


def collectives_in(text):
    pattern = (
        r"= \(?[a-z0-9]+\[.*? (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\("
    )
    return re.findall(pattern, text)


def gathered_shapes(text):
    for sizes in re.findall(r"= [a-z0-9]+\[([\d,]*)\]\S* all-gather\(", text):
        yield tuple(int(size) for size in sizes.split(",") if size)


def test_a_conv_net_on_images_divided_in_two_dimensions():
    """Page 002: eight logical devices, images divided 2 x 4 ways."""
    strategy = make(1, 8)
    kernels = [
        jax.random.normal(jax.random.key(i), (3, 3, channels, 4)) * 0.3
        for i, channels in enumerate((3, 4))
    ]
    images = np.asarray(jax.random.normal(jax.random.key(3), (2, 16, 32, 3)))

    def model(kernels, x):
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return x

    with strategy.scope():
        variables = [rx.Variable(kernel) for kernel in kernels]

    @rx.function
    def step_fn(x):
        x = strategy.experimental_split_to_logical_devices(x, [1, 2, 4, 1])

        def loss_fn():
            return jnp.mean(model([v.value for v in variables], x) ** 2)

        loss, gradients = rx.value_and_grad(loss_fn, variables)()
        return model([v.value for v in variables], x), loss, gradients

    output, loss, gradients = strategy.run(step_fn, args=(images,))
    equal(output, model(kernels, images), 1e-4)
    expected, wanted = jax.value_and_grad(lambda k: jnp.mean(model(k, images) ** 2))(kernels)
    equal(loss, expected, 1e-5)
    for gradient, want in zip(gradients, wanted, strict=True):
        equal(gradient, want, 1e-5)
    assert shards_of(output) == (2, 8, 8, 4)


def test_results_of_any_size_have_their_replicas_shapes(strategy, wrap):
    x = shares(strategy, np.ones((2 * strategy.num_replicas_in_sync, 4), np.float32))
    result = strategy.run(wrap(lambda x: (x[:, :0], x[:0], x, x.sum())), args=(x,))
    for parts in strategy.experimental_local_results(result):
        assert [part.shape for part in parts] == [(2, 0), (0, 4), (2, 4), ()]
        for part in parts:
            # The sharding of a component is one that JAX takes.
            equal(jax.device_put(np.zeros(part.shape), part.sharding), np.zeros(part.shape))


# Combining.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sums_and_gathers_over_the_replicas(strategy, wrap, dtype):
    replicas = strategy.num_replicas_in_sync
    values = [np.full((2, 2), replica + 1, dtype) for replica in range(replicas)]

    def step_fn(x):
        context = rx.get_replica_context()
        return context.all_reduce("SUM", x), context.all_gather(x, axis=0)

    total, gathered = strategy.run(wrap(step_fn), args=(per_replica(strategy, values),))
    for part in strategy.experimental_local_results(total):
        equal(part.astype(jnp.float32), np.full((2, 2), replicas * (replicas + 1) / 2))
    for part in strategy.experimental_local_results(gathered):
        equal(part.astype(jnp.float32), np.concatenate(values).astype(np.float32))


def test_results_of_both_executions_can_be_mixed(strategy):
    value = per_replica(strategy, [jnp.float32(r) for r in range(strategy.num_replicas_in_sync)])
    eager = strategy.reduce("SUM", value, axis=None)
    compiled = rx.function(lambda v: strategy.reduce("SUM", v, axis=None))(value)
    with strategy.scope():
        variable = rx.Variable(1.0)
    equal(eager + compiled + variable, 2 * np.arange(strategy.num_replicas_in_sync).sum() + 1)


def test_uneven_shares_are_exact(wrap):
    strategy = make(2, 2)
    with strategy.scope(), strategy.extended.partition([2]):
        weight = rx.Variable(np.float32([1.0, 2.0]))

    def step_fn(x):
        return jnp.sum(x @ weight.value)

    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    dataset = strategy.experimental_distribute_dataset([rows, rows[:1]])
    step = wrap(step_fn)
    totals = [
        float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)) for x in dataset
    ]
    equal(totals, [np.sum(rows @ [1, 2]), np.sum(rows[:1] @ [1, 2])])


def test_devices_that_do_not_divide_into_replicas():
    with pytest.raises(ValueError, match=r"3 device\(s\) cannot be divided.*2 logical"):
        rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"], logical_devices_per_replica=2)
