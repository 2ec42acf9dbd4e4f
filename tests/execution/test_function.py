"""rx.function: signatures, state, control flow, failures."""

import contextlib
import gc
import inspect
import subprocess
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica, shares

import replicax as rx
from replicax.variables import storage_of


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


@pytest.fixture
def counter(two):
    with two.scope():
        return rx.Variable(0.0, aggregation="SUM", name="counter")


# What it is.


def test_decorator_with_and_without_arguments():
    @rx.function
    def plain(x):
        """Doubles."""
        return x * 2

    @rx.function(input_signature=[jax.ShapeDtypeStruct((), jnp.float32)])
    def signed(x):
        return x * 2

    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Doubles."
    assert repr(plain) == "<rx.function plain>"
    equal(plain(jnp.float32(2)), 4.0)
    equal(signed(2), 4.0)
    with pytest.raises(TypeError, match="compiles a function"):
        rx.function(3)


def test_methods():
    class Model:
        def __init__(self, factor):
            self.factor = rx.Variable(factor)

        @rx.function
        def double(self, x):
            return x * self.factor

    one, other = Model(2.0), Model(3.0)
    equal(one.double(jnp.float32(1)), 2.0)
    equal(other.double(jnp.float32(1)), 3.0)
    equal(one.double(jnp.float32(5)), 10.0)
    assert one.double.tracing_count == 2
    reference = weakref.ref(one)
    del one
    gc.collect()
    assert reference() is None  # programs keep no object alive


def test_one_trace_for_each_signature(two):
    @rx.function
    def f(x, flag=True, *, word="a"):
        return x + 1 if flag else x

    for x in (np.float32(1), np.float32(2), jnp.float32(3)):
        f(x)
    assert f.tracing_count == 2  # NumPy's and JAX's
    f(jnp.ones(2))
    f(jnp.ones(2), flag=False)
    f(jnp.ones(2), word="b")
    f([jnp.ones(2)], False)
    f(jnp.ones(2, jnp.int32))
    with two.scope():
        f(jnp.ones(2))
    assert f.tracing_count == 8
    for _ in range(3):
        f(jnp.ones(2), word="b")
    assert f.tracing_count == 8


def test_a_function_is_called_once_a_signature_but_for_the_pass_that_finds_variables(two, counter):
    pure, reads = [], []

    @rx.function
    def f(x):
        pure.append(1)
        return x

    @rx.function
    def g(x):
        reads.append(1)
        return x + counter

    for step in range(5):
        f(jnp.float32(step))
        g(jnp.float32(step))
    assert (len(pure), len(reads)) == (1, 2)


@pytest.mark.parametrize("option", ["autograph", "jit_compile", "reduce_retracing"])
def test_options_of_tf_function(two, option):
    for value in (None, True, False):

        @rx.function(**{option: value})
        def total(x):
            return two.reduce("SUM", two.run(lambda x: x * 2, args=(x,)), axis=None)

        assert float(total(jnp.float32(3))) == 12
        assert total.tracing_count == 1
    for value in (1, "yes", jnp.ones(1000)):
        with pytest.raises(TypeError, match=f"`{option}` of `rx.function` must be True"):
            rx.function(**{option: value})


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (3, r"must be a list or tuple, with one entry for each argument; got 3\. Give something"),
        ("x", "must be a list or tuple"),
        (np.ones(2), r"must be a list or tuple.*got array of shape \(2,\)"),
        ([3], "must say the shape and dtype of each argument; got 3"),
        (["float32"], "shape and dtype of each argument; got 'float32'"),
        ([{"x": jnp.float32}], "shape and dtype of each argument; got <class"),
    ],
)
def test_what_is_no_input_signature_is_refused_at_once(signature, words):
    with pytest.raises(rx.errors.InvalidType, match=f"The input signature of `step` .*{words}"):

        @rx.function(input_signature=signature)
        def step(x):
            return x


def test_input_signature(two):
    spec = jax.ShapeDtypeStruct((4, 2), jnp.float32)

    @rx.function(input_signature=[{"x": spec}])
    def f(batch):
        return two.run(lambda x: jnp.sum(x), args=(batch["x"],))

    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    components_equal(two, f({"x": shares(two, rows)}), [rows[:4].sum(), rows[4:].sum()])
    # A last partial batch is no mismatch, even and uneven ones.
    components_equal(two, f({"x": shares(two, rows[:4])}), [rows[:2].sum(), rows[2:4].sum()])
    components_equal(two, f({"x": shares(two, rows[:5])}), [rows[:3].sum(), rows[3:5].sum()])
    for wrong in (rows.astype(np.int32), rows[:, :1], np.concatenate([rows, rows])):
        with pytest.raises(ValueError, match=r"\(4, 2\).*was called with a value of shape"):
            f({"x": shares(two, wrong)})
    with pytest.raises(TypeError, match="another structure"):
        f([shares(two, rows)])


def test_lower_shows_the_program(two, counter):
    @rx.function
    def f(x):
        return two.run(lambda x: counter.assign_add(x).value, args=(x,))

    lowered = f.lower(jnp.float32(1))
    assert "all-reduce" in lowered.compile().as_text()
    assert lowered.cost_analysis() is not None
    equal(counter, 0.0)
    uneven = per_replica(two, [np.ones(1), np.ones(2)])
    with pytest.raises(ValueError, match="runs eagerly"):
        f.lower(uneven)


def test_run_functions_eagerly(two):
    seen = []

    @rx.function
    def f(x):
        seen.append(float(x))
        return two.run(lambda x: x * 2, args=(x,))

    try:
        rx.config.run_functions_eagerly(True)
        components_equal(two, f(jnp.float32(3)), [6.0, 6.0])
    finally:
        rx.config.run_functions_eagerly(False)
    assert seen == [3.0]
    assert f.tracing_count == 0


def test_a_retrace_storm_warns_once_and_names_the_argument():
    @rx.function
    def f(x, rate):
        return x * rate

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(15):
            f(jnp.float32(1), float(step))
    (warning,) = caught
    assert issubclass(warning.category, rx.errors.PerformanceHint)
    assert "traced 11 times" in str(warning.message)
    assert "argument [1] changed from 9.0 to 10.0" in str(warning.message)


def test_the_hint_to_compile_comes_once(two):
    def step():
        return None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(500):
            two.run(step)
    (warning,) = caught
    assert "`rx.function`" in str(warning.message)


def test_the_hint_to_divide_batches_comes_once(two):
    uneven = per_replica(two, [np.ones(1, np.float32), np.ones(2, np.float32)])
    f = rx.function(lambda x: two.run(lambda x: None, args=(x,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(500):
            f(uneven)
    (warning,) = caught
    assert "divides by the number of replicas" in str(warning.message)


def test_unhashable_arguments_are_refused():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            return True

    with pytest.raises(TypeError, match="neither an array nor hashable"):
        rx.function(lambda x: 1.0)(Odd())


# Where it can be called, and what goes in and out.


def test_given_to_run_and_around_run_give_the_same(strategy):
    count = strategy.num_replicas_in_sync
    inputs = per_replica(strategy, list(np.arange(count, dtype=np.float32)))

    def fn(x, scale):
        return {"y": x * scale, "id": replica_id(), "none": None, "word": "w", "n": 3}

    inner = strategy.run(rx.function(fn), args=(inputs, 2.0))
    outer = rx.function(lambda x: strategy.run(fn, args=(x, 2.0)))(inputs)
    eager = strategy.run(fn, args=(inputs, 2.0))
    for out in (inner, outer):
        assert out["none"] is None
        assert out["word"] == "w"
        for name in ("y", "id"):
            parts = strategy.experimental_local_results(eager[name])
            assert len(parts) == len(strategy.topology.local_replicas)
            compiled = strategy.experimental_local_results(out[name])
            for part, number in zip(compiled, parts, strict=True):
                equal(part, number)


@pytest.mark.one_process
def test_functions_that_jax_has_traced_before_use_the_variables_of_each_program(two):
    """JAX keeps what it has traced of functions that are the same object in every pass."""
    with two.scope():
        weight = rx.Variable(1.0)
        seen = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    @jax.jit
    def scaled(x):
        return x * weight.value

    def add(total, x):
        seen.assign_add(x)
        return total + weight.value * x, None

    def step(rows):
        return jax.lax.scan(add, 0.0, rows)[0], scaled(rows.sum())

    around = rx.function(lambda rows: two.run(step, args=(rows,)))
    given = rx.function(step)
    total = 0.0
    for factor, count in ((1.0, 4), (10.0, 4), (10.0, 6)):
        weight.assign(factor)
        rows = np.arange(count, dtype=np.float32)
        for run in (around, lambda rows: two.run(given, args=(rows,))):
            for result in run(two.split(rows)):
                equal(two.reduce("SUM", result, axis=None), factor * rows.sum())
            total += rows.sum()
            equal(seen.value, total)


def test_python_numbers_that_come_in_stay_numbers(strategy):
    settings = {"rate": 0.25, "training": True, "layers": 700}

    def step(settings, x):
        made = -1.0 if settings["training"] else 1.0
        return settings, made, x * settings["rate"]

    for function in (lambda *args: strategy.run(step, args), step):
        compiled = rx.function(function)
        state = settings
        for _ in range(2):
            state, made, scaled = compiled(state, jnp.ones(3))
            assert state == settings
            assert all(type(state[name]) is type(settings[name]) for name in settings)
            for each in (made, scaled):
                assert isinstance(each, (jax.Array, rx.DistributedValues))
        assert compiled.tracing_count == 1


def test_several_runs_reduce_and_gather_in_one_function(two, counter):
    @rx.function
    def f(x):
        first = two.run(lambda x: x * 2, args=(x,))
        second = two.run(lambda x, y: (x + y, counter.assign_add(1.0).value), args=(x, first))
        return {
            "sum": two.reduce("SUM", second[0], axis=None),
            "mean": two.reduce("MEAN", first, axis=0),
            "gathered": two.gather(first, axis=0),
            "local": two.experimental_local_results(first),
            "counter": counter,
            "mirrored": two.extended.reduce_to("SUM", first, counter),
        }

    x = per_replica(two, [np.float32([1, 2]), np.float32([3, 4])])
    for step in range(2):
        out = f(x)
        equal(out["sum"], [12, 18])
        equal(out["mean"], 5.0)
        equal(out["gathered"], [2, 4, 6, 8])
        equal(out["local"][1], [6, 8])
        assert out["counter"] is counter
        equal(counter, 2.0 * (step + 1))
        assert isinstance(out["mirrored"], rx.Mirrored)
        components_equal(two, out["mirrored"], [[8, 12], [8, 12]])
    assert f.tracing_count == 1


def test_functions_that_call_functions(two, counter):
    @rx.function
    def inner(x):
        return two.run(lambda x: counter.assign_add(x).value, args=(x,))

    @rx.function
    def outer(x):
        inner(x)
        return inner(x)

    components_equal(two, outer(jnp.float32(1)), [4.0, 4.0])
    assert (outer.tracing_count, inner.tracing_count) == (1, 0)


def test_in_an_eager_replica_it_is_part_of_the_replica(two, counter):
    @rx.function
    def inner(x):
        return rx.get_replica_context().all_reduce("SUM", x)

    components_equal(two, two.run(lambda: inner(replica_id() + 1.0)), [3.0, 3.0])


def test_inside_value_and_grad_and_jit(two):
    with two.scope():
        weight = rx.Variable(3.0)
    square = rx.function(lambda: weight**2)
    equal(rx.grad(lambda: square(), weight)(), 6.0)
    equal(jax.jit(lambda t: square() * t)(2.0), 18.0)


def test_arrays_of_other_devices_are_brought_along(two, counter):
    elsewhere = jax.device_put(jnp.float32([1, 2]), jax.devices()[5])
    f = rx.function(lambda x: two.run(lambda x: x * counter, args=(x,)))
    counter.assign(2.0)
    components_equal(two, f(elsewhere), [[2, 4], [2, 4]])
    others = rx.MirroredStrategy(["CPU:5", "CPU:6"]).topology.replicate(jnp.float32([1, 2]))
    components_equal(two, f(others), [[2, 4], [2, 4]])


def test_plain_results_are_on_the_first_device(two):
    f = rx.function(lambda x: two.reduce("SUM", two.run(lambda x: x, args=(x,)), axis=None))
    total = f(per_replica(two, [1.0, 2.0]))
    assert total.devices() == {two.extended.worker_devices[0]}
    equal(total + 1.0, 4.0)


def test_uneven_shares_are_compiled_as_others_are(two):
    traces = []

    @rx.function
    def f(x):
        traces.append(1)
        per_replica_sum = two.run(lambda x: jnp.sum(x), args=(x,))
        return two.reduce("SUM", per_replica_sum, axis=None), two.reduce("MEAN", x, axis=0)

    for rows in (8, 7, 1, 8):
        batch = np.arange(rows, dtype=np.float32)
        total, mean = f(shares(two, batch))
        equal(total, batch.sum())
        equal(mean, batch.mean())
    assert f.tracing_count == 3
    assert len(traces) == 3


def test_uneven_shares_from_outside(two):
    x = per_replica(two, [np.ones(1, np.float32), np.ones(2, np.float32)])
    f = rx.function(lambda: two.run(lambda x: x * 2, args=(x,)))
    components_equal(two, f(), [[2], [2, 2]])
    components_equal(two, f(), [[2], [2, 2]])


def test_one_strategy_a_function(two):
    other = rx.MirroredStrategy(["CPU:4", "CPU:5", "CPU:6"])

    @rx.function
    def f():
        two.run(lambda: jnp.ones(1))
        other.run(lambda: jnp.ones(1))

    with pytest.raises(ValueError, match="Use one strategy in a function"):
        f()


# State.


def test_variables_outside_of_strategies():
    weight, steps = rx.Variable([1.0, 2.0]), rx.Variable(0)

    @rx.function
    def f(x):
        weight.assign_sub(x * weight)
        steps.assign_add(1)
        return jnp.sum(weight)

    equal(f(jnp.float32(0.5)), 1.5)
    equal(f(jnp.float32(0.5)), 0.75)
    equal(weight, [0.25, 0.5])
    assert int(steps) == 2


def test_values_handed_out_are_never_reused(two):
    with two.scope():
        weight = rx.Variable(np.arange(4.0, dtype=np.float32), aggregation="MEAN")
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    @rx.function
    def f():
        two.run(lambda: (weight.assign_add(jnp.ones(4)), local.assign_add(1.0)))

    kept = []
    for _ in range(4):
        kept.append((weight.value, [c.value for c in weight.values], weight.numpy(), local.value))
        f()
        f()
    for step, (value, parts, array, total) in enumerate(kept):
        for seen in (value, *parts, array):
            equal(seen, np.arange(4.0) + 2 * step)
        equal(total, 4.0 * step)


def test_results_outlive_the_states_that_they_were(two, counter):
    with two.scope():
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def write():
        return counter.assign_add(0.5).value, local.assign_add(1.0).value

    writes = rx.function(lambda: (two.run(write), counter.value))
    reads = rx.function(lambda: (two.run(lambda: local.value), counter.value, local.value))
    kept = [(writes(), reads()) for _ in range(4)]
    for step, (((of_counter, of_local), total), (again, total_again, sum_again)) in enumerate(
        kept, start=1
    ):
        components_equal(two, of_counter, [step, step])
        components_equal(two, of_local, [step, step])
        components_equal(two, again, [step, step])
        equal(total, step)
        equal(total_again, step)
        equal(sum_again, 2 * step)


def test_memory_is_reused_when_nobody_holds_it(two, counter):
    f = rx.function(lambda: two.run(lambda: counter.assign_add(1.0)))
    f()
    before = storage_of(counter).lift(two.topology)
    f()
    assert before.is_deleted()
    equal(counter, 4.0)


def test_assigned_arrays_are_not_reused(two):
    with two.scope():
        weight = rx.Variable(jnp.zeros(3), aggregation="SUM")
    mine = two.extended.broadcast_to(jnp.ones(3), weight)
    f = rx.function(lambda: two.run(lambda: weight.assign_add(jnp.ones(3))))
    for _ in range(2):
        weight.assign(mine)
        f()
    equal(mine, [1, 1, 1])
    equal(weight, [3, 3, 3])


def test_created_on_first_use(two):
    class Layer:
        weight = None

        @rx.function
        def __call__(self, x):
            def replica(x):
                if self.weight is None:
                    self.weight = rx.Variable(lambda: jnp.full(2, 3.0), aggregation="MEAN")
                self.weight.assign_add(x)
                return self.weight.value

            return two.run(replica, args=(x,))

    layer = Layer()
    for step in range(1, 4):
        components_equal(two, layer(jnp.ones(2)), [[3.0 + step] * 2] * 2)
    assert isinstance(layer.weight, rx.parts.MirroredVariable)


def test_a_failure_while_tracing_leaves_every_variable_as_it_was(two, counter):
    with two.scope():
        local = rx.Variable(1.0, synchronization="ON_READ", aggregation="SUM")

    @rx.function
    def f(x):
        def replica(x):
            counter.assign_add(1.0)
            local.assign_add(1.0)
            raise KeyError("trace")

        two.run(replica, args=(x,))

    for _ in range(2):
        with pytest.raises(KeyError, match="trace"):
            f(jnp.float32(1))
    equal(counter, 0.0)
    components_equal(two, local, [1.0, 1.0])
    assert not rx.has_strategy()
    two.run(rx.function(lambda: local.assign(2.0)))
    components_equal(two, local, [2.0, 2.0])


def test_a_failure_while_running_leaves_every_variable_as_it_was():
    """In a process of its own: XLA remembers a failed callback until the process ends."""
    code = """
        import jax, jax.numpy as jnp, replicax as rx
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            counter = rx.Variable(0.0, aggregation="SUM")
            local = rx.Variable(1.0, synchronization="ON_READ", aggregation="SUM")
        armed = [False]

        def maybe(x):
            if armed[0]:
                raise KeyError("callback")
            return x

        @rx.function
        def f(x):
            def replica(x):
                counter.assign_add(1.0)
                local.assign_add(1.0)
                return jax.pure_callback(maybe, jax.ShapeDtypeStruct((), jnp.float32), x)
            out = strategy.run(replica, args=(x,))
            counter.assign_add(5.0)
            return out

        f(jnp.float32(1))
        armed[0] = True
        for _ in range(2):
            try:
                f(jnp.float32(1))
            except Exception as error:
                print("callback" in str(error), float(counter), float(local))
        armed[0] = False
        f(jnp.float32(1))
        print(float(counter), float(local))
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["True 7.0 4.0", "True 7.0 4.0", "14.0 6.0"], done.stderr


def test_two_threads_may_call_one_function(two, counter):
    f = rx.function(lambda: two.run(lambda: counter.assign_add(1.0)))
    f()
    threads = [threading.Thread(target=lambda: [f() for _ in range(25)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    equal(counter, 2.0 * 51)


def test_a_function_that_changes_its_mind_is_told(two, counter):
    calls = []

    @rx.function
    def f():
        calls.append(counter.shape)
        if len(calls) == 2:
            two.run(lambda: counter.assign_add(1.0))
        return counter.read_value()

    with pytest.raises(RuntimeError, match="must do the same whenever it is traced"):
        f()


# Control flow.


def test_run_under_scan_cond_and_fori_loop(two, counter):
    def step(x):
        return two.run(lambda x: counter.assign_add(x).value + replica_id(), args=(x,))

    @rx.function
    def scanned(xs):
        def body(carry, x):
            return carry + 1, two.reduce("SUM", step(x), axis=None)

        return jax.lax.scan(body, 0, xs)

    steps, sums = scanned(jnp.float32([1, 2, 3]))
    equal(steps, 3)
    equal(sums, [2 * 2 + 1, 2 * 6 + 1, 2 * 12 + 1])
    equal(counter, 12.0)

    @rx.function
    def conditional(flag):
        return jax.lax.cond(
            flag, lambda: two.reduce("SUM", step(jnp.float32(1)), axis=None), lambda: 0.0
        )

    equal(conditional(jnp.asarray(False)), 0.0)
    equal(counter, 12.0)
    equal(conditional(jnp.asarray(True)), 2 * 14 + 1)

    @rx.function
    def looped():
        jax.lax.fori_loop(0, 4, lambda i, _: (step(jnp.float32(1)), 0)[1], 0)

    looped()
    equal(counter, 22.0)


def test_control_flow_inside_a_replica(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    @rx.function
    def f(flag):
        def replica(flag):
            def yes():
                local.assign_add(replica_id() + 1.0)
                rx.get_replica_context().merge_call(lambda s: total.assign_add(1.0))
                return total.value

            seen = jax.lax.cond(flag, yes, lambda: -1.0)

            def body(_, x):
                local.assign_add(x)
                return None, None

            jax.lax.scan(body, None, jnp.ones(3))
            return seen

        return two.run(replica, args=(flag,))

    components_equal(two, f(jnp.asarray(True)), [1.0, 1.0])
    components_equal(two, f(jnp.asarray(False)), [-1.0, -1.0])
    equal(total, 1.0)
    components_equal(two, local, [1.0 + 6, 2.0 + 6])


def test_gradient_accumulation_with_apply_gradients_inside_cond(two):
    """Gradients are applied every second step only; equal to SGD on the sum of two batches."""
    with two.scope():
        weight = rx.Variable(np.ones(2, np.float32))
        accumulated = rx.Variable(
            np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM"
        )
        optimizer = rx.Optimizer(optax.sgd(0.1))

    @rx.function
    def train(x, last):
        def replica(x, last):
            gradient = rx.grad(lambda: jnp.sum(weight * x), weight)()
            accumulated.assign_add(gradient)

            def apply():
                optimizer.apply_gradients([(accumulated.value, weight)])
                accumulated.assign(jnp.zeros(2))
                return 0

            jax.lax.cond(last, apply, lambda: 0)

        two.run(replica, args=(x, last))

    batches = np.random.default_rng(0).normal(size=(4, 2, 2)).astype(np.float32)
    expected = np.ones(2)
    for step, batch in enumerate(batches):
        train(per_replica(two, batch), jnp.asarray(step % 2 == 1))
        if step % 2 == 1:
            expected = expected - 0.1 * batches[step - 1 : step + 1].sum((0, 1))
        equal(weight, expected, 1e-5)
    assert int(optimizer.iterations) == 2


def test_steps_per_execution_equal_separate_steps():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    batches = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32)

    def make():
        with strategy.scope():
            weight = rx.Variable(np.ones(2, np.float32))
            optimizer = rx.Optimizer(optax.adam(0.1))

        def replica(x):
            loss, gradient = rx.value_and_grad(lambda: jnp.sum((x @ weight) ** 2), weight)()
            optimizer.apply_gradients([(gradient, weight)])
            return loss

        return weight, replica

    weight, replica = make()
    separate = rx.function(
        lambda x: strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)
    )
    losses = [float(separate(shares(strategy, batch))) for batch in batches]

    other, replica = make()

    def many(xs):
        """All steps of one execution: a scan over the first dimension of a replica's batches."""
        return jax.lax.scan(lambda _, x: (None, replica(x)), None, xs)[1]

    stacked = per_replica(strategy, np.split(batches, 3, axis=1))
    per_replica_losses = strategy.run(rx.function(many), args=(stacked,))
    equal(strategy.reduce("SUM", per_replica_losses, axis=None), losses, 1e-5)
    equal(other, weight.numpy(), 1e-5)


# Numbers.


def test_random_keys_differ_by_replica_and_not_by_execution(strategy):
    def fn(key):
        key = jax.random.fold_in(key, replica_id())
        return jax.random.normal(key, (3,))

    key = jax.random.key(7)
    eager = strategy.run(fn, args=(key,))
    compiled = strategy.run(rx.function(fn), args=(key,))
    expected = [
        jax.random.normal(jax.random.fold_in(key, i), (3,))
        for i in range(strategy.num_replicas_in_sync)
    ]
    components_equal(strategy, eager, expected)
    components_equal(strategy, compiled, expected)
    assert len({float(x[0]) for x in expected}) == len(expected)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 64, 10**9])
def test_packs_change_nothing(two, bytes_per_pack):
    random = np.random.default_rng(0)
    shapes = [(), (3,), (5, 7), (300, 200), (0,), (2, 2)]
    dtypes = ["float32", "int32", "float32", "float32", "float32", "bfloat16"]
    parts = [
        [jnp.asarray(random.normal(size=s) * 9, d) for s, d in zip(shapes, dtypes, strict=True)]
        for _ in range(2)
    ]
    options = rx.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def fn(x):
        return rx.get_replica_context().all_reduce("SUM", x, options)

    values = per_replica(two, parts)
    for out in (two.run(fn, args=(values,)), two.run(rx.function(fn), args=(values,))):
        for leaf, first, second in zip(out, *parts, strict=True):
            for part in leaf.values:
                assert part.dtype == first.dtype
                equal(part.astype("float32"), (first + second).astype("float32"), 1e-2)


def test_sums_in_bfloat16_are_off_by_less_than_a_percent():
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    parts = np.random.default_rng(0).uniform(1, 2, size=(4, 1000)).astype(np.float32)
    values, exact = per_replica(strategy, parts), parts.sum(0)
    options = rx.experimental.CommunicationOptions(dtype="bfloat16")

    def fn(x):
        return rx.get_replica_context().all_reduce("SUM", x, options)

    for out in (
        strategy.run(fn, args=(values,)),
        strategy.run(rx.function(fn), args=(values,)),
    ):
        result = np.asarray(out.values[0])
        assert result.dtype == np.float32
        error = np.max(np.abs(result - exact) / exact)
        assert 1e-4 < error < 1e-2
    with pytest.raises(ValueError, match="bfloat16"):
        rx.experimental.CommunicationOptions(dtype="int8")


def test_a_failed_eager_run_takes_back_what_a_compiled_function_wrote(two, counter):
    @rx.function
    def count():
        counter.assign_add(1.0)

    def replica():
        rx.get_replica_context().merge_call(lambda _: count())
        raise KeyError

    before = float(counter.value)
    for _ in range(2):  # the program reuses the memory of its own results
        with pytest.raises(KeyError):
            two.run(replica)
        equal(counter, before)
        count()
        before += 1


def test_failures_that_the_function_handles_are_rolled_back(two, counter):
    def broken(strategy):
        def fail(copy):
            copy.assign(100.0)
            raise KeyError

        strategy.extended.update(counter, fail)

    def broken_run(strategy):
        strategy.run(lambda: (counter.assign_add(50.0), {}["missing"]))

    def replica():
        counter.assign_add(1.0)
        for merge in (broken, broken_run):
            with contextlib.suppress(KeyError):
                rx.get_replica_context().merge_call(merge)

    for run in (two.run, lambda fn: two.run(rx.function(fn))):
        counter.assign(0.0)
        run(replica)
        equal(counter, 2.0)

    @rx.function
    def outer():
        with contextlib.suppress(KeyError):
            two.run(lambda: (counter.assign_add(5.0), {}["missing"]))
        two.run(lambda: counter.assign_add(1.0))

    outer()
    equal(counter, 4.0)


def test_debug_nans_names_the_operation_and_changes_nothing(two, counter):
    f = rx.function(
        lambda x: two.run(lambda x: (counter.assign_add(1.0), jnp.log(x))[1], args=(x,))
    )
    with jax.debug_nans(True):
        f(jnp.float32(1))
        with pytest.raises(FloatingPointError, match="log"):
            f(jnp.float32(-1))
    equal(counter, 2.0)


def test_lower_of_a_method():
    class Model:
        @rx.function
        def double(self, x):
            return x * 2

    assert "multiply" in Model().double.lower(jnp.float32(1)).as_text()


def test_settings_of_jax_make_a_program_of_their_own():
    f = rx.function(lambda: jnp.asarray(1.0, dtype=float).dtype.itemsize * jnp.ones(()))
    equal(f(), 4.0)
    with jax.enable_x64(True):
        equal(f(), 8.0)
    equal(f(), 4.0)


def test_a_compiled_method_given_to_run_is_compiled(two):
    class Model:
        def __init__(self):
            self.calls = 0

        @rx.function
        def step(self, x):
            self.calls += 1
            return x * 2

    model = Model()
    for _ in range(3):
        result = two.run(model.step, args=(per_replica(two, [1.0, 2.0]),))
        components_equal(two, result, [2.0, 4.0])
    assert model.step.tracing_count == 1
    assert model.calls == 1


def test_numbers_that_are_equal_and_not_the_same_have_programs_of_their_own():
    signed = rx.function(lambda x, sign: jnp.copysign(x, sign))
    one = np.float32(1)
    assert [float(signed(one, sign)) for sign in (0.0, -0.0, 0.0)] == [1.0, -1.0, 1.0]
    for _ in range(3):
        signed(one, float("nan"))
    assert signed.tracing_count == 3


def test_an_update_without_a_variable_in_a_function(two):
    devices = two.extended.worker_devices
    function = rx.function(
        lambda x: two.extended.update_non_slot(devices, lambda device: device * 2, args=(x,))
    )
    for copy_of_it in two.experimental_local_results(function(jnp.ones(2))):
        equal(copy_of_it, [2, 2])
