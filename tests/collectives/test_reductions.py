"""Every reduction of the table, by every way to ask for it, against `jax.numpy` on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import cpus
from support import components_equal, equal, per_replica, shares

import replicax as rx
from replicax.collectives import CommunicationOptions
from replicax.collectives._reductions import REDUCTIONS, Reduction

pytestmark = pytest.mark.usefixtures("execution")

RANDOM = np.random.default_rng(0)
SUM, MEAN, MAX, MIN = rx.ReduceOp
WHOLE = {SUM: jnp.sum, MEAN: jnp.mean, MAX: jnp.max, MIN: jnp.min}
OPS = list(WHOLE)
CHOOSING = [MAX, MIN]
OPTIONS = CommunicationOptions()


def all_reduced(strategy, op, value, options=None):
    def replica(value):
        return rx.get_replica_context().all_reduce(op, value, options)

    return strategy.run(replica, args=(value,))


def merged(strategy, function, *values):
    """Return the result of `function(strategy, ...)` for replicas that meet to call it."""

    def replica(*values):
        return rx.get_replica_context().merge_call(function, args=values)

    return strategy.run(replica, args=values)


def test_every_op_is_in_the_table():
    assert list(REDUCTIONS) == OPS


@pytest.mark.parametrize("op", OPS)
def test_of_the_replicas_values(strategy, op):
    count = strategy.num_replicas_in_sync
    parts = RANDOM.normal(size=(count, 2, 3)).astype(np.float32)
    numbers = RANDOM.integers(-9, 9, count).astype(np.int32)
    expected = {"x": WHOLE[op](parts, axis=0), "i": WHOLE[op](numbers)}
    value = {"x": per_replica(strategy, parts), "i": per_replica(strategy, numbers)}
    jax.tree.map(equal, strategy.reduce(op, value, axis=None), expected)
    out = all_reduced(strategy, op, value)
    for name, whole in expected.items():
        components_equal(strategy, out[name], [whole] * count)
    copied = strategy.extended.reduce_to(op, value["x"], value["x"])
    for copy in strategy.experimental_local_results(copied):
        equal(copy, expected["x"])


def test_the_mean_of_large_numbers_whose_sum_came_with_them(two):
    numbers = np.int32([2_000_000_000] * 2)
    value = per_replica(two, numbers)
    total = numbers.sum(dtype=np.int32)  # as programs do, in whose dtype it overflows
    value.note_sum(two.topology.replicate(total))
    equal(two.reduce("MEAN", value, axis=None), np.float32(2e9))
    equal(two.reduce("SUM", value, axis=None), total)


@pytest.mark.parametrize(("rows", "axis"), [(1, 0), (7, (0, 1)), (16, 0)])
def test_of_a_batch_in_uneven_and_empty_shares(strategy, rows, axis):
    batch = -1 - RANDOM.random(size=(rows, 3)).astype(np.float32)  # zeros would be the largest
    value = shares(strategy, batch)

    def reduced(strategy, value):
        return [strategy.reduce(op, value, axis=axis) for op in OPS]

    inside, outside = merged(strategy, reduced, value), reduced(strategy, value)
    for whole, own, met in zip(WHOLE.values(), outside, inside, strict=True):
        for each in (own, *strategy.experimental_local_results(met)):
            equal(each, whole(batch, axis=axis), 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_along_other_dimensions_than_the_rows(two, op):
    parts = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)
    out = two.reduce(op, per_replica(two, parts), axis=-1)
    equal(out, WHOLE[op](parts, axis=(0, 2)), 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_the_gradient_is_that_of_the_whole(strategy, op):
    count = strategy.num_replicas_in_sync
    inputs = RANDOM.integers(0, 2, size=(count, 5)).astype(np.float32)  # many are equal
    weights, directions = RANDOM.normal(size=(2, count, 5)).astype(np.float32)

    def loss(stacked):
        return jnp.sum(WHOLE[op](stacked**2 + stacked, axis=0) * weights)

    def second(stacked):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) * directions))(stacked)

    def replica(x, weight, direction):
        def own_loss(x, i):
            total = rx.get_replica_context().all_reduce(op, {"x": x**2 + x, "i": i})
            return jnp.sum(total["x"] * weight) + jnp.sum(total["i"])

        gradient = jax.grad(own_loss)
        again = jax.grad(lambda x: jnp.sum(gradient(x, jnp.int32(1)) * direction))
        return gradient(x, jnp.int32(1)), again(x)

    args = tuple(per_replica(strategy, each) for each in (inputs, weights, directions))
    first, again = strategy.run(replica, args=args)
    for actual, expected in ((first, jax.grad(loss)(inputs)), (again, second(inputs))):
        local = [expected[replica] for replica in strategy.topology.local_replicas]
        for part, numbers in zip(strategy.experimental_local_results(actual), local, strict=True):
            equal(part, numbers, 1e-4)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_variables_go_through_it(strategy, op):
    with strategy.scope():
        variable = rx.Variable([1.0, 2.0])
    count = strategy.num_replicas_in_sync
    factors = np.arange(1.0, count + 1, dtype=np.float32)

    def replica(factor):
        context = rx.get_replica_context()
        return rx.grad(lambda: jnp.sum(context.all_reduce(op, variable * factor)), variable)()

    expected = jax.grad(lambda f: WHOLE[op](f) * count)(factors) * factors
    out = strategy.run(replica, args=(per_replica(strategy, factors),))
    components_equal(strategy, out, [[each, each] for each in expected])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("wrap", [lambda function: function, rx.function])
def test_reduce_is_differentiable_outside_of_run(two, op, axis, wrap):
    batch = jnp.float32([3, 3, 1, 3])

    def whole(batch):
        return jnp.sum(WHOLE[op](batch if axis == 0 else batch.reshape(2, 2), axis=0) ** 2)

    def loss(batch):
        return jnp.sum(two.reduce(op, two.split(batch), axis=axis) ** 2)

    equal(wrap(jax.grad(loss))(batch), jax.grad(whole)(batch))


@pytest.mark.parametrize("op", CHOOSING)
def test_what_is_chosen_keeps_its_dtype(strategy, op):
    count, dtypes = (
        strategy.num_replicas_in_sync,
        ["int8", "uint8", "int32", "float16", "bfloat16", "bool"],
    )
    numbers = np.array([[replica % 2, 1, 0] for replica in range(count)])
    value = {
        dtype: per_replica(strategy, [jnp.asarray(each, dtype) for each in numbers])
        for dtype in dtypes
    }
    whole, rows = WHOLE[op](numbers, axis=0), WHOLE[op](numbers)
    out = all_reduced(strategy, op, value)
    over_rows = strategy.reduce(op, value, axis=0)
    for dtype, element_wise in strategy.reduce(op, value, axis=None).items():
        for each in (element_wise, *strategy.experimental_local_results(out[dtype])):
            assert each.dtype == dtype
            equal(each.astype("float32"), whole)
        assert over_rows[dtype].dtype == dtype
        equal(over_rows[dtype].astype("float32"), rows)


@pytest.mark.parametrize("op", CHOOSING)
def test_what_is_not_finite(strategy, op):
    count = strategy.num_replicas_in_sync
    for place in {0, count - 1}:
        parts = np.arange(5.0 * count, dtype=np.float32).reshape(count, 5)
        parts[place, 1:4] = [np.nan, np.inf, -np.inf]
        value, expected = per_replica(strategy, parts), WHOLE[op](parts, axis=0)
        equal(strategy.reduce(op, value, axis=None), expected)
        components_equal(strategy, all_reduced(strategy, op, value), [expected] * count)
        equal(strategy.reduce(op, value, axis=0), WHOLE[op](parts))


@pytest.mark.parametrize("op", CHOOSING)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float32", "float8_e4m3fn"])
def test_an_empty_share_is_never_chosen(two, op, dtype):
    extremes = {"bool": [False, True], "float32": [-np.inf, np.inf]}
    limits = jnp.finfo(dtype) if dtype.startswith("float") else None
    if limits is None and dtype != "bool":
        limits = jnp.iinfo(dtype)
    for number in extremes.get(dtype) or [limits.min, limits.max]:
        value = per_replica(two, [jnp.asarray([number], dtype), jnp.zeros(0, dtype)])
        out = two.reduce(op, value, axis=0)
        assert out.dtype == dtype
        assert out == jnp.asarray(number, dtype)


@pytest.mark.parametrize("op", CHOOSING)
def test_values_that_are_the_same_everywhere(strategy, op):
    with strategy.scope():
        variable = rx.Variable([1.0, 3.0])
    for value in (jnp.float32([1, 3]), variable):
        equal(strategy.reduce(op, value, axis=None), [1, 3])
        equal(strategy.reduce(op, value, axis=0), WHOLE[op](jnp.float32([1, 3])))


@pytest.mark.parametrize("op", OPS)
def test_in_a_narrow_dtype(two, op):
    options = CommunicationOptions(dtype="bfloat16")
    parts = np.float32([[1, 2.5], [3, -4]])  # which are numbers of bfloat16, as are their sums
    value, expected = per_replica(two, parts), WHOLE[op](parts, axis=0)
    components_equal(two, all_reduced(two, op, value, options), [expected] * 2)
    components_equal(two, two.extended.reduce_to(op, value, value, options), [expected] * 2)


def test_the_gradient_of_a_maximum_in_a_narrow_dtype(two):
    options = CommunicationOptions(dtype="bfloat16")

    def replica(x):
        reduce = rx.get_replica_context().all_reduce
        return jax.grad(lambda x: jnp.sum(reduce(MAX, x, options)))(x)

    values = per_replica(two, np.float32([[1.001, 2], [1.002, 1]]))  # 1 and 1, in bfloat16
    components_equal(two, two.run(replica, args=(values,)), [[0, 2], [2, 0]])


# What is refused


@pytest.mark.parametrize("op", CHOOSING)
def test_numbers_without_an_order_are_refused(two, op):
    value = per_replica(two, np.complex64([1, 1j]))
    for use in (
        lambda: two.reduce(op, value, axis=None),
        lambda: two.reduce(op, value, axis=0),
        lambda: two.reduce(op, np.complex64(1), axis=None),
        lambda: two.extended.reduce_to(op, value, value),
        lambda: two.extended.batch_reduce_to(op, [(value, value)]),
        lambda: all_reduced(two, op, value),
        lambda: merged(two, lambda strategy, x: strategy.reduce(op, x, axis=None), value),
    ):
        with pytest.raises(rx.errors.InvalidType, match=rf"{op.name}.*floating.*dtype complex64"):
            use()
    equal(two.reduce("SUM", value, axis=None), 1 + 1j)


@pytest.mark.parametrize("op", CHOOSING)
def test_of_nothing_at_all(strategy, op):
    nothing = shares(strategy, np.zeros((0, 3), np.float32))
    with pytest.raises(ValueError, match=r"needs at least one element; got \(0, 3\)"):
        strategy.reduce(op, nothing, axis=0)
    assert strategy.reduce(op, nothing, axis=None).shape == (0, 3)


def test_an_op_that_is_not_in_the_table_is_refused(two, monkeypatch):
    monkeypatch.delitem(REDUCTIONS, MAX)
    value = per_replica(two, np.ones((2, 2), np.float32))
    for use in (
        lambda: two.reduce(MAX, value, axis=None),
        lambda: two.reduce(MAX, value, axis=0),
        lambda: two.reduce(MAX, 1.0, axis=None),
        lambda: two.reduce(MAX, {}, axis=None),
        lambda: two.extended.reduce_to(MAX, value, value),
        lambda: two.extended.batch_reduce_to(MAX, []),
        lambda: two.collectives.reduce(MAX, [], OPTIONS),
        lambda: two.collectives.reduce_scatter(MAX, [], 0, OPTIONS),
        lambda: all_reduced(two, MAX, value),
        lambda: all_reduced(two, MAX, []),
        lambda: merged(two, lambda strategy, x: strategy.reduce(MAX, x, axis=0), value),
    ):
        with pytest.raises(rx.errors.InvalidArgument, match=r"ReduceOp.MAX.*SUM, MEAN, MIN"):
            use()


# A row of the table is all that there is to a reduction.


def test_a_new_row(two, monkeypatch):
    product = Reduction(
        combine=lambda array, axes: jnp.prod(array, axis=axes, dtype=array.dtype),
        identity=lambda dtype: 1,
    )
    monkeypatch.setitem(REDUCTIONS, MAX, product)
    parts = np.float32([[2, 3, 0], [5, 0, 0]])
    value = per_replica(two, parts)
    equal(two.reduce(MAX, value, axis=None), parts.prod(0))
    components_equal(two, all_reduced(two, MAX, value), [parts.prod(0)] * 2)
    rows = per_replica(two, [np.float32([2, 3, 4]), np.float32([])])
    equal(two.reduce(MAX, rows, axis=0), 24)
    out = merged(two, lambda strategy, x: strategy.reduce(MAX, x, axis=0), rows)
    components_equal(two, out, [24, 24])
    pairs = per_replica(two, np.float32([[2, 3], [5, 7]]))
    (out,) = scattered(two, MAX, 0, pairs)
    components_equal(two, out, [[10], [21]])

    def replica(x):
        return jax.grad(lambda x: jnp.sum(rx.get_replica_context().all_reduce(MAX, x)))(x)

    expected = 2 * jax.grad(lambda x: jnp.sum(jnp.prod(x, axis=0)))(parts)
    components_equal(two, two.run(replica, args=(value,)), expected)
    with pytest.raises(ValueError, match="same on all replicas"):
        two.reduce(MAX, 3.0, axis=None)


# reduce_scatter


def scattered(strategy, op, axis, *values, options=OPTIONS):
    """Return each replica's part of a reduce-scatter."""

    def meeting(strategy, *values):
        return strategy.collectives.reduce_scatter(op, values, axis, options)

    def replica(*values):
        return rx.get_replica_context().merge("reduce_scatter", meeting, values)

    return strategy.run(replica, args=values)


@pytest.mark.parametrize(
    ("op", "axis", "dtype"),
    [(SUM, 0, "float32"), (SUM, 1, "int32"), (MEAN, 1, "float32"), (MAX, 0, "int32")],
)
def test_reduce_scatter_gives_each_replica_its_part(strategy, op, axis, dtype):
    count = strategy.num_replicas_in_sync
    shapes = [(2 * count, 3 * count), (count, count, 2)]
    stacks = [(9 * RANDOM.normal(size=(count, *shape))).astype(dtype) for shape in shapes]
    values = [per_replica(strategy, list(stack)) for stack in stacks]
    expected = [np.split(WHOLE[op](stack, axis=0), count, axis) for stack in stacks]
    inside = scattered(strategy, op, axis, *values)
    outside = strategy.collectives.reduce_scatter(op, values, axis, OPTIONS)
    for out, parts in zip([*inside, *outside], expected * 2, strict=True):
        assert isinstance(out, rx.PerReplica) or count == 1
        local = [parts[replica] for replica in strategy.topology.local_replicas]
        for part, numbers in zip(strategy.experimental_local_results(out), local, strict=True):
            assert part.dtype == numbers.dtype
            equal(part, numbers, 1e-5)


def test_gather_is_the_inverse_of_reduce_scatter(strategy):
    count = strategy.num_replicas_in_sync
    parts = RANDOM.normal(size=(count, 2, 4 * count)).astype(np.float32)

    (out,) = scattered(strategy, SUM, 1, per_replica(strategy, parts))
    equal(strategy.gather(out, axis=1), parts.sum(0), 1e-5)


def test_reduce_scatter_of_empty_and_narrow_values(two):
    (empty,) = scattered(two, SUM, 0, per_replica(two, np.zeros((2, 4, 0), np.float32)))
    assert [part.size for part in two.experimental_local_results(empty)] == [0, 0]
    options = CommunicationOptions(dtype="bfloat16")
    value = per_replica(two, np.float32([[1, 2.5], [3, -4]]))
    (out,) = scattered(two, MEAN, 0, value, options=options)
    components_equal(two, out, [[2], [-0.75]])


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((3, 4), 0, "divided by 2"), ((4,), 1, "along axis 1"), ((), 0, "along axis 0")],
)
def test_reduce_scatter_of_what_cannot_be_divided(two, shape, axis, expected):
    value = per_replica(two, [np.ones(shape, np.float32)] * 2)
    for use in (
        lambda: scattered(two, SUM, axis, value),
        lambda: two.collectives.reduce_scatter(SUM, [value], axis, OPTIONS),
    ):
        with pytest.raises(ValueError, match=expected):
            use()


@pytest.mark.parametrize("op", [rx.ReduceOp.MAX, rx.ReduceOp.MIN])
def test_a_nan_is_what_was_chosen(op, execution):
    strategy = rx.MirroredStrategy(cpus(4))
    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32([1, np.nan, 2, 0][context.replica_id_in_sync_group])
    )

    def step(x):
        return jax.grad(lambda x: rx.get_replica_context().all_reduce(op, x))(x)

    gradients = strategy.experimental_local_results(strategy.run(step, args=(x,)))
    assert [float(each) for each in gradients] == [0, 4, 0, 0]
