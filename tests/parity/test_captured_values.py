"""Values that functions close over, or give to JAX as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica

import replicax as rx
from replicax._jax_compat import CANONICAL_FIRST

FUNCTIONS = {
    "lax.sin": (jax.lax.sin, np.sin),
    "lax.mul": (lambda x: jax.lax.mul(x, x), np.square),
    "lax.reshape": (lambda x: jax.lax.reshape(x, (6,)), np.ravel),
    "lax.dynamic_slice": (lambda x: jax.lax.dynamic_slice(x, (0, 1), (1, 2)), lambda x: x[:1, 1:]),
    "lax.scan": (
        lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=2)[0],
        lambda x: x + 2,
    ),
    "lax.cond": (lambda x: jax.lax.cond(True, lambda y: y + 1, lambda y: y, x), lambda x: x + 1),
    "jnp.sin": (jnp.sin, np.sin),
    "jnp.sum": (jnp.sum, np.sum),
    "jnp.where": (lambda x: jnp.where(True, x, 0.0), np.asarray),
    "jnp.concatenate": (lambda x: jnp.concatenate([x, x]), lambda x: np.concatenate([x, x])),
    "jax.nn.relu": (jax.nn.relu, np.asarray),
    "jax.jit": (jax.jit(lambda x: x * 2), lambda x: x * 2),
    "jax.grad": (jax.grad(lambda x: jnp.sum(x**2)), lambda x: 2 * x),
    "np.sum": (np.sum, np.sum),
    "np.concatenate": (lambda x: np.concatenate([x, x]), lambda x: np.concatenate([x, x])),
}
NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


@pytest.fixture(params=["variable", "mirrored", "one component", "copy"])
def value(request, two):
    """Something that is an array, and no `jax.Array`."""
    with two.scope():
        variable = rx.Variable(NUMBERS)
    if request.param == "variable":
        return variable
    if request.param == "copy":
        return variable.values[1]
    if request.param == "one component":
        return rx.PerReplica((jnp.asarray(NUMBERS),))
    return two.extended.broadcast_to(NUMBERS, variable)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_takes_it_as_an_array(value, name):
    function, expected = FUNCTIONS[name]
    equal(function(value), expected(NUMBERS))
    assert (value.shape, value.dtype, value.ndim) == ((2, 3), np.float32, 2)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("np.")])
def test_also_inside_of_a_program(value, name):
    function, expected = FUNCTIONS[name]
    equal(jax.jit(lambda: function(value))(), expected(NUMBERS))
    equal(rx.function(lambda: function(value))(), expected(NUMBERS))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("np.")])
def test_replicas_give_variables_to_functions(mirrored_strategy, execution, name):
    strategy = mirrored_strategy  # for other kinds of variables, one function is enough
    function, expected = FUNCTIONS[name]
    with strategy.scope():
        variable = rx.Variable(NUMBERS)
    results = strategy.run(lambda: function(variable))
    components_equal(strategy, results, [expected(NUMBERS)] * strategy.num_replicas_in_sync)


def test_variables_of_every_strategy_are_given_to_functions(strategy, execution):
    with strategy.scope():
        variable = rx.Variable(NUMBERS)
    results = strategy.run(lambda: jax.lax.sin(variable) + jnp.sum(variable))
    expected = np.sin(NUMBERS) + np.sum(NUMBERS)
    components_equal(strategy, results, [expected] * strategy.num_replicas_in_sync)


def test_whole_numbers_are_sizes_too(two, execution):
    with two.scope():
        count = rx.Variable(3)
    assert jnp.arange(count).shape == jnp.zeros(count).shape == jnp.linspace(0, 1, count).shape
    assert jax.random.split(jax.random.key(0), count).shape == (3,)
    equal(jax.lax.add(count, 1), 4)


@pytest.mark.parametrize("differentiate", [rx.grad, rx.value_and_grad])
def test_a_gradient_is_right_or_the_error_names_the_value(strategy, execution, differentiate):
    with strategy.scope():
        weight = rx.Variable(np.float32([3.0, 4.0]))

    def gradient():
        result = differentiate(lambda: jnp.sum(jax.lax.mul(weight, weight)), weight)()
        return result if differentiate is rx.grad else result[1]

    if execution == "compiled" and not CANONICAL_FIRST:
        with pytest.raises(ValueError, match=r"`variable\.value`"):  # rather than no gradient
            strategy.run(gradient)
        return
    gradients = strategy.run(gradient)
    components_equal(strategy, gradients, [[6.0, 8.0]] * strategy.num_replicas_in_sync)


# What a function closes over.


def numbers(strategy):
    count = strategy.num_replicas_in_sync
    return [np.float32([replica + 1.0, 10.0]) for replica in range(count)]


def test_a_result_of_reduce_meets_the_values_of_each_replica(strategy, execution):
    own = per_replica(strategy, numbers(strategy))
    total = strategy.reduce("SUM", own, axis=None)
    mean = strategy.reduce("MEAN", own, axis=0)
    gathered = strategy.gather(own, axis=0)
    results = strategy.run(lambda x: x / total + mean + jnp.max(gathered), args=(own,))
    expected = np.sum(numbers(strategy), axis=0)
    largest, average = np.max(numbers(strategy)), np.mean(numbers(strategy))
    components_equal(
        strategy, results, [x / expected + average + largest for x in numbers(strategy)]
    )


def test_what_a_compiled_function_reduced_meets_them_too(strategy, execution):
    own = per_replica(strategy, numbers(strategy))
    with strategy.scope():
        total = rx.function(lambda x: strategy.reduce("SUM", x, axis=None))(own)
    results = strategy.run(lambda x: x / total, args=(own,))
    expected = np.sum(numbers(strategy), axis=0)
    components_equal(strategy, results, [x / expected for x in numbers(strategy)])


@pytest.mark.one_process
def test_a_replica_finds_its_component_of_a_value_that_it_closes_over(strategy, execution):
    own = rx.PerReplica(numbers(strategy), strategy.topology)
    with strategy.scope():
        local = rx.Variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM")
        total = rx.Variable(np.zeros(2, np.float32), aggregation="SUM")
        offset = rx.Variable(np.float32([1.0, 2.0]))

    def replica_step():
        local.assign(own)
        total.assign_add(own)
        return jnp.multiply(own, 2.0) + offset

    results = strategy.run(replica_step)
    components_equal(strategy, results, [x * 2 + [1.0, 2.0] for x in numbers(strategy)])
    components_equal(strategy, local, numbers(strategy))
    equal(total.numpy(), np.sum(numbers(strategy), axis=0))


@pytest.mark.one_process
@pytest.mark.parametrize("where", ["argument", "closure"])
def test_what_meets_is_each_replicas_own(strategy, execution, where):
    own = per_replica(strategy, numbers(strategy))
    with strategy.scope():
        weight, optimizer = rx.Variable(np.zeros(2, np.float32)), rx.Optimizer(optax.sgd(1.0))
        copied = rx.Variable(np.zeros(2, np.float32))

    def merged(strategy, value):
        value = own if where == "closure" else value
        total = strategy.extended.reduce_to("SUM", value, copied)
        strategy.extended.update(copied, lambda copy, x: copy.assign(x), args=(total,))
        return strategy.reduce("SUM", value, axis=None), strategy.gather(value, axis=0)

    def replica_step():
        context = rx.get_replica_context()
        total, gathered = context.merge_call(merged, args=(own,))
        optimizer.apply_gradients([(own, weight)])
        return total, gathered, context.all_reduce("SUM", own)

    total, gathered, reduced = strategy.run(replica_step)
    count, expected = strategy.num_replicas_in_sync, np.sum(numbers(strategy), axis=0)
    components_equal(strategy, total, [expected] * count)
    components_equal(strategy, reduced, [expected] * count)
    components_equal(strategy, gathered, [np.concatenate(numbers(strategy))] * count)
    equal(copied.numpy(), expected)
    equal(weight.numpy(), -expected)


def test_values_of_the_function_around_it(strategy):
    """The results and arguments of one `run` of a compiled function are used in another."""
    own = per_replica(strategy, numbers(strategy))

    def step(x):
        doubled = strategy.run(lambda x: x * 2, args=(x,))
        return strategy.run(
            lambda: jnp.add(x, doubled) + rx.get_replica_context().all_reduce("SUM", doubled)
        )

    total = 2 * np.sum(numbers(strategy), axis=0)
    expected = [3 * x + total for x in numbers(strategy)]
    with strategy.scope():
        components_equal(strategy, rx.function(step)(own), expected)
        components_equal(strategy, step(own), expected)


@pytest.mark.one_process
def test_random_keys_and_metrics(strategy, execution):
    count = strategy.num_replicas_in_sync
    keys = rx.PerReplica([jax.random.key(replica) for replica in range(count)], strategy.topology)
    own = per_replica(strategy, numbers(strategy))
    with strategy.scope():
        mean = rx.metrics.Mean()

    def replica_step():
        mean.update_state(own)
        return jax.random.normal(jnp.asarray(keys), (2,))

    drawn = strategy.run(replica_step)
    components_equal(
        strategy, drawn, [jax.random.normal(jax.random.key(r), (2,)) for r in range(count)]
    )
    equal(mean.result(), np.mean(numbers(strategy)))


def test_several_components_have_no_attributes_of_an_array(two):
    value = per_replica(two, [1.0, 2.0])
    for name in ("shape", "dtype", "ndim", "size"):
        assert not hasattr(value, name)
        assert getattr(value, name, None) is None
    with pytest.raises(TypeError, match="one component per replica"):
        value.shape  # noqa: B018


@pytest.mark.one_process
def test_shapes_may_differ_in_eager_replicas(two, execution):
    shapes = [(3,), (1,)]
    own = per_replica(two, [np.ones(shape, np.float32) for shape in shapes])
    total = two.run(lambda: jnp.sum(own) + own.shape[0]) if execution == "eager" else None
    if total is None:
        with pytest.raises(
            ValueError, match=r"replica 0: \(3,\), replica 1: \(1,\).*Pass it in `args`"
        ):
            two.run(lambda: jnp.sum(own))
        return
    components_equal(two, total, [6.0, 2.0])


def test_a_mirrored_value_is_the_copy_of_the_replica(strategy, execution):
    with strategy.scope():
        variable = rx.Variable(np.zeros(2, np.float32))
    own = per_replica(strategy, numbers(strategy))
    total = strategy.extended.reduce_to("SUM", own, variable)
    if not isinstance(total, rx.Mirrored):
        return  # one copy, on the device that was asked for
    results = strategy.run(lambda x: x + total, args=(own,))
    expected = np.sum(numbers(strategy), axis=0)
    components_equal(strategy, results, [x + expected for x in numbers(strategy)])


@pytest.mark.one_process
def test_values_of_another_strategy_are_no_components(two, execution):
    three = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    value = per_replica(three, [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match=r"one component per replica.*dtype float32"):
        two.run(lambda: jnp.asarray(value))


# Loops of JAX around distributed values.

LOOPS = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (c, None), x, None, length=2),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c, x),
    "while_loop": lambda x: jax.lax.while_loop(lambda c: False, lambda c: c, x),
    "cond": lambda x: jax.lax.cond(True, lambda c: c, lambda c: c, x),
    "switch": lambda x: jax.lax.switch(0, [lambda c: c, lambda c: c], x),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_across_replicas_says_where_to_put_it(two, loop, compiled):
    value = per_replica(two, [1.0, 2.0])
    around = rx.function(LOOPS[loop]) if compiled else LOOPS[loop]
    with two.scope(), pytest.raises(TypeError, match="put the loop inside `run`"):
        around(value)
    results = two.run(rx.function(LOOPS[loop]) if compiled else LOOPS[loop], args=(value,))
    components_equal(two, results[0] if loop == "scan" else results, [1.0, 2.0])


def test_a_value_that_leaves_a_branch_gets_a_note(two):
    value = per_replica(two, [1.0, 2.0])
    step = rx.function(lambda: jax.lax.cond(True, lambda: value, lambda: value))
    with two.scope(), pytest.raises(TypeError) as caught:
        step()
    assert "Put the loop inside `run`" in "\n".join(caught.value.__notes__)


# What is taken apart.


@pytest.mark.one_process
def test_components_are_put_together_without_a_word(strategy, execution):
    own = strategy.run(lambda x: x * 2, args=(per_replica(strategy, numbers(strategy)),))
    components = strategy.experimental_local_results(own)
    if strategy.topology.logical_devices_per_replica > 1:
        with pytest.raises(ValueError, match="incompatible devices"):  # a mesh of devices each
            jnp.concatenate(components)
        return
    equal(jnp.concatenate(components), np.concatenate([2 * x for x in numbers(strategy)]))
    devices = [component.devices() for component in components]
    assert devices == [{device} for device in strategy.extended.worker_devices]
