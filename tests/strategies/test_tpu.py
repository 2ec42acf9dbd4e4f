"""TPUStrategy, with virtual CPU devices in place of the cores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica, shares

import replicax as rx
from replicax.cluster_resolver import TPUClusterResolver
from replicax.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system


def cores(count):
    return TPUClusterResolver([f"CPU:{index}" for index in range(count)])


@pytest.fixture(params=[rx.TPUStrategy, rx.experimental.TPUStrategy])
def make(request):
    return request.param


@pytest.fixture
def two():
    return rx.TPUStrategy(cores(2))


@pytest.fixture
def eagerly():
    rx.config.run_functions_eagerly(True)
    yield
    rx.config.run_functions_eagerly(False)


# Its parts


def test_one_replica_a_core(make):
    resolver = TPUClusterResolver(tpu="local")
    strategy = make(resolver)
    assert strategy.num_replicas_in_sync == 8
    assert strategy.topology == rx.Topology.of(jax.devices())
    assert strategy.cluster_resolver is resolver
    with strategy.scope():
        assert isinstance(rx.Variable(1.0), rx.parts.MirroredVariable)


def test_over_named_devices():
    strategy = rx.TPUStrategy(TPUClusterResolver(["CPU:5", "CPU:2"]))
    assert [device.id for device in strategy.extended.worker_devices] == [5, 2]


@pytest.mark.parametrize(
    ("shape", "replicas", "expected"),
    [
        ([1, 1, 1, 2], 4, [[0, 1], [2, 3], [6, 7], [4, 5]]),
        ([1, 2, 2, 2], 1, [[0, 1, 2, 3, 6, 7, 4, 5]]),
        ([1, 1, 1, 2], 1, [[0, 1]]),
        ([1, 1, 1, 1], 3, [[0], [1], [2]]),
    ],
)
def test_an_assignment_says_which_cores_form_which_replica(shape, replicas, expected):
    resolver = TPUClusterResolver(tpu="local")
    topology = initialize_tpu_system(resolver)
    assignment = DeviceAssignment.build(topology, computation_shape=shape, num_replicas=replicas)
    for strategy in (
        rx.TPUStrategy(resolver, experimental_device_assignment=assignment),
        rx.experimental.TPUStrategy(resolver, device_assignment=assignment),
    ):
        devices = strategy.topology.devices
        assert [[device.id for device in replica] for replica in devices] == expected
        assert strategy.num_replicas_in_sync == replicas


def test_an_assignment_knows_its_devices_by_itself():
    topology = Topology.of(["CPU:3", "CPU:4"])
    strategy = rx.TPUStrategy(None, DeviceAssignment.build(topology, num_replicas=2))
    assert [device.id for device in strategy.extended.worker_devices] == [3, 4]
    assert [device.id for device in strategy.cluster_resolver.devices()] == [3, 4]


def test_devices_can_be_named():
    for devices in (["CPU:2", "CPU:5"], jax.devices()[:3]):
        strategy = rx.TPUStrategy(devices)
        assert strategy.num_replicas_in_sync == len(devices)
        assert strategy.cluster_resolver.num_accelerators() == {"TPU": len(devices)}
        equal(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(2)), axis=0), 2 * len(devices))


def test_an_assignment_of_other_devices_is_refused():
    assignment = DeviceAssignment.build(Topology.of(["CPU:3", "CPU:1"]), num_replicas=2)
    with pytest.raises(ValueError, match=r"cpu:1; got cpu:3 besides"):
        rx.TPUStrategy(cores(2), assignment)
    written_down = DeviceAssignment.build(Topology([1, 1, 1, 1], [[[0, 0, 0, 0]]]))
    with pytest.raises(ValueError, match="does not say which devices"):
        rx.TPUStrategy(cores(2), written_down)


def test_arguments_of_other_types_are_refused(make):
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        make("CPU:0")
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        make(rx.cluster_resolver.TFConfigClusterResolver())
    with pytest.raises(TypeError, match="DeviceAssignment"):
        make(cores(1), [[[0, 0, 0, 0]]])


# Computing


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_run_and_reduce(count):
    strategy = rx.TPUStrategy(cores(count))
    rows = np.arange(16, dtype=np.float32)
    doubled = strategy.run(lambda x: x * 2, args=(shares(strategy, rows),))
    equal(strategy.reduce("SUM", doubled, axis=0), rows.sum() * 2)
    equal(strategy.reduce("MEAN", doubled, axis=0), rows.mean() * 2)
    equal(strategy.gather(doubled, axis=0), rows * 2)


def test_replicas_meet(two):
    def fn(x):
        context = rx.get_replica_context()
        return context.all_reduce("SUM", x), context.all_gather(x, axis=0)

    total, rows = two.run(fn, args=(per_replica(two, np.float32([[1], [2]])),))
    components_equal(two, total, [[3.0], [3.0]])
    components_equal(two, rows, [[1.0, 2.0], [1.0, 2.0]])


def regression(strategy):
    """A training step of a line, and its variables."""
    with strategy.scope():
        weights = [rx.Variable(jnp.zeros(3)), rx.Variable(0.5)]
        optimizer = rx.Optimizer(optax.sgd(0.1))

    def step(x, y, size):
        def loss_fn():
            return jnp.sum((x @ weights[0] + weights[1] - y) ** 2) / size

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return weights, step


def data(rows):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3)).astype(np.float32)
    return x, (x @ np.float32([1, -2, 3]) + 0.25).astype(np.float32)


def of_blocks(shape, replicas):
    """A strategy whose replicas have several cores each."""
    topology = Topology.of(jax.devices())
    return rx.TPUStrategy(None, DeviceAssignment.build(topology, shape, num_replicas=replicas))


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: rx.TPUStrategy(cores(1)),
        lambda: rx.TPUStrategy(cores(2)),
        lambda: rx.TPUStrategy(cores(8)),
        lambda: of_blocks([1, 1, 1, 2], 4),
        lambda: of_blocks([1, 2, 2, 2], 1),
    ],
    ids=["1", "2", "8", "4 of 2 cores", "1 of 8 cores"],
)
@pytest.mark.parametrize("rows", [16 * 3, 16 * 2 + 5])  # the last batch is whole, or partial
def test_training_equals_numpy_on_the_whole_batch(make_strategy, rows):
    strategy = make_strategy()
    weights, step = regression(strategy)
    xs, ys = data(rows)
    batches = [(xs[i : i + 16], ys[i : i + 16]) for i in range(0, rows, 16)]
    expected_w, expected_b = np.zeros(3), 0.5
    losses, expected_losses = [], []
    for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
        x, y = batches[number]
        size = np.float32(len(x))
        per_replica_loss = strategy.run(step, args=(*batch, size))
        losses.append(strategy.reduce("SUM", per_replica_loss, axis=None))
        error = x @ expected_w + expected_b - y
        expected_losses.append((error**2).mean())
        expected_w = expected_w - 0.1 * 2 * x.T @ error / len(x)
        expected_b -= 0.1 * 2 * error.mean()
    equal(losses, expected_losses, 1e-5)
    equal(weights[0], expected_w, 1e-5)
    equal(weights[1], expected_b, 1e-5)


# Compiled, always


class Recorded:
    """A function that remembers how often its Python ran, and with what."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x)
        return x + 1

    def method(self, x):
        return self(x)

    @property
    def traced(self):
        return [isinstance(x, jax.core.Tracer) for x in self.seen]


def test_python_runs_once_a_signature_and_not_once_a_replica():
    strategy, fn = rx.TPUStrategy(cores(8)), Recorded()
    value = per_replica(strategy, np.arange(8, dtype=np.float32))
    for _ in range(3):
        components_equal(strategy, strategy.run(fn, args=(value,)), np.arange(8) + 1)
    assert fn.traced == [True]
    strategy.run(fn, args=(per_replica(strategy, np.ones((8, 2))),))
    assert fn.traced == [True] * 2
    strategy.extended.call_for_each_replica(fn, (value,))
    assert fn.traced == [True] * 2


def test_a_method_is_known_again_by_its_object(two):
    value = per_replica(two, np.float32([1, 2]))
    one, other = Recorded(), Recorded()
    for _ in range(3):
        two.run(one.method, args=(value,))
        two.run(other.method, args=(value,))
    assert one.traced == other.traced == [True]


def test_what_is_compiled_already_is_not_compiled_again(two):
    value = per_replica(two, np.float32([1, 2]))
    given, around = rx.function(Recorded()), Recorded()
    outer = rx.function(lambda x: two.run(around, args=(x,)))
    for _ in range(3):
        two.run(given, args=(value,))
        outer(value)
    assert given.tracing_count == outer.tracing_count == 1
    assert around.traced == [True]


def test_a_new_function_sees_what_has_changed(two):
    rate = {"now": 1.0}
    value = per_replica(two, np.float32([1, 2]))
    for rate["now"] in (1.0, 2.0):
        result = two.run(lambda x: x * rate["now"], args=(value,))
        components_equal(two, result, np.float32([1, 2]) * rate["now"])


def test_functions_made_in_a_loop_are_warned_of_once(two):
    def run_many():
        return [two.run(lambda number=number: jnp.asarray(number)) for number in range(18)]

    with pytest.warns(rx.errors.PerformanceHint, match="Define it once") as seen:
        results = run_many()
    for number, result in enumerate(results):
        components_equal(two, result, [number] * 2)
    (warning,) = seen
    assert warning.filename == __file__


def test_programs_of_old_functions_are_let_go(two, monkeypatch):
    monkeypatch.setattr("replicax.execution._function_cache._MOST", 2)
    functions = [Recorded() for _ in range(3)]
    value = per_replica(two, np.float32([1, 2]))
    for fn in [*functions, functions[2], functions[0]]:
        two.run(fn, args=(value,))
    assert [len(fn.seen) for fn in functions] == [2, 1, 1]


def test_replicas_that_differ_in_shape_are_compiled(two):
    fn = Recorded()
    value = per_replica(two, [np.float32([1, 2]), np.float32([3])])
    for _ in range(2):
        result = two.run(fn, args=(value,))
        components_equal(two, result, [[2, 3], [4]])
    assert set(fn.traced) == {True}
    assert len(fn.traced) == 2, "once per shape"


@pytest.mark.usefixtures("eagerly")
def test_for_debugging_it_runs_as_python(two):
    fn = Recorded()
    value = per_replica(two, np.float32([1, 2]))
    for _ in range(20):
        two.run(fn, args=(value,))
        two.run(lambda: fn(0))
    assert set(fn.traced) == {False}
    two.run(rx.function(fn), args=(value,))
    assert set(fn.traced) == {False}


def test_who_asks_for_numbers_is_told(two):
    value = per_replica(two, np.float32([1, 2]))
    asking = [float, bool, np.asarray, lambda x: [1, 2][x.astype(int)]]
    for ask in asking:
        with pytest.raises(TypeError) as caught:
            two.run(lambda x, ask=ask: ask(x), args=(value,))
        assert "run_functions_eagerly" in "".join(caught.value.__notes__)


def test_a_failed_run_changes_nothing(two):
    with two.scope():
        variable = rx.Variable(1.0, aggregation="SUM")

    def fn():
        variable.assign_add(1.0)
        raise KeyError("no")

    with pytest.raises(KeyError):
        two.run(fn)
    equal(variable, 1.0)


# Gather


def test_gather_demands_equal_shapes(make):
    strategy = make(cores(2))
    whole = per_replica(strategy, np.arange(12.0).reshape(2, 2, 3))
    equal(strategy.gather(whole, axis=1), np.concatenate(whole.values, axis=1))
    ragged = per_replica(strategy, [np.ones((2, 3)), np.ones((1, 3))])
    with pytest.raises(ValueError, match=r"replica 0: \(2, 3\), replica 1: \(1, 3\)"):
        strategy.gather({"whole": whole, "ragged": ragged}, axis=0)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.gather(whole, axis=0))


def test_gather_of_what_is_not_distributed_is_refused_as_elsewhere(two):
    with pytest.raises(ValueError, match="distributed value"):
        two.gather(np.ones(3), axis=0)
