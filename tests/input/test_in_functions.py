"""Iterators and datasets in compiled functions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import BY_ROWS, shares_of

import replicax as rx


def rows(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


def dataset_of(strategy: rx.Strategy, count: int, batch: int) -> rx.DistributedDataset:
    source = rx.from_tensor_slices(rows(count)).batch(batch)
    return strategy.experimental_distribute_dataset(source, BY_ROWS)


def until_the_end(step, *args):
    """Return the results of a step until StopIteration."""
    results = []
    while True:
        try:
            results.append(step(*args))
        except StopIteration:
            return results


def test_next_in_a_function(strategy):
    dataset = dataset_of(strategy, 48, 24)

    @rx.function
    def step(iterator):
        total = strategy.run(jnp.sum, args=(next(iterator),))
        return strategy.reduce("SUM", total, axis=None)

    for _ in range(3):
        iterator = iter(dataset)
        assert [float(x) for x in until_the_end(step, iterator)] == [276, 852]
        with pytest.raises(StopIteration):
            step(iterator)
    assert step.tracing_count == 1, "a new iterator is no reason to trace again"


@pytest.mark.parametrize("pulls", [1, 2, 3])
def test_next_several_times_in_a_function(two, pulls):
    dataset = dataset_of(two, 24, 4)

    @rx.function
    def step(iterator):
        return [two.run(lambda x: x * 10, args=(next(iterator),)) for _ in range(pulls)]

    steps = until_the_end(step, iter(dataset))
    assert len(steps) == 6 // pulls
    flat = [element for elements in steps for element in elements]
    expected = [[[10 * x for x in part] for part in parts] for parts in shares_of(two, dataset)]
    assert shares_of(two, flat) == expected
    assert step.tracing_count == 1


def test_what_was_taken_before_the_end_is_as_in_python(two):
    """Five elements, two a call: the third call takes one, and then there is no more."""

    def make(total):
        def step(iterator):
            for _ in range(2):
                two.run(lambda x: total.assign_add(jnp.sum(x)), args=(next(iterator),))

        return step

    results = []
    for wrap in (lambda f: f, rx.function):
        with two.scope():
            total = rx.Variable(0.0, aggregation="SUM")
        iterator = iter(dataset_of(two, 10, 2))
        until_the_end(wrap(make(total)), iterator)
        results.append((float(total), iterator.get_state()))
    assert results[0] == results[1]
    assert results[0][0] == 45


def test_a_function_may_go_on_after_the_end(two):
    @rx.function
    def step(iterator):
        try:
            return two.reduce("SUM", next(iterator), axis=0)
        except StopIteration:
            return jnp.float32(-1)

    iterator = iter(dataset_of(two, 4, 2))
    assert [float(step(iterator)) for _ in range(4)] == [1, 5, -1, -1]


def test_a_partial_batch_in_a_function(two):
    dataset = dataset_of(two, 11, 4)

    @rx.function
    def step(iterator):
        element = next(iterator)
        squares = two.run(lambda x: jnp.sum(x * x), args=(element,))
        return two.reduce("SUM", squares, axis=None), two.reduce("MEAN", element, axis=0)

    for _ in range(2):
        results = until_the_end(step, iter(dataset))
        assert [[float(x) for x in result] for result in results] == [
            [14, 1.5],
            [126, 5.5],
            [245, 9],
        ]
    assert step.tracing_count == 2


@pytest.mark.parametrize("way", ["next", "element", "signature", "run"])
def test_a_partial_batch_that_divides_is_a_second_program(strategy, way):
    replicas = strategy.num_replicas_in_sync
    dataset = dataset_of(strategy, 6 * replicas, 4 * replicas)
    seen = []

    def replica_fn(x):
        seen.append((len(x), isinstance(x, jax.core.Tracer)))
        return jnp.sum(x)

    def step_on(x):
        return strategy.reduce("SUM", strategy.run(replica_fn, args=(x,)), axis=None)

    if way == "next":
        function = rx.function(lambda iterator: step_on(next(iterator)))
        take = function
    elif way == "run":
        function = rx.function(replica_fn)

        def take(iterator):
            results = strategy.run(function, args=(next(iterator),))
            return strategy.reduce("SUM", results, axis=None)

    else:
        signature = [dataset.element_spec] if way == "signature" else None
        function = rx.function(step_on, input_signature=signature)

        def take(iterator):
            return function(next(iterator))

    expected = [float(rows(4 * replicas).sum()), float(rows(6 * replicas)[4 * replicas :].sum())]
    for _ in range(3):
        assert [float(x) for x in until_the_end(take, iter(dataset))] == expected
        assert function.tracing_count == 2
        passes = 2 if way == "next" else 1  # first to see which elements are taken
        assert seen == [(4, True)] * passes + [(2, True)] * passes, "and never eager"


def test_elements_of_other_shapes_are_other_programs(two):
    dataset = two.experimental_distribute_dataset(
        [np.ones((2, 3)), np.ones((2, 5)), np.ones((2, 3))]
    )

    @rx.function
    def step(iterator):
        return two.reduce("SUM", next(iterator), axis=(0, 1))

    for _ in range(2):
        assert [float(x) for x in until_the_end(step, iter(dataset))] == [6, 10, 6]
    assert step.tracing_count == 2


def test_several_iterators(two):
    few, many = dataset_of(two, 4, 2), dataset_of(two, 12, 4)

    @rx.function
    def step(one, other, same):
        assert same is one
        sums = [two.reduce("SUM", next(x), axis=0) for x in (other, one, other, same)]
        return jnp.stack(sums)

    one, other = iter(few), iter(many)
    assert step(one, other, one).tolist() == [6, 1, 22, 5]
    with pytest.raises(StopIteration):
        step(one, other, one)
    # The other one gave one element more before the end was met, as it does in Python.
    assert other.get_state()["steps"] == 3

    @rx.function
    def apart(one, other):
        return two.reduce("SUM", next(one), axis=0) + two.reduce("SUM", next(other), axis=0)

    first, second = iter(few), iter(few)
    assert float(apart(first, second)) == 2
    second.close()
    assert float(apart(first, iter(many))) == 11
    shared = iter(few)
    assert float(apart(shared, shared)) == 6  # which is another program
    assert apart.tracing_count == 3


def test_an_iterator_that_the_function_closes_over(two):
    dataset = dataset_of(two, 8, 2)
    iterator = iter(dataset)

    @rx.function
    def step():
        return two.reduce("SUM", next(iterator), axis=0)

    assert [float(step()) for _ in range(2)] == [1, 5]
    iterator = iter(dataset)  # the old one is gone, and is not waited for
    assert [float(x) for x in until_the_end(step)] == [1, 5, 9, 13]


def test_an_error_of_the_pipeline_surfaces_in_the_function(two):
    def broken_pipeline():
        yield np.zeros(2)
        raise ArithmeticError("broken row")

    @rx.function
    def step(iterator):
        return two.reduce("SUM", next(iterator), axis=0)

    iterator = iter(two.experimental_distribute_dataset(broken_pipeline))
    step(iterator)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="broken row"):
            step(iterator)


def test_states_inside_and_outside_agree(two):
    @rx.function
    def step(iterator):
        return two.run(lambda x: x + 0, args=(next(iterator),))

    dataset = dataset_of(two, 10, 2)
    inside, outside = iter(dataset), iter(dataset)
    for _ in range(3):
        assert shares_of(two, [step(inside)]) == shares_of(two, [next(outside)])
        assert inside.get_state() == outside.get_state()
    assert shares_of(two, inside) == shares_of(two, outside)


def test_lowering_takes_nothing(two):
    @rx.function
    def step(iterator):
        return two.reduce("SUM", next(iterator), axis=0)

    iterator = iter(dataset_of(two, 4, 2))
    assert "tensor<2xf32>" in step.lower(iterator).as_text()
    assert iterator.get_state()["steps"] == 0
    assert float(step(iterator)) == 1


@pytest.mark.parametrize("count", [16, 22])
def test_a_loop_in_a_function(strategy, count):
    dataset = dataset_of(strategy, count, 8)
    traces = []

    @rx.function
    def epoch(dataset):
        def replica_fn(x):
            traces.append(x)
            return jnp.sum(x * x)

        total_result = 0
        for x in dataset:
            per_replica_result = strategy.run(replica_fn, args=(x,))
            total_result += strategy.reduce("SUM", per_replica_result, axis=None)
        return total_result

    expected = float((rows(count) ** 2).sum())
    assert float(epoch(dataset)) == expected
    first = len(traces)
    # Also what a partial batch needs that does not divide was traced, and is kept.
    for _ in range(2):
        assert float(epoch(dataset)) == expected
    if strategy.num_replicas_in_sync > 1:
        assert len(traces) == first
    assert epoch.tracing_count == 1


def steps_of(strategy, total, traces):
    """A function of several steps, which counts how often a step's Python runs."""

    def replica_fn(x):
        traces.append(isinstance(x, jax.core.Tracer))
        total.assign_add(jnp.sum(x))
        return jnp.sum(x * x)

    def steps(iterator, count):
        result = jnp.float32(0)
        for _ in range(count):
            squares = strategy.run(replica_fn, args=(next(iterator),))
            result += strategy.reduce("SUM", squares, axis=None)
        return result

    return steps


@pytest.mark.parametrize("last", [8, 4, 3])
def test_a_loop_of_steps_is_as_in_python(strategy, last):
    """With a last batch that is whole, divides or does not; the third call meets the end."""
    dataset = dataset_of(strategy, 4 * 8 + last, 8)
    outcomes = []
    for wrap in (lambda fn: fn, rx.function):
        with strategy.scope():
            total = rx.Variable(0.0, aggregation="SUM")
        steps, iterator, seen = wrap(steps_of(strategy, total, [])), iter(dataset), []
        for _ in range(2):
            seen.append((float(steps(iterator, 2)), float(total), iterator.get_state()))
        with pytest.raises(StopIteration):
            steps(iterator, 2)
        seen.append((float(total), iterator.get_state()))
        with pytest.raises(StopIteration):
            steps(iterator, 2)
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2][0] == rows(4 * 8 + last).sum()


def test_a_loop_of_steps_is_traced_once_however_long(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")
    traces = []
    steps = rx.function(steps_of(two, total, traces))
    source = rx.from_tensor_slices(rows(4)).batch(4).repeat()
    iterator = iter(two.experimental_distribute_dataset(source))
    assert float(steps(iterator, 40)) == 40 * 14
    assert len(traces) <= 4, "one step to see that it is a loop, and two passes of its program"
    before = len(traces)
    assert float(steps(iterator, 40)) == 40 * 14
    assert len(traces) == before
    assert float(steps(iterator, 500)) == 500 * 14
    assert len(traces) <= before + 1, "another count needs no other program"
    assert all(traces)
    assert float(total) == 580 * 6
    assert steps.tracing_count == 2


@pytest.mark.parametrize("function", [False, True], ids=["python", "an rx.function"])
def test_a_loop_of_steps_that_a_helper_takes(two, function):
    traces = []

    def replica_fn(x):
        traces.append(x)
        return jnp.sum(x)

    def step(iterator):
        return two.reduce("SUM", two.run(replica_fn, args=(iterator.get_next(),)), axis=None)

    inner = rx.function(step) if function else step

    @rx.function
    def steps(iterator):
        results = []
        while len(results) < 6:
            results.append(inner(iterator))
        return results

    assert [float(x) for x in steps(iter(dataset_of(two, 12, 2)))] == [1, 5, 9, 13, 17, 21]
    assert len(traces) <= 4


def test_elements_that_are_collected_are_one_program(two):
    """A loop without a `run` between two elements has no steps that would be traced again."""

    @rx.function
    def step(iterator):
        elements = [next(iterator) for _ in range(3)]
        sums = two.run(lambda *parts: sum(jnp.sum(part) for part in parts), args=elements)
        return two.reduce("SUM", sums, axis=None)

    iterator = iter(dataset_of(two, 24, 4))
    assert step.lower(iterator)
    assert [float(x) for x in until_the_end(step, iterator)] == [66, 210]
    assert step.tracing_count == 1


def test_steps_that_are_written_out_are_one_program(two):
    @rx.function
    def step(iterator):
        first = two.run(jnp.sum, args=(next(iterator),))
        second = two.run(jnp.sum, args=(next(iterator),))
        return two.reduce("SUM", first, axis=None), two.reduce("SUM", second, axis=None)

    iterator = iter(dataset_of(two, 16, 4))
    assert "all-reduce" in step.lower(iterator).compile().as_text()
    assert [[float(x) for x in both] for both in until_the_end(step, iterator)] == [
        [6, 22],
        [38, 54],
    ]


def test_a_loop_over_iterators_is_one_program(two):
    @rx.function
    def step(*iterators):
        losses = [two.run(jnp.sum, args=(next(iterator),)) for iterator in iterators]
        return [two.reduce("SUM", loss, axis=None) for loss in losses]

    dataset = dataset_of(two, 8, 2)
    iterators = iter(dataset), iter(dataset)
    assert step.lower(*iterators)
    assert [float(x) for x in step(*iterators)] == [1, 1]


def test_a_loop_of_steps_that_fails_has_done_the_steps_before(two):
    """The loop behaves as in Python; within a step, all or nothing holds."""
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")

    def replica_fn(x, fails):
        total.assign_add(jnp.sum(x))
        if fails:
            raise ArithmeticError("in the third step")

    @rx.function
    def steps(iterator):
        for number in range(4):
            two.run(replica_fn, args=(next(iterator), number == 2))

    iterator = iter(dataset_of(two, 8, 2))
    with pytest.raises(ArithmeticError, match="third step"):
        steps(iterator)
    assert float(total) == 1 + 5
    assert iterator.get_state()["steps"] == 3


def test_an_array_as_the_number_of_steps_says_what_to_write(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")
    steps = rx.function(steps_of(two, total, []))
    iterator = iter(dataset_of(two, 8, 2))
    with pytest.raises(jax.errors.TracerIntegerConversionError) as raised:
        steps(iterator, jnp.int32(3))
    assert any("`fn(iterator, int(count))`" in note for note in raised.value.__notes__)
    assert iterator.get_state()["steps"] == 0
    assert float(steps(iterator, int(jnp.int32(3)))) == sum(x * x for x in range(6))


def test_a_loop_with_variables_and_an_iterator(two):
    with two.scope():
        total = rx.Variable(0.0, aggregation="SUM")

    @rx.function
    def some_steps(iterator, scale):
        def add(x, scale):
            total.assign_add(scale * jnp.sum(x))

        for x in iterator:
            two.run(add, args=(x, scale))
            if float(total) > 10:
                return "enough"
        return "the end"

    iterator = iter(dataset_of(two, 8, 2))
    assert some_steps(iterator, jnp.float32(1.0)) == "enough"
    assert float(total) == 1 + 5 + 9
    assert some_steps(iterator, jnp.float32(1.0)) == "enough"
    assert some_steps(iterator, jnp.float32(1.0)) == "the end"


def test_a_loop_with_optionals(two):
    @rx.function
    def epoch(iterator):
        count = 0
        while (optional := iterator.get_next_as_optional()).has_value():
            count += float(two.reduce("SUM", optional.get_value(), axis=0))
        return count

    assert epoch(iter(dataset_of(two, 5, 2))) == 10


def test_closing_over_what_changes_in_a_loop_is_slow_and_says_so(two):
    dataset = dataset_of(two, 60, 2)

    @rx.function
    def epoch(dataset):
        total = jnp.float32(0)
        for x in dataset:
            both = two.run(lambda x: jnp.sum(x) + total, args=(x,))  # noqa: B023  meant to
            total = two.reduce("MEAN", both, axis=None)
        return total

    with pytest.warns(rx.errors.PerformanceHint, match="Pass what changes as an argument"):
        result = float(epoch(dataset))
    expected = 0.0
    for first in range(0, 60, 2):
        expected += (first + first + 1) / 2
    assert result == expected


def test_a_method_and_its_helpers_are_known_again(two):
    class Model:
        def __init__(self):
            self.traces = 0

        def step(self, x, scale=2.0):
            self.traces += 1
            return scale * jnp.sum(x)

    model = Model()

    @rx.function
    def epoch(dataset):
        def doubled(x, *, by=2.0):
            return model.step(x) * by

        def helper(x):
            return doubled(x)

        return [
            float(two.reduce("SUM", two.run(fn, args=(x,)), axis=None))
            for x in dataset
            for fn in (model.step, helper)
        ]

    dataset = dataset_of(two, 4, 2)
    assert epoch(dataset) == [2, 4, 10, 20]
    traces = model.traces
    assert epoch(dataset) == [2, 4, 10, 20]
    assert model.traces == traces


def test_functions_run_eagerly_for_debugging(two):
    dataset = dataset_of(two, 6, 2)

    @rx.function
    def step(iterator):
        return float(two.reduce("SUM", next(iterator), axis=0))  # numbers, to look at

    @rx.function
    def epoch(dataset):
        return sum(float(two.reduce("SUM", x, axis=0)) for x in dataset)

    rx.config.run_functions_eagerly(True)
    try:
        assert until_the_end(step, iter(dataset)) == [1, 5, 9]
        assert epoch(dataset) == 15
    finally:
        rx.config.run_functions_eagerly(False)


def test_the_spec_as_input_signature(two):
    dataset = two.experimental_distribute_dataset(
        rx.from_tensor_slices({"x": rows(11), "y": np.arange(11)}).batch(4)
    )

    @rx.function(input_signature=[dataset.element_spec])
    def train_step(inputs):
        return inputs["x"] + inputs["y"]

    @rx.function(input_signature=[dataset.element_spec])
    def outer_step(inputs):
        return two.run(lambda inputs: inputs["x"] + inputs["y"], args=(inputs,))

    expected = [
        [[2.0 * x for x in part] for part in parts]
        for parts in shares_of(two, [element["x"] for element in dataset])
    ]
    assert shares_of(two, [two.run(train_step, args=(x,)) for x in dataset]) == expected
    assert shares_of(two, [outer_step(x) for x in dataset]) == expected
    with pytest.raises(TypeError, match="input signature"):
        two.run(train_step, args=(rows(2),))


def test_elements_cannot_be_taken_in_what_jax_traces(two):
    iterator = iter(dataset_of(two, 4, 2))

    @rx.function
    def step(iterator):
        def body(_, total):
            return total + two.reduce("SUM", next(iterator), axis=0)

        return jax.lax.fori_loop(0, 2, body, jnp.float32(0))

    with pytest.raises(RuntimeError, match=r"lax\.fori_loop"):
        step(iterator)
    with pytest.raises(RuntimeError, match="become a constant"):
        jax.jit(lambda: next(iterator).values[0])()
    assert len(list(iterator)) == 2


def test_pulls_cannot_happen_inside_of_a_meeting(two):
    iterator = iter(dataset_of(two, 4, 2))

    @rx.function
    def step():
        def merge(strategy):
            return next(iterator)

        return two.run(lambda: rx.get_replica_context().merge_call(merge))

    with pytest.raises(RuntimeError, match="outside of `run`"):
        step()

    @rx.function
    def loop():
        return two.run(lambda: [x for x in dataset_of(two, 4, 2)])  # noqa: C416  a loop is meant

    with pytest.raises(RuntimeError, match="cross-replica context"):
        loop()
    assert len(list(iterator)) == 2


@pytest.mark.filterwarnings("ignore::replicax.errors.PerformanceHint")
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_loop_closes_over_is_not_confused(replicas):
    """The memory of what went away is used again, and with it its id."""

    class Setting:
        __slots__ = ("a", "b", "c", "value")

        def __init__(self, value):
            self.value = value

    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    dataset = strategy.experimental_distribute_dataset([np.ones(2, np.float32)] * 40)

    @rx.function
    def epoch(dataset):
        results = []
        for number, x in enumerate(dataset):
            setting = Setting(float(number))
            # A variable of the loop, which goes away: that is what this is about.
            results.append(strategy.run(lambda x: x * setting.value, args=(x,)))  # noqa: B023, F821
            del setting
        return [float(strategy.reduce("SUM", result, axis=0)) for result in results]

    assert epoch(dataset) == [2.0 * number for number in range(40)]


def test_functions_of_equal_code_are_told_apart(two):
    dataset = two.experimental_distribute_dataset([np.ones(2, np.float32)])
    source = "def step(x):\n    return x * SCALE\n"
    modules = [{"SCALE": 2.0}, {"SCALE": 5.0}]
    for module in modules:
        exec(compile(source, "step.py", "exec"), module)

    @rx.function
    def epoch(dataset, functions):
        (x,) = dataset
        return [float(two.reduce("SUM", two.run(fn, args=(x,)), axis=0)) for fn in functions]

    assert epoch(dataset, tuple(module["step"] for module in modules)) == [4, 10]
    signs = tuple(functools.partial(lambda zero, x: jnp.copysign(x, zero), z) for z in (0.0, -0.0))
    assert epoch(dataset, signs) == [2, -2]


@pytest.mark.parametrize("kind", ["method", "partial", "callable object"])
def test_other_callables_in_a_loop_are_compiled_once(two, kind):
    traces = []

    class Model:
        @rx.function
        def step(self, x):
            traces.append(x)
            return x * 2

        def __call__(self, x):
            traces.append(x)
            return x * 2

        __hash__ = None  # as a dataclass with a given `__eq__` has it

    model = Model()

    def scaled(by, x):
        traces.append(x)
        return x * by

    @rx.function
    def epoch(dataset):
        for x in dataset:
            fn = {
                "method": model.step,
                "partial": functools.partial(scaled, 2.0),
                "callable object": model,
            }[kind]
            result = two.run(fn, args=(x,))
        return result

    dataset = dataset_of(two, 40, 2)
    for _ in range(2):
        assert shares_of(two, [epoch(dataset)]) == [[[76], [78]]]
    assert len(traces) == 1


def test_which_elements_are_taken_may_depend_on_their_shapes(two):
    """A batch of two rows is joined with the next one."""
    strategy = rx.OneDeviceStrategy("CPU:0")
    dataset = strategy.experimental_distribute_dataset(
        [np.full(size, number + 1.0) for number, size in enumerate([4, 4, 2, 2, 4, 2])]
    )

    def make(wrap):
        @wrap
        def step(iterator):
            first = next(iterator)
            if first.shape[0] < 4:
                return first.sum() + next(iterator).sum()
            return first.sum()

        return step

    step = make(rx.function)
    for _ in range(2):
        iterator = iter(dataset)
        compiled = [float(x) for x in until_the_end(step, iterator)]
        assert compiled == [4, 8, 14, 20]
        eager = iter(dataset)
        assert until_the_end(make(lambda f: f), eager) == compiled
        assert iterator.get_state() == eager.get_state()
    assert step.tracing_count == 2

    @rx.function
    def branch(iterator, dataset):
        if next(iterator).shape[0] == 4:
            return 0
        return sum(int(x.shape[0]) for x in dataset)

    iterator = iter(dataset)
    assert [int(branch(iterator, dataset)) for _ in range(3)] == [0, 0, 18]
    iterator.close()


def test_uneven_elements_are_not_traced_again(two):
    dataset = two.experimental_distribute_dataset([np.ones(3, np.float32)] * 10)
    calls = []

    @rx.function
    def step(iterator):
        calls.append(iterator)
        return two.reduce("SUM", next(iterator), axis=0)

    assert [float(x) for x in until_the_end(step, iter(dataset))] == [3] * 10
    # Two passes of the trace, and what finds out that there are no more.
    assert len(calls) == 2 + 2


def test_an_iterator_that_is_bound_anew_is_the_one_taken(two):
    dataset = dataset_of(two, 8, 2)
    iterator = old = iter(dataset)

    @rx.function
    def step():
        return two.reduce("SUM", next(iterator), axis=0)

    assert [float(step()) for _ in range(2)] == [1, 5]
    iterator = iter(dataset)
    assert [float(x) for x in until_the_end(step)] == [1, 5, 9, 13]
    assert float(two.reduce("SUM", next(old), axis=0)) == 9
    assert step.tracing_count == 1
    old.close()


def test_an_iterator_cannot_be_returned(two):
    @rx.function
    def step(iterator):
        return two.reduce("SUM", next(iterator), axis=0), iterator

    iterator = iter(dataset_of(two, 4, 2))
    with pytest.raises(TypeError, match="returned a distributed iterator"):
        step(iterator)
    assert len(list(iterator)) == 2


def test_an_iterator_is_no_element(two):
    dataset = dataset_of(two, 4, 2)
    step = rx.function(lambda x: x, input_signature=[dataset.element_spec])
    with pytest.raises(TypeError, match=r"next\(iterator\)"):
        step(iter(dataset))


@pytest.mark.parametrize("strings", [False, True])
def test_elements_on_the_host_fit_their_spec(two, strings):
    rows = np.ones((4, 2))  # float64
    batch = {"x": rows, "name": np.array(["a"] * 4)} if strings else {"x": rows}
    options = rx.InputOptions(experimental_fetch_to_device=False)
    dataset = two.experimental_distribute_dataset([batch], options)
    (element,) = dataset
    assert element["x"].values[0].dtype == dataset.element_spec["x"].dtype == np.float32
    if not strings:
        step = rx.function(lambda b: b["x"] * 2, input_signature=[dataset.element_spec])
        assert shares_of(two, [two.run(step, args=(element,))]) == [[[[2, 2]] * 2] * 2]
