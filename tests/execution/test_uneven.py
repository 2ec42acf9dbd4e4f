"""Replicas whose shapes differ: one program of variants, or eager where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus
from pipelines import BY_ROWS
from support import components_equal, equal, per_replica, shares

import replicax as rx

_random = np.random.default_rng(0)
X = _random.normal(size=(16, 3)).astype(np.float32)
Y = _random.normal(size=16).astype(np.float32)


@contextmanager
def run_eagerly() -> Iterator[None]:
    rx.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        rx.config.run_functions_eagerly(False)


def assert_compiled(strategy: rx.Strategy, fn: Callable, *args) -> rx.PerReplica:
    """`fn` is run as one program, and its Python is called for traces only; what it returned."""
    traced = []

    def noted(*args):
        traced.append(any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)))
        return fn(*args)

    compiled = rx.function(noted)
    first = strategy.run(compiled, args=args)
    calls = len(traced)
    strategy.run(compiled, args=args)
    assert len(traced) == calls
    assert all(traced)
    assert compiled.tracing_count == 1
    with run_eagerly():
        eager = strategy.experimental_local_results(strategy.run(fn, args=args))
    for mine, others in zip(strategy.experimental_local_results(first), eager, strict=True):
        jax.tree.map(equal, mine, others)
    return first


def assert_eager(strategy: rx.Strategy, fn: Callable, *args) -> rx.PerReplica:
    """`fn` is tried as a program once, and then runs eagerly."""
    traced = []

    def noted(*args):
        traced.append(any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)))
        return fn(*args)

    compiled = rx.function(noted)
    strategy.run(compiled, args=args)
    traced.clear()
    result = strategy.run(compiled, args=args)
    assert traced == [False] * strategy.num_replicas_in_sync
    return result


class Training:
    """A network with Adam, metrics, a count of each replica's own, and a sum in the step."""

    def __init__(self, strategy: rx.Strategy) -> None:
        self.strategy, self.calls = strategy, 0
        with strategy.scope():
            self.hidden = rx.Variable(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
            self.output = rx.Variable(np.linspace(1, 2, 4, dtype=np.float32))
            self.rows = rx.Variable(0, synchronization="ON_READ", aggregation="SUM")
            self.optimizer = rx.Optimizer(optax.adam(0.1))
            self.error = rx.metrics.Mean()

    def step(self, x, y):
        self.calls += 1

        def loss():
            errors = (jnp.tanh(x @ self.hidden.value) @ self.output.value - y) ** 2
            return jnp.sum(errors) / len(X), errors

        variables = [self.hidden, self.output]
        (loss, errors), gradients = rx.value_and_grad(loss, variables, has_aux=True)()
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.error.update_state(errors)
        self.rows.assign_add(len(x))
        return rx.get_replica_context().all_reduce("SUM", loss)

    def state(self):
        variables = [self.hidden, self.output, *self.optimizer.variables]
        return [np.asarray(v.value) for v in variables] + [
            np.asarray(self.rows.numpy()),
            np.asarray(self.error.result()),
        ]


def trained(strategy: rx.Strategy, counts: list[int], wrap: Callable = rx.function):
    training = Training(strategy)
    step = wrap(training.step)
    losses = []
    for count in counts:
        batch = (X[:count], Y[:count])
        if strategy.num_replicas_in_sync > 1:
            batch = tuple(shares(strategy, rows) for rows in batch)
        losses.append(strategy.run(step, args=batch))
    return training, step, losses


def compare(mine: Training, others: Training) -> None:
    for own, other in zip(mine.state(), others.state(), strict=True):
        equal(own, other, 1e-5)


@pytest.mark.parametrize(
    ("replicas", "rows", "eagerly"), [(2, 5, True), (2, 1, False), (4, 10, False), (4, 3, True)]
)
def test_training_equals_eager_and_one_device(replicas, rows, eagerly):
    strategy = rx.MirroredStrategy(cpus(replicas))
    counts = [16, rows, 8, rows]
    compiled, step, losses = trained(strategy, counts)
    assert step.tracing_count == 3
    variants = len({len(part) for part in np.array_split(np.arange(rows), replicas)})
    assert compiled.calls == 2 * (1 + variants + 1), "in two passes each, and never eager"
    others, _, expected = trained(rx.OneDeviceStrategy("CPU:0"), counts)
    compare(compiled, others)
    if eagerly:  # which takes long
        with run_eagerly():
            compare(compiled, trained(strategy, counts)[0])
    for loss, number in zip(losses, expected, strict=True):
        components_equal(strategy, loss, [number] * replicas)
    equal(compiled.rows.numpy(), sum(counts))
    for variable in (compiled.hidden, compiled.output):
        first, *copies = [np.asarray(copy.value) for copy in variable.values]
        assert all(np.array_equal(first, copy) for copy in copies), "to the last bit"


def test_what_variants_share_is_computed_once(two):
    """The update by summed gradients; so the copies of a variable are of one computation."""
    training = Training(two)
    train = rx.function(lambda x, y: two.run(training.step, args=(x, y)))
    even, uneven = (
        str(train.trace(shares(two, X[:count]), shares(two, Y[:count])).jaxpr) for count in (4, 5)
    )
    assert uneven.count("sqrt ") == even.count("sqrt ") > 0
    assert uneven.count("tanh ") == 2 * even.count("tanh ") > 0
    assert uneven.count("psum[") == even.count("psum[") > 0


def test_states_that_bodies_write(two):
    """Those of `jax.jit` and of a loop, which eager replicas could not do."""
    with two.scope():
        total = rx.Variable(np.zeros(3, np.float32), synchronization="ON_READ")

    @rx.function
    def step(x):
        @jax.jit
        def add(row):
            total.assign_add(row)
            return total.value.sum()

        def body(carry, row):
            total.assign_add(row)
            return carry + total.value.sum(), None

        first = add(x[0])
        second, _ = jax.lax.scan(body, jnp.float32(0), x)
        total.assign_sub(x[0])
        return first + second

    values = two.run(step, args=(shares(two, X[:5]),)).values
    for part, value, copy in zip((X[:3], X[3:5]), values, total.values, strict=True):
        equal(copy.value, part.sum(0), 1e-5)
        equal(value, part[0].sum() + (part[0] + part.cumsum(0)).sum(), 1e-5)


@pytest.mark.parametrize("way", ["next", "for"])
def test_elements_that_a_function_takes(strategy, way):
    replicas = strategy.num_replicas_in_sync
    data = np.arange(5 * replicas + 1, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(
        rx.from_tensor_slices(data).batch(2 * replicas), BY_ROWS
    )
    calls = []
    with strategy.scope():
        total = rx.Variable(0.0, aggregation="SUM")

    def step(x):
        calls.append(isinstance(x, jax.core.Tracer))
        total.assign_add(jnp.sum(x))

    @rx.function
    def one(iterator):
        strategy.run(step, args=(next(iterator),))

    @rx.function
    def epoch(dataset):
        for x in dataset:
            strategy.run(step, args=(x,))

    def train():
        if way == "for":
            epoch(dataset)
            return
        iterator = iter(dataset)
        for _ in range(3):
            one(iterator)
        iterator.close()

    train()
    first = len(calls)
    train()
    equal(total, 2 * data.sum())
    assert len(calls) == first
    assert all(calls)


def test_results_on_every_strategy(strategy):
    replicas = strategy.num_replicas_in_sync
    data = np.arange(2 * replicas + 1, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset([data] * 2, BY_ROWS)

    def replica_fn(x):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        return x * 2, total

    @rx.function
    def step(iterator):
        return strategy.run(replica_fn, args=(next(iterator),))

    iterator = iter(dataset)
    for _ in range(2):
        doubled, total = step(iterator)
        components_equal(strategy, doubled, np.array_split(2 * data, replicas))
        components_equal(strategy, total, [data.sum()] * replicas)
    assert step.tracing_count == 1
    iterator.close()


def test_results_whose_shapes_differ(two):
    x = shares(two, X[:5])
    result = assert_compiled(two, lambda x: (x * 2, jnp.sum(x), {"rows": x[:, 0]}), x)
    components_equal(two, result[0], [2 * X[:3], 2 * X[3:5]])
    components_equal(two, result[2]["rows"], [X[:3, 0], X[3:5, 0]])
    equal(two.gather(result[0], axis=0), 2 * X[:5])
    assert {part.devices().pop() for part in result[0].values} == set(
        two.extended.worker_devices
    ), "each component is where its replica is"

    @rx.function
    def predict(x):
        doubled = two.run(lambda x: x * 2, args=(x,))
        halves = two.run(lambda y: y / 4, args=(doubled,))
        first, second = two.experimental_local_results(doubled)
        mean = two.reduce("MEAN", doubled, axis=0)
        return two.gather(halves, axis=0), halves, mean, first.sum() + second.sum()

    for _ in range(2):
        gathered, halves, mean, total = predict(x)
        equal(gathered, X[:5] / 2)
        components_equal(two, halves, [X[:3] / 2, X[3:5] / 2])
        equal(mean, 2 * X[:5].mean(0))
        equal(total, 2 * X[:5].sum(), 1e-5)
    assert predict.tracing_count == 1


def test_a_variant_does_not_reach_another(two):
    """The mean of no rows is NaN, and so are its gradients."""
    x = per_replica(two, [X[:3], X[:0]])

    def step(x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(jnp.ones(3))
        kept = jnp.where(len(x) > 0, gradient, 0)
        return value, rx.get_replica_context().all_reduce("SUM", kept)

    value, gradient = assert_compiled(two, step, x)
    own, none = two.experimental_local_results(value)
    assert np.isfinite(own)
    assert np.isnan(none)
    assert np.all(np.isfinite(gradient.values[0]))


def test_shapes_that_differ_in_other_dimensions_and_arguments(two):
    x, y = X[:4].reshape(2, 6), X[:8].reshape(4, 6)
    parts = {
        "a": per_replica(two, [x[:, :2], x[:1, :5]]),
        "b": per_replica(two, [y[:3], y[:3, :4]]),
    }

    def step(parts, scale):
        return parts["a"].sum() * scale + parts["b"].sum()

    result = assert_compiled(two, step, parts, np.float32(3))
    expected = [3 * x[:, :2].sum() + y[:3].sum(), 3 * x[:1, :5].sum() + y[:3, :4].sum()]
    components_equal(two, result, expected)


def test_what_a_replica_knows_of_the_others(two):
    x = shares(two, X[:5])

    def meet(strategy, x):
        return strategy.reduce("MEAN", x, axis=0), strategy.reduce("SUM", x, axis=0)

    def step(x):
        context = rx.get_replica_context()
        mean, total = context.merge_call(meet, args=(x,))
        everyone = context.all_gather(jnp.sum(x)[None], axis=0)
        return mean, total, everyone, context.replica_id_in_sync_group * len(x)

    mean, total, everyone, index = assert_compiled(two, step, x)
    components_equal(two, mean, [X[:5].mean(0)] * 2)
    components_equal(two, total, [X[:5].sum(0)] * 2)
    components_equal(two, everyone, [[X[:3].sum(), X[3:5].sum()]] * 2)
    components_equal(two, index, [0, 2])


def test_random_keys(two):
    def step(x, key):
        key = jax.random.fold_in(key, rx.get_replica_context().replica_id_in_sync_group)
        return jax.random.normal(key, x.shape) + x, jax.random.key_data(jax.random.split(key)[0])

    assert_compiled(two, step, shares(two, X[:5]), jax.random.key(1))


def test_sums_within_calls(two):
    """Sums that only a program can have."""

    @jax.checkpoint
    def inner(x, w):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(jnp.sin(x @ w)))
        return jax.nn.relu(x @ w).sum() + total

    def step(x):
        return jax.jit(jax.value_and_grad(inner, argnums=1))(x, jnp.ones(3))

    x, w = X[:5], np.ones(3)
    total = np.sin(x @ w).sum()
    value, gradient = two.run(rx.function(step), args=(shares(two, x),))
    own = [x[:3], x[3:]]
    components_equal(two, value, [np.maximum(part @ w, 0).sum() + total for part in own])
    # Both replicas have the sum, so a share counts twice.
    slopes = [(part @ w > 0) @ part + 2 * np.cos(part @ w) @ part for part in own]
    components_equal(two, gradient, slopes)


def _printed(x):
    jax.debug.callback(lambda total: None, jnp.sum(x))
    return x.sum()


def _gathered(x):
    return rx.get_replica_context().all_gather(x, axis=0)


def _by_shape(x):
    if len(x) == 3:  # only then
        return rx.get_replica_context().replica_id_in_sync_group * jnp.ones(2)
    return {"another": "structure"}["another"] and jnp.float32(1)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (_printed, [X[:3].sum(), X[3:5].sum()]),
        (_gathered, [X[:5]] * 2),
        (_by_shape, [np.zeros(2), 1.0]),
        (lambda x: float(np.asarray(x).sum()), [X[:3].sum(), X[3:5].sum()]),
    ],
    ids=["callback", "all_gather", "ranks", "numbers"],
)
def test_what_is_no_one_program_runs_eagerly(two, fn, expected):
    components_equal(two, assert_eager(two, fn, shares(two, X[:5])), expected)


def test_sums_in_loops_are_refused(two):
    """They behave as eager replicas do; on even shares they are compiled."""

    @rx.function
    def step(x):
        def body(carry, row):
            return carry + rx.get_replica_context().all_reduce("SUM", row), None

        return jax.lax.scan(body, jnp.zeros(3), x[:2])[0]

    components_equal(two, two.run(step, args=(shares(two, X[:4]),)), [X[:4].sum(0)] * 2)
    for _ in range(2):
        with pytest.raises(rx.errors.MeetingInTrace, match="inside a JAX transformation"):
            two.run(step, args=(shares(two, X[:5]),))


def test_many_variants_and_many_combinations_run_eagerly(two):
    many = rx.MirroredStrategy(cpus(8))
    result = assert_eager(many, jnp.sum, per_replica(many, [X[:count] for count in range(8)]))
    components_equal(many, result, [X[:count].sum() for count in range(8)])
    calls = []

    def step(x):
        calls.append(isinstance(x, jax.core.Tracer))
        return jnp.sum(x)

    compiled = rx.function(step)

    def run_many():
        for size in range(2, 22):
            value = per_replica(two, [np.ones(size, np.float32), np.ones(1, np.float32)])
            components_equal(two, two.run(compiled, args=(value,)), [size, 1])

    with pytest.warns(rx.errors.PerformanceHint, match=r"traced 11 times.*of shapes \[\["):
        run_many()
    assert calls.count(False) == 2 * (20 - 16)


def test_an_error_of_one_share_names_the_replica(two):
    @rx.function
    def step(x):
        if not len(x):
            raise ValueError("nothing here")
        return x.sum()

    for _ in range(2):
        with pytest.raises(ValueError, match="nothing here") as caught:
            two.run(step, args=(per_replica(two, [X[:3], X[:0]]),))
        assert any("replica 1 has 0 rows" in note for note in caught.value.__notes__)


def test_lower_and_audit_of_uneven_shares(two):
    f = rx.function(
        lambda x: two.run(lambda x: rx.get_replica_context().all_reduce("SUM", x.sum()), args=(x,))
    )
    x = shares(two, X[:5])
    text = f.lower(x).compile().as_text()
    assert "all-reduce" in text
    assert "conditional" not in text
    assert rx.audit(f, x).ok
