"""`rx.audit`: a compiled step against the same step run eagerly."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer
from support import equal, per_replica, shares

import replicax as rx
from replicax.execution._comparison import Tolerance, compare

USUAL = Tolerance()


@pytest.fixture
def sampling():
    yield rx.config.audit_functions
    rx.config.audit_functions(None)


def traced(x):
    """Tell if the function is compiled, on which no function should depend."""
    return isinstance(x, Tracer)


def unequal_step(strategy, **variables):
    """A step that adds what it is given to variables, and a hundredth more when it is compiled."""

    @rx.function
    def step(x):
        def replica_step(x):
            for variable in variables.values():
                variable.assign_add(x * 1.01 if traced(x) else x)
            return x

        return strategy.run(replica_step, args=(x,))

    return step


# Programs that are right.


def training(strategy):
    """Variables of each kind and a compiled step that trains them."""
    with strategy.scope():
        weight = rx.Variable(np.float32([[1.0, 2.0], [3.0, -1.0]]), name="weight")
        seen = rx.Variable(np.int32(0), synchronization="ON_READ", aggregation="SUM")
        optimizer = rx.Optimizer(optax.adam(0.1))

    @rx.function
    def step(rows):
        def replica_step(rows):
            loss, gradient = rx.value_and_grad(lambda: jnp.sum((rows @ weight) ** 2), weight)()
            optimizer.apply_gradients([(gradient, weight)])
            seen.assign_add(rows.shape[0])
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(rows,)), axis=None)

    return step, weight, seen, optimizer


def test_a_training_step_agrees_and_leaves_what_the_compiled_step_leaves(strategy):
    replicas = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(size=(2 * replicas, 2)).astype(np.float32)
    step, weight, seen, optimizer = training(strategy)
    for _ in range(2):
        report = rx.audit(step, shares(strategy, rows))
        assert report.ok, str(report)
        assert report.compared >= 6  # the loss, the weight, the rows seen, three arrays of Adam
    other_step, other_weight, _, _ = training(strategy)
    losses = [other_step(shares(strategy, rows)) for _ in range(2)]
    np.testing.assert_array_equal(report.result, losses[-1])
    np.testing.assert_array_equal(weight.numpy(), other_weight.numpy())
    assert int(seen.numpy()) == 4 * replicas
    assert int(optimizer.iterations) == 2


def test_the_result_is_that_of_the_compiled_call(strategy):
    rows = np.arange(4.0 * strategy.num_replicas_in_sync, dtype=np.float32)

    @rx.function
    def total(rows, *, factor):
        sums = strategy.run(lambda rows: rows.sum() * factor, args=(rows,))
        return {"total": strategy.reduce("SUM", sums, axis=None), "name": "total", "none": None}

    report = rx.audit(total, shares(strategy, rows), factor=2.0)
    assert report.ok, str(report)
    equal(report.result["total"], 2 * rows.sum())
    assert report.result["name"] == "total"
    assert str(report) == "`total`: compiled and eager agree; arrays compared: 1"


def test_elements_are_taken_once(strategy):
    batch = 2 * strategy.num_replicas_in_sync
    data = np.arange(3.0 * batch, dtype=np.float32)
    pipeline = rx.from_tensor_slices(data).batch(batch)
    options = rx.InputOptions(auto_shard_policy="DATA")
    iterator = iter(strategy.experimental_distribute_dataset(pipeline, options))

    @rx.function
    def step(iterator):
        return strategy.reduce("SUM", next(iterator), axis=0)

    seen = [float(rx.audit(step, iterator).result) for _ in range(2)]
    assert iterator.get_state()["steps"] == 2
    seen.append(float(step(iterator)))
    assert sum(seen) == data.sum()
    with pytest.raises(rx.errors.InvalidArgument, match="at its end"):
        rx.audit(step, iterator)
    iterator.close()


@pytest.mark.one_process
def test_a_function_that_takes_several_elements_of_an_iterator(two):
    dataset = two.experimental_distribute_dataset([np.float32([k, k]) for k in range(6)])
    iterator = iter(dataset)

    @rx.function
    def step():
        return [two.reduce("SUM", next(iterator), axis=0) for _ in range(2)]

    assert [rx.audit(step).result for _ in range(3)] == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]


def test_random_keys_and_whole_numbers(strategy):
    with strategy.scope():
        key = rx.Variable(jax.random.key(0), trainable=False, aggregation="ONLY_FIRST_REPLICA")
        count = rx.Variable(np.int32(0), aggregation="SUM")

    @rx.function
    def step():
        def replica_step():
            new, now = jax.random.split(key.value)
            key.assign(new)
            count.assign_add(1)
            return jax.random.normal(now, (3,))

        return strategy.run(replica_step)

    for _ in range(2):
        report = rx.audit(step)
        assert report.ok, str(report)
    assert int(count) == 2 * strategy.num_replicas_in_sync


@pytest.mark.one_process
def test_a_plain_function_and_a_method(two):
    class Model:
        def __init__(self):
            self.weight = rx.Variable(1.0)

        @rx.function
        def step(self, x):
            return self.weight.assign_add(x) * 2

    with two.scope():
        model = Model()
    assert float(rx.audit(model.step, 1.0).result) == 4.0
    assert float(rx.audit(lambda x: model.weight + x, 1.0).result) == 3.0


# Programs that are wrong.


def test_variables_that_differ_are_named(strategy):
    with strategy.scope():
        right = rx.Variable(np.float32([0.0, 1.0]), name="right", aggregation="SUM")
        wrong = rx.Variable(np.float32([0.0, 1.0]), name="wrong", aggregation="SUM")
        local = rx.Variable(
            np.float32([0.0, 0.0]), name="local", synchronization="ON_READ", aggregation="SUM"
        )
    step = unequal_step(strategy, wrong=wrong, local=local)
    report = rx.audit(step, np.float32([1.0, 100.0]))
    assert not report.ok
    named = " ".join(difference.name for difference in report.differences)
    assert "variable 'wrong'" in named
    assert "variable 'local'" in named
    assert "right" not in named
    assert "output" not in named
    for difference in report.differences:
        replicas = strategy.num_replicas_in_sync if "wrong" in difference.name else 1
        equal(difference.largest, 1.0 * replicas, 1e-3)
        assert 0 < difference.bound < difference.largest / 100
        assert difference.dtype == "float32"
    # What is left is what the compiled step made.
    equal(wrong.numpy(), np.float32([1.01, 101.0]) * strategy.num_replicas_in_sync + [0, 1], 1e-5)
    equal(right.numpy(), [0.0, 1.0])


def test_outputs_that_differ_are_named(strategy):
    @rx.function
    def step(x):
        def replica_step(x):
            return {
                "a": x,
                "b": [x * 1.01 if traced(x) else x],
                "c": jnp.int32(3) if traced(x) else jnp.int32(4),
                "d": x.astype(jnp.bfloat16) if traced(x) else x,
                "e": x[:1] if traced(x) else x,
                "f": x / 0 if traced(x) else x,
                "g": x * jnp.nan,
            }

        return strategy.run(replica_step, args=(x,))

    report = rx.audit(step, np.float32([1.0, 2.0]))
    text = "\n".join(map(str, report.differences))
    assert "output['a']" not in text
    assert "output['b'][0]" in text
    assert "output['c']" in text
    assert "is bfloat16[2] compiled and float32[2] eagerly" in text
    assert "is float32[1] compiled and float32[2] eagerly" in text
    assert any("['f']" in d.name and d.largest == np.inf for d in report.differences)
    assert "output['g']" not in text
    assert "replicax doctor" in str(report)
    assert (" more\n" in str(report)) == (len(report.differences) > 20)


@pytest.mark.one_process
def test_outputs_of_different_structure(two):
    @rx.function
    def step(x):
        return [x] if traced(x) else [x, x]

    (difference,) = rx.audit(step, jnp.ones(2)).differences
    assert "PyTreeDef([*]) compiled and PyTreeDef([*, *]) eagerly" in difference.reason


def test_the_bound_is_that_of_the_dtype():
    ones = np.ones(3)
    for dtype, allowed, refused in (
        (np.float64, 1e-10, 1e-8),
        (np.float32, 1e-5, 1e-3),
        (np.float16, 5e-3, 0.05),
        (jnp.bfloat16, 0.02, 0.1),
    ):
        assert compare("x", ones.astype(dtype), (ones + allowed).astype(dtype), USUAL) is None
        found = compare("x", ones.astype(dtype), (ones + refused).astype(dtype), USUAL)
        assert found is not None
        assert found.bound < found.largest
    assert compare("x", np.int32([1]), np.int32([2]), Tolerance(1.0)) is not None
    assert compare("x", np.array([True]), np.array([False]), USUAL) is not None
    assert compare("x", np.complex64([1j]), np.complex64([1j * 1.1]), USUAL) is not None
    assert compare("x", np.int64([2**53]), np.int64([2**53 + 1]), USUAL) is not None
    assert compare("x", np.zeros((0, 2)), np.zeros((0, 2)), USUAL) is None
    assert compare("x", np.float64([1e308]), np.float64([-1e308]), USUAL).largest == np.inf
    zeroed = np.full(3, 0.004, jnp.bfloat16), np.zeros(3, jnp.bfloat16)
    assert compare("x", *zeroed, USUAL) is not None
    assert compare("x", *zeroed, Tolerance(atol=0.01)) is None


def test_small_elements_are_rounded_like_the_large_ones_beside_them():
    assert compare("x", np.float32([1e-6, 1.0]), np.float32([2e-6, 1.0]), USUAL) is None
    assert compare("x", np.float32([1e-6]), np.float32([2e-6]), USUAL) is not None
    assert compare("x", np.float32([1e-9]), np.float32([0.0]), USUAL) is None
    assert compare("x", np.float32([1e-7]), np.float32([0.0]), USUAL) is not None


@pytest.mark.one_process
def test_rtol_says_how_much_is_allowed(two):
    with two.scope():
        weight = rx.Variable(np.float32([0.0, 0.0]), name="weight", aggregation="SUM")
    step = unequal_step(two, weight=weight)
    assert not rx.audit(step, np.float32([1.0, 2.0]), rtol=0.001).ok
    weight.assign([0.0, 0.0])
    assert rx.audit(step, np.float32([1.0, 2.0]), rtol=0.02).ok


@pytest.mark.parametrize("tolerance", [{"rtol": -1.0}, {"atol": np.nan}])
def test_tolerances_are_numbers_from_zero_on(tolerance):
    with pytest.raises(rx.errors.InvalidArgument, match="from 0 on"):
        rx.audit(jnp.sum, jnp.ones(2), **tolerance)
    with pytest.raises(rx.errors.InvalidArgument, match="from 0 on"):
        rx.config.audit_functions(1, **tolerance)


# What functions may do.


def test_loops_of_jax_that_write_and_meet(strategy):
    with strategy.scope():
        total = rx.Variable(np.float32(0.0), name="total", aggregation="SUM")

    @rx.function
    def step(rows):
        def replica_step(rows):
            def body(carry, row):
                total.assign_add(row)
                return carry + rx.get_replica_context().all_reduce("SUM", row), row

            summed, _ = jax.lax.scan(body, jnp.float32(0.0), rows)
            return jax.lax.cond(summed > 0, lambda: summed, lambda: -summed)

        return strategy.run(replica_step, args=(rows,))

    report = rx.audit(step, np.float32([1.0, 2.0]))
    assert report.ok, str(report)
    equal(total.numpy(), 3.0 * strategy.num_replicas_in_sync)


@pytest.mark.one_process
def test_arguments_that_a_function_changes(two):
    @rx.function
    def step(batch):
        return batch.pop("x") * 2

    batch = {"x": jnp.ones(2)}
    for _ in range(2):
        equal(rx.audit(step, batch).result, [2.0, 2.0])
    assert list(batch) == ["x"]


@pytest.mark.one_process
def test_loops_of_zero_rounds(two):
    """Without `jax.jit`, JAX has none."""

    @rx.function
    def step(rows):
        return jax.lax.scan(lambda carry, row: (carry + row, row), 0.0, rows)

    assert rx.audit(step, jnp.ones(0)).ok


@pytest.mark.one_process
def test_no_program_of_a_part_is_trusted(two):
    """The gradient of an eager step is compiled as well, and may be wrong in the same way."""
    with two.scope():
        weight = rx.Variable(2.0, name="weight")
    compiled = []

    def loss(x):
        compiled.append(not jax.config.jax_disable_jit)
        return x * weight

    @rx.function
    def step(x):
        return two.run(lambda x: rx.grad(loss, weight)(x), args=(x,))

    step(np.float32(3.0))
    compiled.clear()
    rx.audit(step, np.float32(3.0))
    assert compiled == [False, False]


@pytest.mark.one_process
def test_another_thread_keeps_what_it_writes(two):
    with two.scope():
        weight, count = rx.Variable(1.0, name="weight"), rx.Variable(0, name="count")
    started, written = threading.Event(), threading.Event()

    @rx.function
    def step(x):
        if not isinstance(x, Tracer):
            started.set()
            assert written.wait(30)
        return weight * x + count.value

    def write():
        assert started.wait(30)
        count.assign(5)
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    rx.audit(step, jnp.float32(2.0))
    thread.join()
    assert int(count) == 5


# Where there is nothing to compare.


@pytest.mark.one_process
def test_what_runs_as_python_is_refused_before_anything_changes(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")
    dataset = two.experimental_distribute_dataset([np.float32([1.0, 2.0])] * 3)

    @rx.function
    def add(rows):
        two.run(lambda rows: total.assign_add(rows.sum()), args=(rows,))

    @rx.function
    def loop(dataset):
        for rows in dataset:
            add(rows)

    with pytest.raises(rx.errors.InvalidArgument, match="shapes differ"):
        rx.audit(add, rx.PerReplica((jnp.ones(1), jnp.ones(2))))
    with pytest.raises(rx.errors.InvalidArgument, match="loop over a dataset"):
        rx.audit(loop, dataset)
    with pytest.raises(rx.errors.InvalidType, match="ShapeDtypeStruct"):
        rx.audit(add, jax.ShapeDtypeStruct((1,), jnp.float32))
    with pytest.raises(rx.errors.InvalidType, match="calls a function"):
        rx.audit(3, jnp.ones(1))
    with pytest.raises(rx.errors.ContextError, match="outside of `run`"):
        two.run(lambda: rx.audit(add, jnp.ones(1)))
    rx.config.run_functions_eagerly(True)
    try:
        with pytest.raises(rx.errors.ContextError, match="run_functions_eagerly"):
            rx.audit(add, jnp.ones(1))
    finally:
        rx.config.run_functions_eagerly(False)
    assert float(total) == 0.0


@pytest.mark.one_process
def test_an_eager_run_that_fails_changes_nothing(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")
    iterator = iter(two.experimental_distribute_dataset([np.float32([k, k]) for k in range(3)]))

    @rx.function
    def step(iterator):
        def replica_step(rows):
            total.assign_add(rows.sum() + 1)
            if not traced(rows):
                raise OSError("only eagerly")

        two.run(replica_step, args=(next(iterator),))

    with pytest.raises(OSError, match="only eagerly") as caught:
        rx.audit(step, iterator)
    assert any("eager run of an audit" in note for note in caught.value.__notes__)
    assert float(total) == 0.0
    assert iterator.get_state()["steps"] == 0
    step(iterator)
    assert float(total) == 2.0
    iterator.close()


# Every n-th call.


def test_every_nth_call_is_audited(strategy, sampling):
    with strategy.scope():
        weight = rx.Variable(np.float32([0.0, 0.0]), name="weight", aggregation="SUM")
    eager_calls = []

    @rx.function
    def step(x):
        def replica_step(x):
            if not traced(x):
                eager_calls.append(1)
            weight.assign_add(x)

        strategy.run(replica_step, args=(x,))

    step(np.float32([1.0, 2.0]))  # before it is switched on
    sampling(every=3)
    local = len(strategy.extended.worker_devices)
    for call in range(7):
        step(np.float32([1.0, 2.0]))
        assert len(eager_calls) == local * (call // 3 + 1)
    sampling(None)
    step(np.float32([1.0, 2.0]))
    assert len(eager_calls) == local * 3
    equal(weight.numpy(), np.float32([9.0, 18.0]) * strategy.num_replicas_in_sync)


def test_a_sampled_call_that_differs_raises_and_keeps_its_state(strategy, sampling):
    with strategy.scope():
        weight = rx.Variable(np.float32([0.0, 0.0]), name="weight", aggregation="SUM")
    step = unequal_step(strategy, weight=weight)
    sampling(every=2)
    with pytest.raises(rx.errors.AuditFailed, match="variable 'weight'") as caught:
        step(np.float32([1.0, 2.0]))
    assert isinstance(caught.value, RuntimeError)
    assert not caught.value.report.ok
    replicas = strategy.num_replicas_in_sync
    equal(weight.numpy(), np.float32([1.01, 2.02]) * replicas, 1e-5)
    step(np.float32([1.0, 2.0]))  # the second call is not sampled
    equal(weight.numpy(), np.float32([2.02, 4.04]) * replicas, 1e-5)


@pytest.mark.one_process
def test_sampling_follows_into_loops_and_to_uneven_shares(two, sampling):
    with two.scope():
        total = rx.Variable(0.0, name="total", aggregation="SUM")
    rows = [np.float32([1.0, 2.0]), np.float32([3.0])]
    dataset = two.experimental_distribute_dataset(rows)

    def add(rows):
        total.assign_add(jnp.sum(rows) * (2 if traced(rows) else 1))

    @rx.function
    def epoch(dataset):
        for rows in dataset:
            two.run(add, args=(rows,))

    sampling(every=1)
    with pytest.raises(rx.errors.AuditFailed, match="variable 'total'"):
        epoch(dataset)
    total.assign(0.0)
    with pytest.raises(rx.errors.AuditFailed, match="variable 'total'"):
        two.run(rx.function(add), args=(per_replica(two, [np.float32([1, 1]), np.float32([1])]),))
    assert float(total) == 6.0


@pytest.mark.one_process
def test_sampling_allows_what_it_is_told_to(two, sampling):
    with two.scope():
        weight = rx.Variable(np.float32([0.0, 0.0]), name="weight", aggregation="SUM")
    step = unequal_step(two, weight=weight)
    sampling(every=1, rtol=0.02)
    step(np.float32([1.0, 2.0]))
    sampling(every=1, atol=0.2)
    step(np.float32([1.0, 2.0]))
    sampling(every=1)
    with pytest.raises(rx.errors.AuditFailed):
        step(np.float32([1.0, 2.0]))


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True])
def test_every_is_a_whole_number(every, sampling):
    with pytest.raises(rx.errors.InvalidArgument, match="must be a whole number"):
        sampling(every=every)


@pytest.mark.one_process
def test_the_optimizer_that_a_program_wraps(two):
    """Sums of gradients in packs, slots, and a variable without elements."""
    with two.scope():
        weights = [rx.Variable(np.full(shape, 0.5, np.float32)) for shape in ((3, 2), (0, 2), (2,))]
        optimizer = rx.Optimizer(optax.adam(0.1))

    def loss(x):
        kernel, nothing, bias = weights
        return jnp.sum((x @ kernel + bias) ** 2) + jnp.sum(nothing.value)

    @rx.function
    def step(x):
        def replica_step(x):
            value, gradients = rx.value_and_grad(loss, weights)(x)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return value

        return two.run(replica_step, args=(x,))

    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for _ in range(3):
        report = rx.audit(step, shares(two, rows))
        assert report.ok, str(report)
