"""State divided over the replicas: the numbers of mirrored state, in a fraction of the memory."""

import copy
import re
from collections import Counter
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus
from support import equal

import replicax as rx
from replicax.variables import StateLayout, storage_of

HIDDEN = 300  # 100 x 300 divides by 2 and 4; 300 x 301 by 4 along its first dimension only


class Trained:
    """A network with tied weights and a running average after some steps."""

    def __init__(self, strategy, transformation, steps=20, compiled=True, rows=8):
        random = np.random.default_rng(0)
        with strategy.scope():
            self.first = rx.Variable(
                random.normal(size=(100, HIDDEN)).astype("f") / 10, name="first"
            )
            self.bias = rx.Variable(np.zeros(HIDDEN, "f"), name="bias")
            tied = random.normal(size=(HIDDEN, 301)).astype("f") / 10
            self.tied = rx.Variable(tied, name="tied")
            self.average = rx.Variable(
                np.zeros((HIDDEN, 301), "f"), name="average", trainable=False, aggregation="MEAN"
            )
            self.optimizer = rx.Optimizer(transformation)
        self.trained = [self.first, self.bias, self.tied]
        self.variables = [*self.trained, self.average]
        step = rx.function(self.step) if compiled else self.step
        self.batches = random.normal(size=(steps, rows, 100)).astype("f")
        self.losses = []
        for batch in self.batches:
            losses = strategy.run(step, args=(strategy.split(batch),))
            self.losses.append(float(strategy.reduce("SUM", losses, axis=None)))
        self.strategy, self.compiled_step = strategy, step

    def step(self, x):
        def loss():
            hidden = jnp.tanh(x @ self.first + self.bias)
            return (jnp.tanh(jnp.tanh(hidden @ self.tied) @ self.tied.value.T) ** 2).mean()

        value = self.optimizer.minimize(loss, self.trained)
        self.average.assign_sub(0.1 * (self.average - self.tied))
        return value

    def program(self):
        """Return the compiled step."""

        @rx.function
        def step(batch):
            return self.strategy.run(self.step, args=(batch,))

        return step.lower(self.strategy.split(self.batches[0])).compile()


def same(sharded, mirrored, ulps=32):
    """Compare two trainings, in units of the last place of the largest number of each array."""
    equal(sharded.losses, mirrored.losses, 1e-5)
    for ours, theirs in zip(sharded.variables, mirrored.variables, strict=True):
        ours, theirs = ours.numpy(), theirs.numpy()
        bound = ulps * np.finfo(np.float32).eps * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


TRANSFORMATIONS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


SLOW = ("lamb", "adafactor", "every second step")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in TRANSFORMATIONS
    ],
)
def test_trains_as_mirrored_state_does(name):
    make = TRANSFORMATIONS[name]
    # Of three replicas, the last part of each variable is padded.
    sharded = Trained(rx.FullyShardedStrategy(cpus(3)), make())
    same(sharded, Trained(rx.MirroredStrategy(cpus(3)), make()))


def test_eager_steps_and_uneven_batches():
    make = TRANSFORMATIONS["clipped"]
    mirrored = Trained(rx.MirroredStrategy(cpus(2)), make(), 4, rows=7)
    for compiled in (False, True):
        same(Trained(rx.FullyShardedStrategy(cpus(2)), make(), 4, compiled, rows=7), mirrored)


def layouts(variables):
    return [storage_of(variable).layout for variable in variables]


@pytest.mark.parametrize("name", ["momentum", "adamw", "clipped"])
def test_memory_and_collectives_are_read_off_the_program(name):
    replicas = 4
    mirrored, sharded = (
        Trained(make(cpus(replicas)), TRANSFORMATIONS[name](), steps=1)
        for make in (rx.MirroredStrategy, rx.FullyShardedStrategy)
    )
    sharded_layout, whole = StateLayout.SHARDED, StateLayout.REPLICATED
    assert layouts(sharded.variables) == [sharded_layout, whole, *[sharded_layout] * 2]
    state = [*sharded.variables, *sharded.optimizer.variables]
    sizes = [variable.value.nbytes for variable in state]
    kept = sum(size for size, variable in zip(sizes, state, strict=True) if size < 64 * 1024)
    batch = sharded.batches[0].nbytes / replicas
    ours, theirs = sharded.program(), mirrored.program()
    arguments = ours.memory_analysis().argument_size_in_bytes - batch
    assert arguments <= 1.02 * ((sum(sizes) - kept) / replicas + kept)
    assert temporary(ours) <= temporary(theirs)
    # One gather for each weight that the loss reads, and one part of each gradient.
    counts = collectives(ours.as_text())
    assert counts["all-gather"] == 2
    assert counts["reduce-scatter"] == 2


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def collectives(text):
    """Count the arrays that travel, by the kind of their collective."""
    counts = Counter()
    for shapes, kind in re.findall(r"= (\S.*?) (all-gather|reduce-scatter)(?:-start)?\(", text):
        counts[kind] += shapes.count("[")
    return counts


def test_padding_is_never_seen():
    strategy = rx.FullyShardedStrategy(cpus(4), variable_partitioner=lambda shape, dtype: [2])
    with strategy.scope():
        # Parts of two: the last one is padding, and so is half of the third.
        weight = rx.Variable(np.float32([1, 2, 3, 4, 5]), aggregation="MEAN")
        optimizer = rx.Optimizer(optax.clip_by_global_norm(0.5))

    @rx.function
    def step():
        weight.assign(1.0 / weight)
        optimizer.apply_gradients([(0.0 / weight - 1.0, weight)], skip_gradients_aggregation=True)
        return (weight / weight).sum()

    totals = strategy.run(step)
    assert [float(total) for total in totals.values] == [5.0] * 4
    equal(weight.numpy(), 1 / np.arange(1, 6) - 0.5 / np.sqrt(5), 1e-6)
    assert weight.shape == (5,)
    shards = storage_of(weight).lift(strategy.topology).addressable_shards
    assert [shard.data.shape for shard in shards] == [(2,)] * 4


def test_reductions_of_whole_numbers_and_truths():
    random = np.random.default_rng(0)
    numbers = random.integers(0, 2**31 - 1, size=7).astype("i4") | 1
    strategy = rx.FullyShardedStrategy(cpus(4), variable_partitioner=lambda shape, dtype: [2])
    with strategy.scope():
        bits, truths = rx.Variable(numbers), rx.Variable(numbers > 0)

    @rx.function
    def step():
        return strategy.run(
            lambda: (
                jnp.bitwise_and.reduce(bits.value),
                jnp.bitwise_or.reduce(bits.value),
                jnp.all(truths.value),
                jnp.any(~truths.value),
                jnp.max(bits.value),
                jnp.sum(bits.value % 7),
            )
        )

    expected = (
        np.bitwise_and.reduce(numbers), np.bitwise_or.reduce(numbers), True, False,
        numbers.max(), (numbers % 7).sum(),
    )  # fmt: skip
    assert [int(value.values[1]) for value in step()] == [int(value) for value in expected]


@pytest.mark.parametrize(
    ("shape", "dtype", "part"),
    [
        ((), "float32", ()),
        ((127, 128), "float32", (127, 128)),  # 63.5 KiB
        ((128, 128), "float32", (32, 128)),
        ((129, 128), "float32", (129, 32)),
        ((126, 131), "float32", (126, 33)),  # neither divides: the larger one, with padding
        ((16, 200, 200), "int32", (16, 50, 200)),
    ],
)
def test_the_default_rule(shape, dtype, part):
    strategy = rx.FullyShardedStrategy(cpus(4))
    with strategy.scope():
        variable = rx.Variable(np.ones(shape, dtype))
    lifted = storage_of(variable).lift(strategy.topology)
    assert lifted.addressable_shards[1].data.shape == part
    assert variable.numpy().shape == shape


def test_partitioners_of_the_reference():
    partitioners = rx.experimental.partitioners
    assert partitioners.FixedShardsPartitioner(4)((3, 5), "float32") == [3, 1]
    assert partitioners.FixedShardsPartitioner(4)((3, 5), "float32", axis=1) == [1, 4]
    by_size = partitioners.MinSizePartitioner(80, max_shards=3)
    assert [by_size((rows, 10), "float32") for rows in (1, 4, 9)] == [[1, 1], [2, 1], [3, 1]]
    by_size = partitioners.MaxSizePartitioner(80, max_shards=4)
    assert [by_size((rows, 10), "float32") for rows in (2, 3, 9)] == [[1, 1], [2, 1], [4, 1]]
    with pytest.raises(ValueError, match="`num_shards` must be a positive whole number; got 0"):
        partitioners.FixedShardsPartitioner(0)


def test_a_partitioner_divides_what_it_says():
    partitioner = rx.experimental.partitioners.MinSizePartitioner(16, max_shards=2)
    strategy = rx.FullyShardedStrategy(cpus(2), variable_partitioner=partitioner)
    with strategy.scope():
        variables = [rx.Variable(np.zeros(shape, "f")) for shape in ((4,), (2, 4), (1, 64), ())]
    sharded, whole = StateLayout.SHARDED, StateLayout.REPLICATED
    assert layouts(variables) == [whole, sharded, whole, whole]


def test_checkpoints_are_restored_in_another_layout(tmp_path):
    makers = {
        "mirrored": lambda: rx.MirroredStrategy(cpus(2)),
        "four": lambda: rx.FullyShardedStrategy(cpus(4)),
        "padded": lambda: rx.FullyShardedStrategy(cpus(3)),
    }
    variables = {}
    for name, make in makers.items():
        with make().scope():
            variables[name] = rx.Variable(np.zeros((200, 100), "f"), name="weight")
    for number, (name, saved) in enumerate(variables.items()):
        saved.assign(np.arange(20_000, dtype="f").reshape(200, 100) + number)
        path = rx.Checkpoint(weight=saved).save(tmp_path / name)
        for other in set(variables) - {name}:
            variables[other].assign(np.zeros((200, 100), "f"))
            rx.Checkpoint(weight=variables[other]).restore(path)
            equal(variables[other].numpy(), saved.numpy())
    assert layouts(variables.values()) == [
        StateLayout.REPLICATED, StateLayout.SHARDED, StateLayout.SHARDED
    ]  # fmt: skip


class Stacked:
    """A network whose layers are stacked, and a `lax.scan` goes through them."""

    def __init__(
        self, make, compiled=True, steps=5, layers=4, cast=lambda weight: weight, width=99
    ):
        random = np.random.default_rng(0)
        self.strategy, self.cast = make(cpus(4)), cast
        with self.strategy.scope():
            self.up, self.down = self.variables = [
                rx.Variable(random.normal(size=(layers, *shape)).astype("f") / 10)
                for shape in ((width, 200), (200, width))
            ]
            transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
            self.optimizer = rx.Optimizer(transformation)
        self.batches = random.normal(size=(steps, 8, width)).astype("f")
        step = rx.function(self.step) if compiled else self.step
        self.losses = []
        for batch in self.batches:
            losses = self.strategy.run(step, args=(self.strategy.split(batch),))
            self.losses.append(float(self.strategy.reduce("SUM", losses, axis=None)))

    def step(self, x):
        @jax.checkpoint
        def layer(x, weights):
            up, down = weights
            return x + jnp.tanh(x @ up) @ down, (x**2).sum()

        def loss():
            weights = self.cast(self.up.value), self.cast(self.down.value)
            result, norms = jax.lax.scan(layer, x.astype(weights[0].dtype), weights)
            return ((result**2).mean() + 1e-3 * norms.sum()).astype("f")

        return self.optimizer.minimize(loss, self.variables)

    program = Trained.program


def without_regathering(devices):
    return rx.FullyShardedStrategy(devices, regather=False)


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (rx.FullyShardedStrategy, True),
        (rx.FullyShardedStrategy, False),
        (without_regathering, True),
    ],
    ids=["compiled", "eager", "gathered once"],
)
def test_layers_in_a_stack(make, compiled):
    same(Stacked(make, compiled), Stacked(rx.MirroredStrategy))


def test_a_stack_is_cast_before_the_loop():
    def cast(weight):
        return weight.astype(jnp.bfloat16)

    sharded, mirrored = (
        Stacked(make, cast=cast) for make in (rx.FullyShardedStrategy, rx.MirroredStrategy)
    )
    equal(sharded.losses, mirrored.losses, 1e-2)


def test_a_stack_is_gathered_layer_by_layer():
    sharded, once, mirrored = (
        Stacked(make, steps=1, layers=16)
        for make in (rx.FullyShardedStrategy, without_regathering, rx.MirroredStrategy)
    )
    program, gathering_once = sharded.program(), once.program()
    layers = {"f32[99,200]", "f32[200,99]"}
    assert gathered(program.as_text()) == Counter(dict.fromkeys(layers, 2))  # forward, backward
    assert gathered(gathering_once.as_text()) == Counter(["f32[16,99,200]", "f32[16,200,99]"])
    stack = sharded.up.value.nbytes
    assert temporary(program) < temporary(gathering_once) - stack
    assert temporary(program) < temporary(mirrored.program()) - stack


def gathered(text):
    """Count the shapes that are gathered."""
    return Counter(re.findall(r"= (\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", text))


class InBlocks:
    """A network whose weights are divided over replicas and over the devices of each."""

    def __init__(self, strategy, compiled=True, steps=10):
        random = np.random.default_rng(0)
        self.variables = []
        with strategy.scope():
            for rows, columns, parts in ((128, 256, [1, 2]), (256, 128, [2, 1])):
                value = random.normal(size=(rows, columns)).astype("f") / 10
                several = strategy.topology.logical_devices_per_replica > 1
                with strategy.extended.partition(parts) if several else nullcontext():
                    self.variables.append(rx.Variable(value, name=f"weight_{rows}"))
            # It stays whole on the devices of a replica.
            self.variables.append(rx.Variable(np.ones((128, 130), "f") / 10, name="whole"))
            self.optimizer = rx.Optimizer(
                optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
            )
        step = rx.function(self.step) if compiled else self.step
        self.losses = []
        for _ in range(steps):
            x = strategy.split(random.normal(size=(8, 128)).astype("f"))
            losses = strategy.run(step, args=(x,))
            self.losses.append(float(strategy.reduce("SUM", losses, axis=None)))

    def step(self, x):
        first, second, third = self.variables

        def loss():
            return (jnp.tanh(jnp.tanh(x @ first) @ second @ third.value) ** 2).mean() / 4

        return self.optimizer.minimize(loss, self.variables)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_state_is_divided_over_replicas_and_logical_devices(compiled):
    strategy = rx.FullyShardedStrategy(cpus(8), logical_devices_per_replica=2)
    trained = InBlocks(strategy, compiled)
    same(trained, InBlocks(rx.MirroredStrategy(cpus(4))))
    arrays = [storage_of(variable).lift(strategy.topology) for variable in trained.variables]
    shapes = [{shard.data.shape for shard in array.addressable_shards} for array in arrays]
    assert shapes == [{(32, 128)}, {(128, 32)}, {(32, 130)}]
    read = trained.variables[0].value
    assert read.shape == (128, 256)
    trained.variables[0].assign(2 * read)
    equal(trained.variables[0].numpy(), 2 * np.asarray(read))


def test_one_dimension_over_replicas_and_logical_devices():
    strategy = rx.FullyShardedStrategy(
        cpus(4), variable_partitioner=lambda *_: [2], logical_devices_per_replica=2
    )
    with strategy.scope(), strategy.extended.partition([2]):
        even, odd = (rx.Variable(np.arange(size, dtype="f")) for size in (8, 6))
    quarters = storage_of(even).lift(strategy.topology).addressable_shards
    assert sorted(shard.data.tolist() for shard in quarters) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Three numbers per replica do not divide by two: the logical devices alone divide it.
    assert layouts([even, odd]) == [StateLayout.SHARDED, StateLayout.REPLICATED]
    strategy.run(rx.function(lambda: even.value.sum()))
    for variable in (even, odd):
        equal(variable.numpy(), np.arange(variable.shape[0]))


def test_checkpoints_of_state_in_blocks(tmp_path):
    strategy = rx.FullyShardedStrategy(cpus(8), logical_devices_per_replica=2)
    trained = InBlocks(strategy, steps=1)
    values = [variable.numpy() for variable in trained.variables]
    path = rx.Checkpoint(weights=trained.variables).save(tmp_path / "blocks")
    for other in (strategy, rx.MirroredStrategy(cpus(2)), rx.FullyShardedStrategy(cpus(4))):
        with other.scope():
            variables = [rx.Variable(np.zeros_like(value)) for value in values]
        rx.Checkpoint(weights=variables).restore(path)
        for variable, value in zip(variables, values, strict=True):
            equal(variable.numpy(), value)
    for variable in trained.variables:
        variable.assign(np.zeros(variable.shape, "f"))
    rx.Checkpoint(weights=trained.variables).restore(path)
    for variable, value in zip(trained.variables, values, strict=True):
        equal(variable.numpy(), value)


def test_a_partitioner_names_one_dimension():
    strategy = rx.FullyShardedStrategy(cpus(2), variable_partitioner=lambda *_: [2, 2])
    with strategy.scope(), pytest.raises(ValueError, match=r"at most one.*got \[2, 2\]"):
        rx.Variable(np.ones((4, 4)))


def in_rows(shape, dtype):
    return [4, *[1] * (len(shape) - 1)] if shape and shape[0] > 1 else [1] * len(shape)


def test_update_leaves_parts_and_refuses_copies_that_differ():
    strategy = rx.FullyShardedStrategy(cpus(4), variable_partitioner=in_rows)
    with strategy.scope():
        variable = rx.Variable(np.arange(8, dtype="f"))
    strategy.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(np.ones(8, "f"),))
    assert storage_of(variable).stored.parts is not None
    equal(variable.numpy(), np.arange(8) + 1)
    differ = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(8, context.replica_id_in_sync_group, "f")
    )
    with pytest.raises(rx.errors.CopiesDiffer, match="the same for all"):
        strategy.extended.update(variable, lambda copy, x: copy.assign(x), args=(differ,))
    equal(variable.numpy(), np.arange(8) + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_copies_that_are_no_number_are_equal(dtype):
    strategy = rx.FullyShardedStrategy(cpus(4), variable_partitioner=in_rows)
    with strategy.scope():
        variable = rx.Variable(jnp.full(8, jnp.nan, dtype))
    strategy.extended.update(variable, lambda copy: copy.assign(copy.value))
    assert np.isnan(np.asarray(variable.numpy(), "f")).all()


def test_a_copied_optimizer_has_slots_that_are_divided_like_the_variable():
    strategy = rx.FullyShardedStrategy(cpus(4))
    with strategy.scope():
        weight = rx.Variable(np.ones((16, 1024), "f"))  # 64 KiB; a slot in 16 bits has less
        optimizer = rx.Optimizer(optax.adam(1e-3, mu_dtype=jnp.bfloat16))

    def step(weight, optimizer):
        return strategy.run(lambda: optimizer.minimize(lambda: (weight.value**2).sum(), [weight]))

    step(weight, optimizer)
    other_weight, other = copy.deepcopy([weight, optimizer])
    step(weight, optimizer)
    step(other_weight, other)
    equal(other_weight.numpy(), weight.numpy())
    assert layouts(other.variables) == layouts(optimizer.variables)


def test_arrays_without_elements_stay_whole():
    strategy = rx.FullyShardedStrategy(cpus(4), variable_partitioner=lambda *_: [4, 1])
    with strategy.scope():
        empty = rx.Variable(np.ones((8, 0), "f"), aggregation="MEAN")
    strategy.run(rx.function(lambda: empty.assign(empty + 1)))
    assert layouts([empty]) == [StateLayout.REPLICATED]
    assert empty.numpy().shape == (8, 0)


@pytest.mark.parametrize("counts", [None, [2.0, 1.0], [True, True], [2], [0, 1]])
def test_what_a_partitioner_returns_is_checked(counts):
    strategy = rx.FullyShardedStrategy(cpus(2), variable_partitioner=lambda *_: counts)
    with strategy.scope(), pytest.raises(ValueError, match="`variable_partitioner` returns"):
        rx.Variable(np.ones((4, 4)))
