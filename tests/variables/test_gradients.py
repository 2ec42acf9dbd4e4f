"""Derivatives with respect to variables, against jax.grad of plain arrays."""

import contextlib
import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica

import replicax as rx
from replicax.variables import _gradient_programs

pytestmark = pytest.mark.usefixtures("execution")

WEIGHT, BIAS = np.float32([[1, -2], [0.5, 3]]), np.float32([0.1, -0.2])


def make(strategy, value, **options):
    with strategy.scope():
        return rx.Variable(value, **options)


def loss_of(weight, bias, x):
    return jnp.sum(jax.nn.relu(x @ weight + bias) ** 2)


def test_gradients_are_those_of_the_replica_alone(strategy):
    weight, bias = make(strategy, WEIGHT), make(strategy, BIAS)
    count = strategy.num_replicas_in_sync
    inputs = np.random.default_rng(0).normal(size=(count, 3, 2)).astype(np.float32)

    def fn(x):
        return rx.value_and_grad(lambda x: loss_of(weight, bias, x), {"w": weight, "b": bias})(x)

    for _ in range(3):  # the third time by a program that was kept
        value, gradients = strategy.run(fn, args=(per_replica(strategy, inputs),))
        expected = [jax.value_and_grad(loss_of, (0, 1))(WEIGHT, BIAS, x) for x in inputs]
        for replica, own, gradient in zip(
            strategy.topology.local_replicas,
            strategy.experimental_local_results(value),
            strategy.experimental_local_results(gradients),
            strict=True,
        ):
            loss, (of_weight, of_bias) = expected[replica]
            equal(own, loss, 1e-5)
            equal(gradient["w"], of_weight, 1e-5)
            equal(gradient["b"], of_bias, 1e-5)


def test_in_cross_replica_context(strategy):
    weight = make(strategy, [1.0, 2.0])
    with strategy.scope():
        value, gradient = rx.value_and_grad(lambda: jnp.sum(weight**3), weight)()
    equal(value, 9.0)
    equal(gradient, [3, 12])


def test_structure_aux_and_grad(two):
    one, other = make(two, 2.0), make(two, 3.0)
    words = ["kept", None, 7]
    (value, aux), (first, (second, again)) = rx.value_and_grad(
        lambda x, *, y: (one * other * x * y, {"sum": one + other, "words": words, "v": one}),
        (one, (other, one)),
        has_aux=True,
    )(1.0, y=2.0)
    equal(value, 12.0)
    equal(aux["sum"], 5.0)
    assert aux["words"] == words
    assert aux["v"] is one
    equal(first, 6.0)
    equal(second, 4.0)
    equal(again, 6.0)
    equal(rx.grad(lambda: one**2, one)(), 4.0)
    gradients, aux = rx.grad(lambda: (one**2, "aux"), [one], has_aux=True)()
    equal(gradients[0], 4.0)
    assert aux == "aux"


def test_a_variable_that_is_not_read_has_a_zero_gradient(two):
    one, other = make(two, 2.0), make(two, [1.0, 2.0])
    _, gradients = rx.value_and_grad(lambda: one * 2, [one, other])()
    equal(gradients[0], 2.0)
    equal(gradients[1], [0, 0])
    equal(rx.grad(lambda: 3.0, one)(), 0.0)


def test_second_derivatives(two):
    x = make(two, 3.0)
    equal(rx.grad(lambda: rx.grad(lambda: x**3, x)(), x)(), 18.0)


def test_under_jax_transformations_of_other_arguments(two):
    w = make(two, 3.0)
    equal(jax.jit(lambda t: rx.grad(lambda: w**2 * t, w)())(2.0), 12.0)
    equal(jax.grad(lambda t: rx.grad(lambda: w**2 * t, w)())(2.0), 6.0)
    equal(jax.vmap(lambda t: rx.grad(lambda: w * t, w)())(jnp.arange(3.0)), [0, 1, 2])


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_variables_written_inside_are_written_once_it_has_returned(
    strategy, aggregation, synchronization
):
    """An example is the running average of a batch normalisation."""
    count = strategy.num_replicas_in_sync
    options = {"aggregation": aggregation, "synchronization": synchronization}
    weight, average = make(strategy, 2.0), make(strategy, 10.0, **options)
    plain = make(strategy, 10.0, **options)

    def loss(x):
        average.assign(average * 0.5)
        average.assign_add(x * weight)
        return average * weight  # reads what was just written

    def fn(x):
        value, gradient = rx.value_and_grad(loss, weight)(x)
        plain.assign(plain * 0.5)
        plain.assign_add(x * weight)
        return value, gradient, average.value

    for _ in range(2):
        inputs = per_replica(strategy, list(np.arange(1.0, count + 1)))
        value, _, after = strategy.run(fn, args=(inputs,))
        losses = strategy.experimental_local_results(value)
        assert len(losses) == len(strategy.topology.local_replicas)
        for own, now in zip(losses, strategy.experimental_local_results(after), strict=True):
            equal(own, now * 2.0)
    for copy, written_inside in zip(plain.values, average.values, strict=True):
        equal(copy.value, written_inside.value)


def test_what_a_variable_was_assigned_is_constant_for_the_gradient_through_other_replicas(two):
    weight = make(two, 3.0)
    average = make(two, 0.0, aggregation="SUM")

    def loss():
        average.assign(weight * 2.0)
        return weight * weight

    components_equal(two, two.run(lambda: rx.grad(loss, weight)()), [6.0, 6.0])
    equal(average, 12.0)


def test_a_failing_function_writes_nothing(two):
    weight, average = make(two, 3.0), make(two, 0.0)

    def loss():
        average.assign(1.0)
        raise KeyError

    with pytest.raises(KeyError):
        rx.grad(loss, weight)()
    equal(average, 0.0)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)
def test_functions_may_look_at_numbers(two):
    """A condition on a value cannot be traced; the function is then differentiated op by op."""
    weight = make(two, 3.0)

    def loss(x):
        if x * weight > 0:
            return x * weight
        return -2 * x * weight

    def fn(x):
        return rx.grad(loss, weight)(x)

    for _ in range(2):
        components_equal(two, two.run(fn, args=(per_replica(two, [1.0, -1.0]),)), [1.0, 2.0])


def test_collectives_inside(two):
    weight = make(two, 3.0)

    def loss(x):
        return rx.get_replica_context().all_reduce("SUM", x * weight) * x

    def fn(x):
        return rx.value_and_grad(loss, weight)(x)

    for _ in range(2):
        value, gradient = two.run(fn, args=(per_replica(two, [1.0, 2.0]),))
        components_equal(two, value, [9.0, 18.0])
        # Every replica's loss depends on every replica's input: x_i * (1 + 2).
        components_equal(two, gradient, [3.0, 6.0])


def test_merge_call_inside_sees_nothing_of_the_differentiation(two):
    weight, count = make(two, 3.0), make(two, 0.0)

    def loss():
        rx.get_replica_context().merge_call(lambda strategy: count.assign_add(1.0))
        return weight**2

    for step in range(2):
        components_equal(two, two.run(lambda: rx.grad(loss, weight)()), [6.0, 6.0])
        equal(count, step + 1.0)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)
def test_one_partial_that_needs_numbers_does_not_slow_another_down():
    weight = rx.Variable(3.0)

    def needy(factor):
        return weight * factor if weight > 0 else weight

    def good(factor):
        return weight * factor

    equal(rx.grad(functools.partial(needy, 2.0), weight)(), 2.0)
    before = len(_gradient_programs._cache.programs)
    equal(rx.grad(functools.partial(good, 5.5), weight)(), 5.5)
    assert len(_gradient_programs._cache.programs) == before + 1


def test_disable_jit_shows_numbers(two):
    weight, seen = make(two, 3.0), []

    def loss():
        seen.append(weight.value)
        return weight**2

    rx.grad(loss, weight)()
    with jax.disable_jit():
        rx.grad(loss, weight)()
    assert "3." not in str(seen[0])
    assert "3." in str(seen[1])


def test_the_function_is_called_every_time(two):
    weight, calls, factor = make(two, 3.0), [], 1.0

    def loss():
        calls.append(1)
        return weight * factor

    for factor in (1.0, 2.0, 3.0):
        equal(rx.grad(loss, weight)(), factor)
    assert len(calls) == 3


def test_programs_are_kept_and_told_apart_by_their_derivative_rules():
    weight = rx.Variable(3.0)

    def clipped(limit):
        @jax.custom_vjp
        def identity(x):
            return x

        identity.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -limit, limit),))
        return identity

    def doubled(factor):
        @jax.custom_jvp
        def identity(x):
            return x

        identity.defjvp(lambda p, t: (p[0], factor * t[0]))
        return identity

    one, half, double = clipped(1.0), clipped(0.5), doubled(2.0)
    for rule, expected in [(one, 1.0), (half, 0.5), (one, 1.0), (double, 4.0), (doubled(3.0), 6.0)]:
        equal(rx.grad(lambda rule=rule: rule(weight) * 2.0, weight)(), expected)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)
def test_repeated_steps_reuse_one_program_also_with_custom_derivatives():
    weight = rx.Variable(3.0)

    def loss(x):
        return jnp.sum(jax.nn.relu(x * weight))  # relu has a derivative rule of its own

    before = len(_gradient_programs._cache.programs)
    for step in range(4):
        equal(rx.grad(loss, weight)(jnp.full(3, step + 1.0)), 3.0 * (step + 1))
    assert len(_gradient_programs._cache.programs) == before + 1


@pytest.mark.filterwarnings("ignore::replicax.errors.PerformanceHint")
def test_a_function_that_is_always_new_does_not_compile_for_ever():
    weight = rx.Variable(3.0)

    def loss(factor):
        return weight * factor

    before = len(_gradient_programs._cache.programs)
    for step in range(40):
        equal(rx.grad(loss, weight)(float(step)), float(step))
    assert len(_gradient_programs._cache.programs) - before <= 16


def test_refused(two):
    weight, count = make(two, 3.0), make(two, 3)
    with pytest.raises(TypeError, match="with respect to variables"):
        rx.value_and_grad(lambda: weight, [weight, 3.0])
    with pytest.raises(TypeError, match="int32, which has no gradient"):
        rx.grad(lambda: weight * count, [weight, count])
    with pytest.raises(ValueError, match=r"no variables yet. Build it first, or pass a function"):
        rx.value_and_grad(lambda: weight, [])
    with pytest.raises(ValueError, match="no variables yet"):
        rx.value_and_grad(lambda: weight, lambda: [])()
    with pytest.raises(TypeError, match="scalar"):
        rx.grad(lambda: weight * jnp.ones(2), weight)()


def test_rules_with_static_arguments_are_not_mixed_up():
    weight = rx.Variable(1.0)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, factor):
        return x

    scaled.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (g * factor,))
    for factor in (1.0, 2.0, 10.0, 2.0):
        equal(rx.grad(lambda k: scaled(weight.value, k) * 3.0, weight)(factor), 3.0 * factor)


@pytest.mark.parametrize("kind", ["AUTO", "ON_READ"])
def test_writes_are_constant_for_the_gradient_as_with_a_tape(strategy, kind):
    weight = make(strategy, 3.0, aggregation="MEAN")
    other = make(strategy, 0.0, aggregation="MEAN", synchronization=kind)

    def through_other():
        other.assign(weight * 2)
        return weight * other

    def through_itself():
        weight.assign(5.0)
        return weight * weight

    count = strategy.num_replicas_in_sync
    for loss, expected in ((through_other, 6.0), (through_itself, 10.0)):
        gradient = strategy.run(lambda loss=loss: rx.grad(loss, weight)())
        components_equal(strategy, gradient, [expected] * count)
    equal(weight, 5.0)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)
def test_replicas_that_differ_in_what_they_write_are_told(two):
    weight = make(two, 1.0)
    a, b = make(two, 0.0, aggregation="MEAN"), make(two, 0.0, aggregation="MEAN")
    replica = lambda: rx.get_replica_context().replica_id_in_sync_group  # noqa: E731

    def different_variables():
        (a if replica() == 0 else b).assign(1.0)
        return weight * weight

    def one_fails():
        a.assign(3.0)
        if replica() == 1:
            raise FloatingPointError
        return weight * weight

    def catching():
        with contextlib.suppress(FloatingPointError):
            rx.grad(one_fails, weight)()

    for fn in (lambda: rx.grad(different_variables, weight)(), catching):
        with pytest.raises(rx.errors.CollectiveMismatch):
            two.run(fn)
    with pytest.raises(rx.errors.CollectiveMismatch):
        two.run(lambda: a.assign(1.0) if replica() == 0 else a.assign_add(2.0))
    components_equal(two, a, [0.0, 0.0])
    components_equal(two, b, [0.0, 0.0])


def test_second_derivatives_through_collectives(two):
    weight = make(two, 2.0)

    def first():
        all_reduce = rx.get_replica_context().all_reduce
        return rx.grad(lambda: all_reduce("SUM", weight**3), weight)()

    # The first derivative is the replicas' sum of ones, 2, times 3 * w**2; TensorFlow says 24 too.
    components_equal(two, two.run(lambda: rx.grad(first, weight)()), [24.0, 24.0])


def test_copies_are_differentiated_too(two):
    weight = make(two, 3.0)
    index = [0]
    equal(rx.grad(lambda: weight**2, weight)(), 6.0)
    gradients = two.run(lambda: rx.grad(lambda: weight.values[index[0]] ** 2, weight)())
    equal(two.experimental_local_results(gradients)[0], 6.0)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)
@pytest.mark.parametrize(
    "look",
    [
        lambda x: jnp.sum(x[x > 0]),
        lambda x: jnp.sum(jnp.ones(int(x[0]))),
        lambda x: float(f"{jnp.sum(x):.2f}"),
        lambda x: jnp.sum(x.block_until_ready()),
    ],
)
def test_functions_may_do_with_data_whatever_eager_code_may(two, look):
    weight, x = make(two, 3.0), jnp.float32([2, -1, 4])
    equal(rx.grad(lambda: look(x) * weight, weight)(), look(x), 1e-5)


def test_programs_keep_no_batch_alive():
    weight = rx.Variable(3.0)
    batch = jnp.ones(1000)
    reference = weakref.ref(batch)
    rx.grad(lambda x: jnp.sum(x * weight), weight)(batch)
    del batch
    gc.collect()
    assert reference() is None


# Variables that the differentiated function makes.


class Lazy:
    """A model that makes its weights when it is first called."""

    def __init__(self):
        self.weights = {}
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        if not self.weights:
            self.weights = {"w": rx.Variable(np.float32([2.0, 3.0])), "b": rx.Variable(1.0)}
        return jnp.sum(x * self.weights["w"]) ** 2 + self.weights["b"]


@pytest.mark.parametrize("function", [rx.grad, rx.value_and_grad])
def test_a_model_is_built_by_its_first_call(strategy, function):
    model = Lazy()
    own = per_replica(
        strategy, [np.float32([r + 1.0, 1.0]) for r in range(strategy.num_replicas_in_sync)]
    )

    def replica_step(x):
        result = function(model, lambda: model.weights)(x)
        return result if function is rx.grad else result[1]

    for _ in range(2):
        gradients = strategy.run(replica_step, args=(own,))
        expected = [2 * (2.0 * (r + 1) + 3) for r in range(strategy.num_replicas_in_sync)]
        components_equal(
            strategy,
            gradients["w"],
            [np.float32([(r + 1) * e, e]) for r, e in enumerate(expected)],
        )
        components_equal(strategy, gradients["b"], [1.0] * strategy.num_replicas_in_sync)
    if strategy.num_replicas_in_sync == 1:
        calls = model.calls
        function(model, lambda: model.weights)(jnp.ones(2))
        assert model.calls == calls + 1  # no further call once it is built


def test_what_the_first_try_wrote_is_not_written_twice(strategy):
    with strategy.scope():
        count = rx.Variable(0.0, aggregation="MEAN")
    model = Lazy()

    def loss(x):
        count.assign_add(1.0)
        return model(x)

    strategy.run(lambda: rx.grad(loss, lambda: model.weights)(jnp.ones(2)))
    equal(count.numpy(), 1.0)


def test_an_optimizer_asks_for_the_same_variables(strategy):
    model = Lazy()
    with strategy.scope():
        optimizer = rx.Optimizer(optax.sgd(0.01))

    def replica_step():
        variables = lambda: model.weights  # noqa: E731
        loss, gradients = rx.value_and_grad(lambda: model(jnp.ones(2)), variables)()
        optimizer.apply_gradients(gradients, variables)
        return loss

    strategy.run(replica_step)
    rate = 0.01 * strategy.num_replicas_in_sync
    equal(model.weights["w"].numpy(), [2.0 - rate * 10, 3.0 - rate * 10])
    strategy.run(lambda: optimizer.minimize(lambda: model(jnp.ones(2)), lambda: model.weights))
    assert int(optimizer.iterations) == 2


def test_a_loss_that_writes_what_it_creates(strategy):
    store = {}
    with strategy.scope():
        optimizer = rx.Optimizer(optax.sgd(0.5 / strategy.num_replicas_in_sync))

    def loss():
        if not store:
            store["w"], store["n"] = rx.Variable(2.0), rx.Variable(0.0, aggregation="SUM")
        store["n"].assign_add(1.0)
        return store["w"] ** 2

    for step in (1, 2):
        strategy.run(lambda: optimizer.minimize(loss, lambda: [store["w"]] if store else []))
        equal(store["n"].numpy(), step * strategy.num_replicas_in_sync)
        equal(store["w"].numpy(), 0.0)


def test_a_loss_that_creates_without_end_is_refused(two):
    made = []

    def loss():
        made.append(rx.Variable(2.0))
        return made[-1] ** 2

    with pytest.raises(ValueError, match="creates variables whenever it is called"):
        rx.grad(loss, lambda: made)()
    assert len(made) < 20


def test_a_model_that_is_a_nest_and_can_be_called_is_a_nest():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: object

        def __call__(self, x):
            return self.w * x

    model = Model(rx.Variable(3.0))
    gradient = rx.grad(lambda x: model(x), model)(2.0)
    assert isinstance(gradient, Model)
    equal(gradient.w, 2.0)
    optimizer = rx.Optimizer(optax.sgd(1.0))
    optimizer.apply_gradients(gradient, model)
    equal(model.w.numpy(), 1.0)
