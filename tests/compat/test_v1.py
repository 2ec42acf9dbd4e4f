"""The face of v1: the same machinery by other names."""

import json
import os
import warnings
from contextlib import closing

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal

import replicax as rx
from replicax.compat import v1

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* deprecated, here as in the reference"),
    pytest.mark.filterwarnings("ignore:.* workers share this dataset by rows"),
]

STRATEGIES = {
    "default": v1.get_strategy,
    "one device": lambda: v1.OneDeviceStrategy("/cpu:1"),
    "mirrored 1": lambda: v1.MirroredStrategy(["CPU:0"]),
    "mirrored 2": lambda: v1.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored 3": lambda: v1.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    "central": lambda: v1.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:7"),
    "of one worker": v1.experimental.MultiWorkerMirroredStrategy,
}
if "TF_CONFIG" in os.environ:
    STRATEGIES = {"workers": v1.experimental.MultiWorkerMirroredStrategy}

# On two local replicas, on each of eight, or on those of several workers.
BATCH = 24


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    return v1.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=[lambda f: f, rx.function], ids=["eager", "compiled"])
def wrap(request):
    return request.param


def rows_of(count):
    return np.linspace(-1, 1, 2 * count, dtype=np.float32).reshape(count, 2)


def test_they_are_strategies(strategy):
    assert isinstance(strategy, v1.Strategy)
    assert isinstance(strategy, rx.Strategy)
    assert isinstance(strategy.extended, v1.StrategyExtended)
    with strategy.scope() as entered:
        assert entered is strategy
        assert v1.get_strategy() is strategy
        assert v1.in_cross_replica_context() is v1.has_strategy()
    assert not v1.has_strategy()
    assert isinstance(v1.get_strategy(), v1.Strategy)


@pytest.mark.parametrize("rows", [2 * BATCH, 2 * BATCH - 5], ids=["full", "uneven last"])
def test_a_loop_of_v1_equals_numpy_on_the_whole_batch(strategy, wrap, rows):
    with strategy.scope():
        weight = rx.Variable(np.float32([1.0, -2.0]))
        optimizer = rx.Optimizer(optax.sgd(0.1))

    @wrap
    def step_fn(x):
        def loss_fn():
            return jnp.sum((x @ weight.value - 1.0) ** 2) / BATCH

        loss, gradient = rx.value_and_grad(loss_fn, weight)()
        optimizer.apply_gradients([(gradient, weight)])
        return loss

    dataset = rx.from_tensor_slices(rows_of(rows)).batch(BATCH)
    iterator = strategy.make_dataset_iterator(dataset)
    losses = []
    for _ in range(2):
        iterator.initialize()
        for _ in range(2):
            per_replica = strategy.experimental_run(step_fn, iterator)
            losses.append(float(strategy.reduce(v1.ReduceOp.SUM, per_replica)))
        with pytest.raises(StopIteration):
            iterator.get_next()

    expected, totals = np.float32([1.0, -2.0]), []
    for _ in range(2):
        for batch in np.split(rows_of(rows), [BATCH]):
            error = batch @ expected - 1.0
            totals.append(np.sum(error**2) / BATCH)
            expected = expected - 0.1 * 2 * error @ batch / BATCH
    equal(losses, totals, 1e-5)
    equal(weight, expected, 1e-5)


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_an_iterator_of_an_input_function(strategy, mode):
    contexts = []

    def input_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(BATCH)
        return grain.MapDataset.source(np.arange(8 * size)).batch(size)

    with closing(strategy.make_input_fn_iterator(input_fn, v1.InputReplicationMode[mode])) as it:
        local = len(strategy.topology.local_replicas)
        assert len(contexts) == (local if mode == "PER_REPLICA" else 1)
        assert isinstance(contexts[0], v1.InputContext)
        for _ in range(2):
            it.initialize()
            first = strategy.experimental_run(lambda x: x + 1, it)
            size = BATCH // strategy.num_replicas_in_sync
            for index, part in enumerate(strategy.experimental_local_results(first)):
                begin = 0 if mode == "PER_REPLICA" else index * size
                equal(part, np.arange(begin, begin + size) + 1)
        assert len(contexts) == (local if mode == "PER_REPLICA" else 1), "made once"


class Counting:
    """A function that gives an element per call, and ends a pass after some of them."""

    def __init__(self, size: int, per_pass: int):
        self.size, self.per_pass = size, per_pass
        self.given = self.in_pass = 0

    def __call__(self):
        if self.in_pass == self.per_pass:
            self.in_pass = 0
            raise StopIteration
        self.in_pass += 1
        self.given += 1
        return {"x": np.full(self.size, self.given), "tuple": (np.float32(self.given),)}


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_an_input_function_may_return_a_function_of_elements(strategy, wrap, mode):
    local = len(strategy.topology.local_replicas)
    replicas = range(strategy.num_replicas_in_sync)
    per_replica = mode == "PER_REPLICA"
    size = BATCH // strategy.num_replicas_in_sync
    iterator = strategy.make_input_fn_iterator(
        lambda context: Counting(size, 3 if per_replica else 3 * local), mode
    )
    sums = wrap(lambda element: strategy.run(lambda e: jnp.sum(e["x"]), args=(element,)))
    for passes in range(2):
        assert iterator.initialize() == []
        for step in range(3):
            iterator.initialize()  # which changes nothing before the end
            number = 3 * passes + step
            each = [number if per_replica else number * local + i % local for i in replicas]
            components_equal(strategy, sums(iterator.get_next()), [size * (n + 1) for n in each])
        with pytest.raises(StopIteration):
            iterator.get_next()
    iterator.close()


def test_the_iterator_of_a_function_of_elements(two):
    def make():
        return two.make_input_fn_iterator(lambda context: Counting(2, 4))

    with closing(make()) as iterator:
        with pytest.raises(ValueError, match="Initialize its iterator"):
            _ = iterator.element_spec
        iterator.initialize()
        assert iterator.element_spec["x"] == jax.ShapeDtypeStruct((2,), np.int32)
        first = [value.tolist() for value in iterator.get_next()["x"].values]
        assert first == [[1, 1], [2, 2]], "what was looked at is not lost"
        state = json.loads(json.dumps(iterator.get_state()))
        with pytest.raises(ValueError, match="cannot begin again"):
            iterator.set_state(state)
        assert [value.tolist() for value in iterator.get_next()["x"].values] == [[3, 3], [4, 4]]
    with closing(make()) as resumed:
        resumed.set_state(state)
        assert [value.tolist() for value in resumed.get_next()["x"].values] == [[3, 3], [4, 4]]
        with pytest.raises(StopIteration):
            resumed.get_next()


def test_what_an_input_function_returns(two):
    def generator():
        yield from (np.full(2, number) for number in range(4))

    with closing(two.make_input_fn_iterator(lambda context: generator)) as iterator:
        for _ in range(2):  # a generator function is a dataset, and begins again
            iterator.initialize()
            assert [value.tolist() for value in iterator.get_next().values] == [[0, 0], [1, 1]]
    with closing(two.make_input_fn_iterator(lambda context: lambda: generator())) as iterator:
        iterator.initialize()
        with pytest.raises(TypeError, match="returned a generator"):
            iterator.get_next()

    def broken():
        raise OSError("no such file")

    with closing(two.make_input_fn_iterator(lambda context: broken)) as iterator:
        iterator.initialize()
        with pytest.raises(OSError, match="no such file"):
            iterator.get_next()
    with pytest.raises(TypeError, match="needs a function; got"):
        two.make_input_fn_iterator([np.zeros(2)])


def test_make_initializable_iterator(strategy):
    batches = [np.arange(BATCH), np.arange(BATCH) + 1]
    dataset = strategy.experimental_distribute_dataset(batches)
    with closing(v1.data.make_initializable_iterator(dataset, shared_name="shared")) as iterator:
        with pytest.raises(rx.errors.NotInitialized):
            iterator.get_next()
        for _ in range(2):
            assert iterator.initializer == []
            equal(strategy.gather(iterator.get_next(), axis=0), batches[0])
    for wrong in (batches, iter(dataset), None):
        with pytest.raises(TypeError, match="needs a distributed dataset; got a"):
            v1.data.make_initializable_iterator(wrong)


def test_an_iterator_has_to_be_initialized(strategy):
    iterator = strategy.make_dataset_iterator([np.arange(BATCH), np.arange(BATCH) + 1])
    taking = [
        iterator.get_next,
        lambda: next(iterator),
        iterator.get_next_as_optional,
        lambda: strategy.experimental_run(lambda x: x, iterator),
        lambda: rx.function(lambda: strategy.experimental_run(lambda x: x, iterator))(),
        lambda: strategy.extended.experimental_run_steps_on_iterator(lambda c, x: x, iterator),
    ]
    for take in taking:
        with pytest.raises(rx.errors.NotInitialized, match=r"Call `iterator.initialize\(\)`"):
            take()
    assert iterator.initialize() == []
    equal(strategy.gather(iterator.get_next(), axis=0), np.arange(BATCH))
    assert iterator.initializer == []
    equal(strategy.gather(next(iterator), axis=0), np.arange(BATCH))
    assert iterator.element_spec.dtype == np.int32
    iterator.close()
    with pytest.raises(RuntimeError, match="initialize"):
        iterator.get_next()
    iterator.initialize()
    equal(strategy.gather(iterator.get_next(), axis=0), np.arange(BATCH))
    iterator.close()


def test_a_state_begins_an_iterator_too(two):
    first = two.make_dataset_iterator([np.arange(4), np.arange(4) + 1])
    first.initialize()
    first.get_next()
    second = two.make_dataset_iterator([np.arange(4), np.arange(4) + 1])
    second.set_state(first.get_state())
    equal(two.gather(second.get_next(), axis=0), np.arange(4) + 1)
    first.close()
    second.close()


def test_an_iterator_is_not_initialized_while_a_function_is_traced(two):
    iterator = two.make_dataset_iterator([np.float32([1, 2])])

    @rx.function
    def step():
        iterator.initialize()
        return iterator.get_next()

    with pytest.raises(RuntimeError, match="Do it outside"):
        step()
    iterator.close()


@pytest.mark.parametrize("given", ["as argument", "in closure"])
def test_an_iterator_in_an_rx_function_is_traced_for_once(two, given):
    iterator = two.make_dataset_iterator([np.float32([1, 2]), np.float32([3, 4])])

    def total(iterator=iterator):
        return two.reduce("SUM", two.experimental_run(jnp.sum, iterator))

    step = rx.function(total)
    arguments = (iterator,) if given == "as argument" else ()
    for _ in range(3):
        iterator.initialize()
        assert [float(step(*arguments)) for _ in range(2)] == [3, 7]
    assert step.tracing_count == 1
    iterator.close()


def test_run_without_input(strategy):
    result = strategy.experimental_run(lambda: 2.0)
    for part in strategy.experimental_local_results(result):
        assert part == 2.0


def test_what_cannot_be_called_takes_no_element(two):
    iterator = two.make_dataset_iterator([np.arange(4)])
    iterator.initialize()
    with pytest.raises(TypeError, match="`experimental_run` needs a function; got 3"):
        two.experimental_run(3, iterator)
    with pytest.raises(TypeError, match=r"got \[1, 2\]"):
        two.experimental_run(lambda x: x, [1, 2])
    equal(two.gather(iterator.get_next(), axis=0), np.arange(4))
    iterator.close()


def test_reduce_needs_no_axis(strategy):
    count = strategy.num_replicas_in_sync
    value = strategy.run(lambda: jnp.float32([1.0, 2.0]))
    equal(strategy.reduce("SUM", value), [count, 2 * count])
    equal(strategy.reduce("SUM", value, axis=0), 3 * count)
    equal(strategy.reduce(v1.ReduceOp.MEAN, value, 0), 1.5)


def test_a_dataset_of_arrays(strategy):
    arrays = {"x": rows_of(BATCH), "y": np.arange(BATCH)}
    for owner in (strategy, strategy.extended):
        dataset = owner.experimental_make_numpy_dataset(arrays, session=None)
        distributed = strategy.experimental_distribute_dataset(dataset.batch(BATCH))
        (element,) = distributed
        equal(strategy.gather(element["x"], axis=0), arrays["x"])
        equal(strategy.gather(element["y"], axis=0), arrays["y"])


def test_sessions_are_refused(strategy):
    for owner in (strategy, strategy.extended):
        with pytest.raises(ValueError, match="no sessions on JAX"):
            owner.experimental_make_numpy_dataset(np.arange(3), session=object())


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("one device", {}),
        ("mirrored 2", {"isolate_session_state": True}),
        ("central", {"isolate_session_state": True}),
        ("of one worker", {}),
    ],
)
def test_the_configuration_of_a_session(name, added):
    config = {"inter_op_parallelism_threads": 2, "device_count": {"CPU": 3}}
    updated = STRATEGIES[name]().update_config_proto(config)
    assert updated == {**config, **added}
    assert config == {"inter_op_parallelism_threads": 2, "device_count": {"CPU": 3}}
    updated["device_count"]["CPU"] = 4
    assert config["device_count"] == {"CPU": 3}


def test_the_configuration_says_which_worker_this_is(strategy):
    resolver, config = strategy.cluster_resolver, {"experimental": {"other": 1}}
    updated = strategy.update_config_proto(config)
    if strategy.topology.spans_processes:
        assert updated["device_filters"] == [f"/job:worker/task:{resolver.task_id}"]
        leader = "/job:worker/replica:0/task:0"
        assert updated["experimental"] == {"other": 1, "collective_group_leader": leader}
    else:
        assert "device_filters" not in updated
    assert config == {"experimental": {"other": 1}}


def test_a_configuration_is_a_mapping(strategy):
    with pytest.raises(TypeError, match=r"mapping of the fields .* got 'fast'"):
        strategy.update_config_proto("fast")


def deprecated_calls(strategy, iterator):
    return {
        "experimental_run": lambda: strategy.experimental_run(lambda: 1),
        "make_dataset_iterator": lambda: strategy.make_dataset_iterator([np.arange(BATCH)]),
        "make_input_fn_iterator": lambda: strategy.make_input_fn_iterator(
            lambda context: [np.arange(BATCH)]
        ),
        "experimental_make_numpy_dataset": lambda: strategy.experimental_make_numpy_dataset(
            np.arange(3)
        ),
        "update_config_proto": lambda: strategy.update_config_proto({}),
        "experimental_run_steps_on_iterator": lambda: (
            strategy.extended.experimental_run_steps_on_iterator(lambda c, x: None, iterator, 0)
        ),
    }


def test_deprecated_names_warn_once_with_what_to_use_instead(two):
    strategy = two
    iterator = iter(strategy.experimental_distribute_dataset([np.arange(BATCH)]))
    for name, call in deprecated_calls(strategy, iterator).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            call()
        said = [w for w in caught if w.category is DeprecationWarning]
        assert len(said) == 1, name
        assert f"`{name}` is deprecated" in str(said[0].message)
        assert "Use `" in str(said[0].message) or "Leave it out" in str(said[0].message)
        assert said[0].filename == __file__, "the caller is shown, not this library"
    iterator.close()


def test_other_strategies_warn_of_their_own(two):
    two.experimental_run(lambda: 1)
    with pytest.warns(DeprecationWarning, match="experimental_run"):
        v1.MirroredStrategy(["CPU:0"]).experimental_run(lambda: 1)


def test_both_faces_have_one_implementation():
    """v1 has methods of its own for its own names only; two others differ by an argument."""
    own = {name for name in vars(v1.Strategy) if not name.startswith("_")}
    assert own == {
        "experimental_make_numpy_dataset",
        "experimental_run",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "reduce",
        "update_config_proto",
    }
    assert v1.StrategyExtended is rx.StrategyExtended


def test_variables_of_a_strategy_of_v1(two):
    with two.scope():
        variable = rx.Variable(1.0, aggregation="SUM")
    components_equal(two, two.run(lambda: variable.assign_add(1.0).value), [3.0, 3.0])
    assert isinstance(variable, rx.parts.MirroredVariable)
