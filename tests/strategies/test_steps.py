"""`experimental_run_steps_on_iterator`: several steps equal a spelled-out loop."""

import gc
import weakref
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal

import replicax as rx

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* deprecated, here as in the reference"),
    pytest.mark.filterwarnings("ignore:.* workers share this dataset by rows"),
]

BATCH = 8


@pytest.fixture(params=[lambda f: f, rx.function], ids=["eager", "compiled"])
def wrap(request):
    return request.param


def run_steps(strategy, *args, **kwargs):
    return strategy.extended.experimental_run_steps_on_iterator(*args, **kwargs)


def rows_of(count):
    return np.linspace(-1, 1, 2 * count, dtype=np.float32).reshape(count, 2)


def batches_of(count, size=BATCH):
    return rx.from_tensor_slices(rows_of(count)).batch(size)


def iterating(strategy, dataset):
    """An iterator that is closed in the end."""
    return closing(iter(strategy.experimental_distribute_dataset(dataset)))


def sums(strategy, wrap=lambda f: f):
    """A step that adds up what it sees, and says so."""
    with strategy.scope():
        total = rx.Variable(0.0, aggregation="SUM")

    def replica(x):
        total.assign_add(jnp.sum(x))
        return jnp.sum(x)

    def step(context, x):
        context.set_last_step_output("sum", strategy.run(replica, args=(x,)), "SUM")

    return total, wrap(step)


@pytest.mark.parametrize("rows", [24, 20, 19], ids=["full", "smaller last", "uneven last"])
def test_steps_equal_a_loop_over_the_whole_batches(strategy, wrap, rows):
    with strategy.scope():
        weight = rx.Variable(np.float32([1.0, -2.0]))
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.5))
        seen = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def replica(context, x):
        def loss_fn():
            return jnp.sum((x @ weight.value - 1.0) ** 2) / BATCH

        loss, gradient = rx.value_and_grad(loss_fn, weight)()
        optimizer.apply_gradients([(gradient, weight)])
        seen.assign_add(jnp.float32(x.shape[0]))
        context.set_last_step_output("of replicas", {"loss": loss}, reduce_op="SUM")
        context.set_non_tensor_output("word", "said by replicas")
        return loss

    def step(context, x):
        loss = strategy.run(replica, args=(context, x))
        context.set_last_step_output("loss", loss, reduce_op=rx.ReduceOp.SUM)
        context.set_last_step_output("each", loss)
        context.set_non_tensor_output("number", 5)

    with iterating(strategy, batches_of(rows)) as iterator:
        context = run_steps(strategy, wrap(step), iterator, iterations=3)
        with pytest.raises(StopIteration):
            next(iterator)

    expected, velocity = np.float32([1.0, -2.0]), np.zeros(2, np.float32)
    for batch in np.split(rows_of(rows), [BATCH, 2 * BATCH]):
        error = batch @ expected - 1.0
        velocity = 0.5 * velocity + 2 * error @ batch / BATCH
        expected = expected - 0.1 * velocity
        loss = np.sum(error**2) / BATCH
    equal(weight, expected, 1e-5)
    equal(seen, rows)
    outputs = context.last_step_outputs
    assert set(outputs) == {"of replicas", "loss", "each"}
    equal(outputs["loss"], loss, 1e-5)
    equal(outputs["of replicas"]["loss"], loss, 1e-5)
    equal(strategy.reduce("SUM", outputs["each"], axis=None), loss, 1e-5)
    assert context.non_tensor_outputs == {"word": ("said by replicas",), "number": 5}
    assert context.run_op is None


def test_outputs_that_are_not_reduced_are_those_of_the_replicas(two, wrap):
    def step(context, x):
        context.set_last_step_output("means", two.run(lambda x: jnp.mean(x), args=(x,)))
        context.set_last_step_output("rows", two.run(lambda x: x * 2, args=(x,)))
        context.set_last_step_output("word", "kept")

    with iterating(two, [np.float32([1, 2, 3, 4]), np.float32([5, 6, 7, 8])]) as iterator:
        outputs = run_steps(two, wrap(step), iterator, 2).last_step_outputs
    components_equal(two, outputs["means"], [5.5, 7.5])
    components_equal(two, outputs["rows"], [[10, 12], [14, 16]])
    assert outputs["word"] == "kept"


def test_an_rx_function_is_one_scan_and_traced_once(two):
    calls = []
    total, step = sums(two)

    def counted(context, x):
        calls.append(x)
        step(context, x)

    compiled = rx.function(counted)
    with iterating(two, lambda: iter([np.ones(4, np.float32)] * 40)) as iterator:
        run_steps(two, compiled, iterator, 10)
        traced = len(calls)
        assert traced < 10, "it was traced, and not called for every step"
        run_steps(two, compiled, iterator, 10)
    with iterating(two, lambda: iter([np.ones(4, np.float32)] * 40)) as iterator:
        run_steps(two, compiled, iterator, 10)
        with two.scope():
            program = two.extended._steps._program(compiled).lower((), iterator, 10).as_text()
    assert len(calls) == traced
    assert program.count("stablehlo.while") == 1
    equal(total, 120.0)


def test_the_program_lives_as_long_as_the_function(two):
    _, step = sums(two)
    compiled = rx.function(step)
    with iterating(two, [np.ones(4, np.float32)] * 2) as iterator:
        run_steps(two, compiled, iterator, 2)
    program = weakref.ref(two.extended._steps._program(compiled))
    del compiled, step
    gc.collect()
    assert program() is None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_how_many(strategy, wrap, count):
    total, step = sums(strategy, wrap)
    initial = {"sum": -1.0, "never set": 7}
    with iterating(strategy, batches_of(32)) as iterator:
        context = run_steps(strategy, step, iterator, count, initial_loop_values=initial)
        equal(strategy.reduce("SUM", next(iterator), axis=0), rows_of(32)[count * 8 :][:8].sum(0))
    equal(total, rows_of(32)[: count * BATCH].sum(), 1e-5)
    last = rows_of(32)[(count - 1) * BATCH : count * BATCH].sum() if count else -1.0
    equal(context.last_step_outputs["sum"], last, 1e-5)
    assert context.last_step_outputs["never set"] == 7
    assert initial == {"sum": -1.0, "never set": 7}


def test_iterations_is_one_unless_said_otherwise(two, wrap):
    total, step = sums(two, wrap)
    with iterating(two, batches_of(32)) as iterator:
        run_steps(two, step, iterator)
    equal(total, rows_of(BATCH * 4)[:BATCH].sum(), 1e-5)


def test_too_few_elements(strategy, wrap):
    """Those that there are have been used, as in a loop."""
    total, step = sums(strategy, wrap)
    with (
        iterating(strategy, batches_of(16)) as iterator,
        pytest.raises(StopIteration, match="2 of 5 steps"),
    ):
        run_steps(strategy, step, iterator, 5)
    equal(total, rows_of(16).sum(), 1e-5)


def test_a_step_that_fails_while_it_is_traced_loses_no_element(two):
    _, step = sums(two)

    def failing(context, x):
        raise KeyError("mine")

    with iterating(two, [np.ones(4, np.float32), np.zeros(4, np.float32)]) as iterator:
        with pytest.raises(KeyError, match="mine"):
            run_steps(two, rx.function(failing), iterator, 2)
        context = run_steps(two, rx.function(step), iterator, 2)
    equal(context.last_step_outputs["sum"], 0.0)


def test_a_method(two):
    class Model:
        def __init__(self):
            with two.scope():
                self.total = rx.Variable(0.0, aggregation="SUM")

        @rx.function
        def step(self, context, x):
            two.run(lambda x: self.total.assign_add(jnp.sum(x)), args=(x,))

    models = [Model(), Model()]
    for model in models:
        with iterating(two, [np.ones(4, np.float32)] * 3) as iterator:
            run_steps(two, model.step, iterator, 3)
    assert [float(model.total) for model in models] == [12.0, 12.0]


def test_in_a_larger_function(two):
    total, step = sums(two)

    @rx.function
    def both(iterator):
        context = run_steps(two, rx.function(step), iterator, 2)
        return context.last_step_outputs["sum"] + 1

    with iterating(two, [np.ones(4, np.float32), np.ones(4, np.float32) * 2]) as iterator:
        equal(both(iterator), 9.0)
    equal(total, 12.0)


def test_functions_that_are_made_to_run_eagerly(two):
    seen = []

    def step(context, x):
        seen.append(two.experimental_local_results(x))

    rx.config.run_functions_eagerly(True)
    try:
        with iterating(two, [np.float32([1, 2]), np.float32([3, 4])]) as iterator:
            run_steps(two, rx.function(step), iterator, 2)
    finally:
        rx.config.run_functions_eagerly(False)
    assert [[x.item() for x in parts] for parts in seen] == [[1, 2], [3, 4]]


def test_outputs_said_in_a_function_given_to_merge_call(two, wrap):
    def replica(context, x):
        def merged(strategy, value):
            context.set_last_step_output("sum", value, "SUM")

        rx.get_replica_context().merge_call(merged, args=(jnp.sum(x),))

    def step(context, x):
        two.run(replica, args=(context, x))

    with iterating(two, [np.float32([1, 2, 3, 4])] * 2) as iterator:
        equal(run_steps(two, wrap(step), iterator, 2).last_step_outputs["sum"], 10.0)


def test_what_is_the_same_for_all_replicas_stays_so(two, wrap):
    def replica(context, x):
        def merged(strategy, value):
            total = strategy.reduce("SUM", value, axis=None)
            context.set_last_step_output("outputs", {"total": total, "each": value})

        rx.get_replica_context().merge_call(merged, args=(jnp.sum(x),))

    def step(context, x):
        two.run(replica, args=(context, x))

    with iterating(two, [np.float32([1, 2, 3, 4])] * 2) as iterator:
        outputs = run_steps(two, wrap(step), iterator, 2).last_step_outputs["outputs"]
    assert isinstance(outputs["total"], jax.Array)
    equal(outputs["total"], 10.0)
    components_equal(two, outputs["each"], [3.0, 7.0])


def test_outputs_said_in_a_compiled_part_of_a_step(two):
    """They would be tracers, or missing once that part is not traced again."""

    def step(context, x):
        replica = rx.function(lambda x: context.set_last_step_output("x", x.sum(), "SUM"))
        two.run(replica, args=(x,))

    with (
        iterating(two, batches_of(16)) as iterator,
        pytest.raises(RuntimeError, match=r"'x'.*Make the step itself an `rx.function`"),
    ):
        run_steps(two, step, iterator, 2)


def test_a_strategy_that_compiles_everything():
    strategy = rx.TPUStrategy(rx.cluster_resolver.TPUClusterResolver(["CPU:0", "CPU:1"]))
    calls = []

    def step(context, x):
        calls.append(x)
        strategy.run(lambda x: context.set_last_step_output("x", x.sum(), "SUM"), args=(x,))

    with iterating(strategy, [np.float32([1, 2])] * 20) as iterator:
        for _ in range(2):
            context = run_steps(strategy, step, iterator, 10)
            equal(context.last_step_outputs["x"], 3.0)
    assert len(calls) < 10


def test_outputs_said_inside_of_a_transformation(two):
    def replica(context, x):
        def loss_fn():
            context.set_last_step_output("loss", weight * x.sum(), "SUM")
            return weight * x.sum()

        return rx.grad(loss_fn, weight)()

    with two.scope():
        weight = rx.Variable(1.0)

    def step(context, x):
        two.run(replica, args=(context, x))

    with (
        iterating(two, batches_of(16)) as iterator,
        pytest.raises(TypeError, match="JAX transformation"),
    ):
        run_steps(two, rx.function(step), iterator, 2)


def test_the_name_of_an_output_is_a_string(two, wrap):
    def step(context, x):
        context.set_last_step_output(1, x)

    with iterating(two, batches_of(16)) as iterator, pytest.raises(TypeError, match="got 1"):
        run_steps(two, wrap(step), iterator, 2)


def test_a_replica_says_how_its_output_is_combined(strategy, wrap):
    def step(context, x):
        strategy.run(lambda x: context.set_last_step_output("x", x), args=(x,))

    with (
        iterating(strategy, batches_of(16)) as iterator,
        pytest.raises(ValueError, match=r"'x'.*without a `reduce_op`"),
    ):
        run_steps(strategy, wrap(step), iterator, 2)


def test_arrays_of_a_compiled_function_are_no_other_outputs(two):
    def step(context, x):
        context.set_non_tensor_output("x", x)

    with iterating(two, batches_of(16)) as iterator:
        context = run_steps(two, step, iterator, 2)
        assert isinstance(context.non_tensor_outputs["x"], rx.PerReplica)
    with (
        iterating(two, batches_of(16)) as iterator,
        pytest.raises(TypeError, match="set_last_step_output"),
    ):
        run_steps(two, rx.function(step), iterator, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fn": 3}, "needs a function; got 3"),
        ({"iterator": [1, 2]}, r"got \[1, 2\].*iter\(strategy"),
        (
            {"fn": rx.function(lambda c, x: x, input_signature=[np.ones(2)])},
            "cannot say what a context is",
        ),
        ({"iterations": -1}, "whole number of steps; got -1"),
        ({"iterations": 1.5}, "whole number of steps; got 1.5"),
        ({"initial_loop_values": [1]}, r"mapping.*got \[1\]"),
    ],
)
def test_bad_arguments(two, arguments, words):
    _, step = sums(two)
    with iterating(two, batches_of(16)) as iterator:
        given = {"fn": step, "iterator": iterator, **arguments}
        with pytest.raises(ValueError, match=words):
            run_steps(two, **given)
        assert iterator.get_state()["steps"] == 0


def test_replicas_cannot_run_steps(two):
    _, step = sums(two)
    with (
        iterating(two, batches_of(16)) as iterator,
        pytest.raises(RuntimeError, match="cross-replica context"),
    ):
        two.run(lambda: run_steps(two, step, iterator))


def test_an_output_has_no_gradient_and_keeps_no_tracer(two):
    """The context may be kept, and used after the program was made."""
    kept = []

    def step(context, x):
        kept.append(context)
        context.set_last_step_output("sum", two.reduce("SUM", x, axis=0))

    with iterating(two, [np.float32([1, 2])] * 3) as iterator:
        context = run_steps(two, rx.function(step), iterator, 3)
    assert isinstance(context.last_step_outputs["sum"], jax.Array)
    equal(context.last_step_outputs["sum"], 3.0)
    assert repr(context) == "<MultiStepContext with 'sum'>"
    assert kept
