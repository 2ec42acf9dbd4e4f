"""Variables: kinds, reads and writes in every context."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, copies_equal, equal, per_replica

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")

AGGREGATED = {
    "SUM": sum,
    "MEAN": lambda values: sum(values) / len(values),
    "ONLY_FIRST_REPLICA": lambda values: values[0],
}


def make(strategy, value, aggregation="NONE", synchronization="AUTO", **options):
    with strategy.scope():
        return rx.Variable(
            value, aggregation=aggregation, synchronization=synchronization, **options
        )


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def kind(strategy):
    mirrored = (
        rx.MirroredStrategy
        | rx.MultiWorkerMirroredStrategy
        | rx.FullyShardedStrategy
        | rx.MultiWorkerFullyShardedStrategy
    )
    if isinstance(strategy, mirrored):
        return "MirroredVariable"
    if isinstance(strategy, rx.experimental.CentralStorageStrategy):
        return "AggregatingVariable"
    return "PlainVariable"


def test_the_scope_decides_the_kind(strategy):
    variable = make(strategy, 1.0)
    assert type(variable).__name__ == kind(strategy)
    assert isinstance(variable, rx.Variable)
    assert strategy.extended.variable_created_in_scope(variable)
    if strategy is not rx.get_strategy():
        assert not strategy.extended.variable_created_in_scope(rx.Variable(1.0))


def test_metadata(strategy):
    variable = make(strategy, np.ones((2, 3)), "SUM", name="w", dtype="float16")
    assert variable.shape == (2, 3)
    assert variable.ndim == 2
    assert variable.dtype == jnp.float16
    assert variable.name == "w"
    assert variable.trainable
    assert variable.aggregation is rx.VariableAggregation.SUM
    assert variable.synchronization is rx.VariableSynchronization.AUTO
    assert variable.device in strategy.extended.parameter_devices
    assert len(variable) == 2


def test_copies_are_on_the_parameter_devices_and_have_names_of_their_own(two):
    variable = make(two, [1.0, 2.0], name="w")
    first, second = variable.values
    assert [first.device, second.device] == list(two.extended.worker_devices)
    assert [first.name, second.name] == ["w", "w/replica_1"]
    assert two.extended.value_container(second) is variable
    assert two.extended.value_container(variable) is variable
    equal(second.numpy(), [1, 2])
    assert repr(variable) == (
        "MirroredVariable:{\n"
        "  0: <rx.Variable 'w' shape=(2,) dtype=float32, value=[1. 2.]>,\n"
        "  1: <rx.Variable 'w/replica_1' shape=(2,) dtype=float32, value=[1. 2.]>\n"
        "}"
    )
    assert repr(rx.Variable(1.0)) == "<rx.Variable 'Variable' shape=() dtype=float32, value=1.0>"


@pytest.mark.parametrize("initial", [lambda: jnp.ones(2), lambda: lambda: jnp.ones(2)])
def test_the_initial_value_may_be_callable(strategy, initial):
    equal(make(strategy, initial()), [1, 1])


def test_the_initial_value_may_be_another_variable(two):
    source = make(two, [1.0, 2.0])
    equal(make(two, source), [1, 2])
    equal(rx.Variable(source), [1, 2])


def test_cross_replica_writes_reach_every_copy(strategy):
    variable = make(strategy, 8.0)
    assert variable.assign(3.0) is variable
    assert variable.assign_add(4.0) is variable
    assert variable.assign_sub(1.5) is variable
    copies_equal(strategy, variable, 5.5)
    with strategy.scope():
        variable.assign(rx.Variable(2.0))
        equal(variable.read_value(), 2.0)


@pytest.mark.parametrize("aggregation", AGGREGATED)
@pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE"])
def test_writes_of_replicas_are_aggregated_first(strategy, aggregation, synchronization):
    variable = make(strategy, 8.0, aggregation, synchronization)
    ids = range(strategy.num_replicas_in_sync)
    combine = AGGREGATED[aggregation]

    def fn():
        variable.assign(replica_id() + 1.0)
        variable.assign_add(replica_id() * 4.0)
        variable.assign_sub(replica_id() * 2.0)
        variable.assign_add(1.0)  # a constant counts once a replica
        return variable.read_value()

    expected = (
        combine([i + 1.0 for i in ids])
        + combine([i * 4.0 for i in ids])
        - combine([i * 2.0 for i in ids])
        + combine([1.0 for _ in ids])
    )
    components_equal(strategy, strategy.run(fn), [expected] * len(ids))
    copies_equal(strategy, variable, expected)


def test_a_shared_array_counts_once_a_replica(two):
    variable, shared = make(two, [0.0, 0.0], "SUM"), jnp.ones(2)
    two.run(lambda: variable.assign(shared))
    equal(variable, [2, 2])


def test_replicas_cannot_write_without_an_aggregation(strategy):
    variable = make(strategy, 8.0)
    if kind(strategy) == "PlainVariable":
        strategy.run(lambda: variable.assign(1.0))
        equal(variable, 1.0)
    else:
        with pytest.raises(ValueError, match=r"no `aggregation`.*replica context"):
            strategy.run(lambda: variable.assign(1.0))
        equal(variable, 8.0)


def test_a_variable_from_outside_is_read_by_all_replicas_and_written_by_one(strategy):
    variable = rx.Variable([1.0, 2.0])
    count = strategy.num_replicas_in_sync
    result = strategy.run(lambda: variable * (replica_id() + 1.0))
    components_equal(strategy, result, [[i + 1.0, 2 * (i + 1.0)] for i in range(count)])
    if count == 1:
        strategy.run(lambda: variable.assign([5.0, 6.0]))
        equal(variable, [5, 6])
    else:
        with pytest.raises(RuntimeError, match="one copy and cannot be written by"):
            strategy.run(lambda: variable.assign([5.0, 6.0]))
        equal(variable, [1, 2])


@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_on_read_copies_go_their_own_way_until_read(strategy, aggregation):
    variable = make(strategy, 0.0, aggregation, "ON_READ")
    ids = range(strategy.num_replicas_in_sync)

    def fn():
        variable.assign_add(replica_id() + 1.0)
        variable.assign(variable * 2.0)
        variable.assign_sub(1.0)
        return variable.value

    own = [2.0 * (i + 1.0) - 1.0 for i in ids]
    components_equal(strategy, strategy.run(fn), own)
    components_equal(strategy, variable, own)
    total = AGGREGATED[aggregation](own)
    equal(variable.value, total)
    equal(variable.numpy(), total)
    equal(variable + 1.0, total + 1.0)
    equal(strategy.extended.read_var(variable), total)
    assert not variable.trainable


@pytest.mark.parametrize(("aggregation", "each"), [("SUM", 3.0), ("MEAN", 6.0)])
def test_on_read_written_across_replicas(two, aggregation, each):
    variable = make(two, 0.0, aggregation, "ON_READ")
    variable.assign(6.0)
    components_equal(two, variable, [each, each])
    equal(variable, 6.0)
    for write in (variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="mean nothing across replicas"):
            write(1.0)
    components_equal(two, variable, [each, each])


def test_whole_numbers_are_spread_without_loss():
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    variable = make(strategy, [0, 0], "SUM", "ON_READ")
    variable.assign([10, -3])
    equal(variable, [10, -3])
    components_equal(strategy, variable, [[3, 0], [3, -1], [2, -1], [2, -1]])


def test_on_read_without_an_aggregation_has_no_single_value(two):
    variable = make(two, 1.0, "NONE", "ON_READ")
    two.run(lambda: variable.assign_add(1.0 * replica_id()))
    components_equal(two, variable, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"no single value.*variable\.values"):
        variable.value  # noqa: B018


def test_lazily_created_variables_start_from_replica_0(strategy, execution):
    def fn():
        return rx.Variable(replica_id() + 3.0)

    if execution == "eager":
        equal(strategy.run(fn), 3.0)
    elif strategy is not rx.get_strategy():  # its replica id is a number
        with pytest.raises(TypeError, match="is a tracer"):
            strategy.run(fn)


def test_created_lazily_inside_run(strategy):
    made, count = {}, strategy.num_replicas_in_sync

    def fn():
        if "variable" not in made:
            made["variable"] = rx.Variable(3.0, aggregation="SUM")
        made["variable"].assign_add(replica_id() + 1.0)
        return made["variable"] * 2.0

    first = 3.0 + count * (count + 1) / 2
    components_equal(strategy, strategy.run(fn), [2 * first] * count)
    variable = made["variable"]
    assert type(variable).__name__ == kind(strategy)
    assert strategy.extended.variable_created_in_scope(variable)
    second = first + count * (count + 1) / 2
    components_equal(strategy, strategy.run(fn), [2 * second] * count)


def test_run_returns_variables_as_themselves(strategy):
    variable = make(strategy, 1.0)
    local = make(strategy, 1.0, "SUM", "ON_READ")
    out = strategy.run(lambda: {"a": variable, "b": [local]})
    assert out["a"] is variable
    assert out["b"][0] is local


def test_variables_as_arguments_of_run(strategy):
    variable = make(strategy, 3.0)
    result = strategy.run(lambda v, x: v * x, args=(variable,), kwargs={"x": 2.0})
    components_equal(strategy, result, [6.0] * strategy.num_replicas_in_sync)


def test_operators(two):
    for v in (rx.Variable([1.0, 4.0]), make(two, [1.0, 4.0])):
        array = np.float32([1, 4])
        equal(v + 1, array + 1)
        equal(1 - v, 1 - array)
        equal(v * v, array * array)
        equal(2 / v, 2 / array)
        equal(v // 3, array // 3)
        equal(v % 3, array % 3)
        equal(v**2, array**2)
        equal(2**v, 2**array)
        equal(v @ v, array @ array)
        equal(np.float32([2, 3]) @ v, 14.0)
        equal(jnp.float32([2, 3]) + v, [3, 7])
        equal(np.float32([2, 3]) + v, [3, 7])
        equal(-v, -array)
        equal(abs(-v), array)
        equal(v > 2, [False, True])
        equal(v == 4, [False, True])
        equal(v != 4, [True, False])
        equal(v[1], 4.0)
        equal(v[::-1], [4, 1])
        equal(list(v), [1, 4])
        assert {v: "key"}[v] == "key"
    number = rx.Variable(3)
    assert (int(number), float(number), bool(number), complex(number)) == (3, 3.0, True, 3 + 0j)
    assert [10, 20, 30, 40][number] == 40
    assert f"{rx.Variable(1.5):.2f}" == "1.50"
    equal(number & 1, 1)
    equal(number | 4, 7)
    equal(number << 2, 12)
    equal(~number, -4)


@pytest.mark.parametrize(
    "function",
    [
        jnp.sum,
        jnp.square,
        jnp.exp,
        jnp.linalg.norm,
        jax.nn.softmax,
        lambda v: jnp.dot(v, v),
        lambda v: jnp.where(v > 2, v, 0),
        lambda v: jnp.stack([v, v]),
        lambda v: jnp.concatenate([v, v]),
        lambda v: jnp.array(v),
        jax.jit(lambda v: v * 2),
        jax.vmap(lambda x: x + 1),
        jax.grad(lambda v: jnp.sum(v**2)),
        np.sum,
        np.asarray,
    ],
)
def test_jax_numpy_and_numpy_take_variables(two, function, execution):
    array = np.float32([1, 4])
    equal(function(make(two, array)), function(jnp.asarray(array)))
    if execution == "compiled" and function in (np.sum, np.asarray):
        return  # NumPy needs numbers
    result = two.run(lambda v: function(v), args=(make(two, array),))
    components_equal(two, result, [function(jnp.asarray(array))] * 2)


def test_to_jax_a_variable_in_a_nest_is_its_value(two):
    variable = make(two, [1.0, 4.0])
    (leaf,) = jax.tree.leaves({"w": variable})
    equal(leaf, [1, 4])


def test_update_context(strategy):
    variable, other = make(strategy, 5.0), make(strategy, 2.0)
    seen = []

    def fn(copy, other, factor, shift):
        seen.append(copy.device)
        copy.assign_sub(other * factor)
        copy.assign_add(shift)
        return copy.read_value() * 10

    out = strategy.extended.update(variable, fn, (other, 0.5), {"shift": 1.0})
    equal(variable, 5.0)
    copies_equal(strategy, out, 50.0)
    assert seen == [copy.device for copy in variable.values]
    lists = strategy.extended.update(
        variable, lambda copy: {"a": copy.assign(3.0).value}, group=False
    )
    equal(np.array([float(x) for x in lists["a"]]), [3.0] * len(variable.values))


def test_the_variable_itself_may_be_written_in_update_context(two):
    variable = make(two, 5.0)
    two.extended.update(variable, lambda copy: variable.assign(copy + 1.0))
    components_equal(two, variable, [6.0, 6.0])


def test_on_read_copies_are_updated_one_by_one(two):
    variable = make(two, 0.0, "SUM", "ON_READ")
    two.run(lambda: variable.assign(replica_id() + 1.0))
    two.extended.update(variable, lambda copy: copy.assign(copy * 10))
    components_equal(two, variable, [10.0, 20.0])


def test_a_failed_update_changes_no_copy(two):
    variable = make(two, 5.0)
    calls = []

    def fn(copy):
        copy.assign(1.0)
        calls.append(copy)
        if len(calls) == 2:
            raise KeyError

    with pytest.raises(KeyError):
        two.extended.update(variable, fn)
    components_equal(two, variable, [5.0, 5.0])


def test_one_copy_of_a_mirrored_variable_cannot_be_written_alone(two):
    variable = make(two, 5.0)
    with pytest.raises(RuntimeError, match="make its copies differ"):
        variable.values[1].assign(1.0)
    components_equal(two, variable, [5.0, 5.0])
    local = make(two, 5.0, "SUM", "ON_READ")
    local.values[1].assign(1.0)
    components_equal(two, local, [5.0, 1.0])


def test_variables_are_read_in_the_scope_of_another_strategy_and_not_written(two, execution):
    variable = make(two, 5.0)
    other = rx.MirroredStrategy(["CPU:4", "CPU:5", "CPU:6"])
    with other.scope():
        equal(variable, 5.0)
        with pytest.raises(RuntimeError, match=r"belongs to MirroredStrategy\(2\)"):
            variable.assign(6.0)
    components_equal(other, other.run(lambda: variable * 1.0), [5.0] * 3)
    with pytest.raises(RuntimeError, match=r"belongs to MirroredStrategy\(2\)"):
        other.run(lambda: variable.assign(7.0))
    local = make(two, 5.0, "SUM", "ON_READ")
    if execution == "eager":
        components_equal(other, other.run(lambda: local * 1.0), [10.0] * 3)
    else:
        with pytest.raises(ValueError, match="Read it before"):
            other.run(lambda: local * 1.0)
    with pytest.raises((RuntimeError, ValueError), match=r"belongs to MirroredStrategy\(2\)"):
        other.run(lambda: local.assign(7.0))


def test_a_value_that_was_handed_out_stays_what_it_was(two):
    variable = make(two, [1.0, 2.0], "SUM")
    before, parts = variable.value, [copy.value for copy in variable.values]
    two.run(lambda: variable.assign_add([1.0, 1.0]))
    equal(before, [1, 2])
    equal(parts[1], [1, 2])


@pytest.mark.parametrize("refuse", [pickle.dumps, copy.copy])
def test_variables_are_not_pickled_or_copied(two, refuse):
    for variable in (make(two, 1.0), rx.Variable(1.0)):
        with pytest.raises(TypeError, match="cannot be pickled"):
            refuse(variable)


# What assign takes.


def test_what_fits_is_converted(strategy):
    variable = make(strategy, np.zeros(2, np.float32))
    for value in ([1, 2], (1.0, 2.0), np.arange(2), np.float64([1, 2]), jnp.float32([1, 2])):
        equal(variable.assign(value), np.asarray(value))
        assert variable.value.dtype == jnp.float32
    number = make(strategy, 0)
    equal(number.assign(True), 1)
    equal(number.assign(np.int64(7)), 7)
    mirrored = strategy.extended.broadcast_to(jnp.float32([3, 4]), variable)
    equal(variable.assign(mirrored), [3, 4])


@pytest.mark.parametrize("write", ["assign", "assign_add", "assign_sub"])
def test_what_does_not_fit_is_refused_and_changes_nothing(strategy, write):
    variable = make(strategy, np.ones(2, np.float32), "SUM", name="w")
    number = make(strategy, 1, "SUM")
    for value, message in [
        ([1.0, 2.0, 3.0], r"shape \(2,\).* shape \(3,\)"),
        (1.0, r"shape \(2,\).* shape \(\)"),
        (jnp.int32([1, 2]), "dtype float32.*dtype int32"),
        (["a", "b"], "dtype float32.*dtype <U1"),
        ([1j, 2j], "dtype float32.*dtype complex128"),
    ]:
        with pytest.raises(ValueError, match=message):
            getattr(variable, write)(value)
        with pytest.raises(ValueError, match=message):
            strategy.run(lambda value=value: getattr(variable, write)(value))
    for value in (1.5, jnp.float32(1)):
        with pytest.raises(TypeError, match="dtype int32"):
            getattr(number, write)(value)
    equal(variable, [1, 1])
    equal(number, 1)


def test_numbers_make_variables_of_a_definite_type(strategy):
    for variable in (make(strategy, 3.0), rx.Variable(3.0)):
        assert (variable * jnp.ones((), jnp.bfloat16)).dtype == jnp.float32
        assert not variable.value.weak_type
        assert not variable.assign(4.0).value.weak_type


@pytest.mark.parametrize(
    "make_strategy",
    [lambda: rx.OneDeviceStrategy("CPU:0"), lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"])],
    ids=["one device", "mirrored 2"],
)
def test_refused_at_creation(make_strategy):
    strategy = make_strategy()
    for options, message in [
        ({"initial_value": 1, "aggregation": "MEAN"}, "a mean of whole numbers is fractional"),
        (
            {"initial_value": 1, "aggregation": "MEAN", "synchronization": "ON_READ"},
            "a mean of whole numbers is fractional",
        ),
        ({"initial_value": 1.0, "synchronization": "NONE"}, "keeps its variables in sync"),
        ({"initial_value": 1.0, "aggregation": "MAX"}, "Unknown VariableAggregation: 'MAX'"),
        ({"initial_value": 1.0, "synchronization": "LATER"}, "Unknown VariableSynchronization"),
    ]:
        with strategy.scope(), pytest.raises(ValueError, match=message):
            rx.Variable(**options)


def test_tracers_do_not_end_up_in_variables(two):
    variable = make(two, 1.0)
    with pytest.raises(TypeError, match="assigned a tracer"):
        jax.jit(lambda x: variable.assign(x).value)(2.0)
    with pytest.raises(TypeError, match="is a tracer"):
        jax.jit(lambda x: rx.Variable(x).value)(2.0)
    equal(variable, 1.0)


def test_per_replica_values_are_not_assigned(two):
    variable = make(two, 1.0)
    with pytest.raises(TypeError, match=r"PerReplica value.*reduce"):
        variable.assign(per_replica(two, [1.0, 2.0]))


def test_mirrored_values_are_converted_like_others(strategy):
    variable = make(strategy, 1.0)
    topology = strategy.topology
    # There JAX does not keep that a Python number was one.
    if topology.spans_processes or topology.logical_devices_per_replica > 1:
        with pytest.raises(TypeError, match="int32"):
            variable.assign(strategy.extended.broadcast_to(2, variable))
        variable.assign(strategy.extended.broadcast_to(2.0, variable))
    else:
        variable.assign(strategy.extended.broadcast_to(2, variable))
    equal(variable, 2.0)
    assert variable.value.dtype == jnp.float32
    local = make(strategy, 1.0, "SUM", "ON_READ")
    local.assign(rx.Mirrored([3] * len(strategy.topology.local_replicas)))
    equal(local, 3.0)
    assert local.value.dtype == jnp.float32


def test_a_sum_of_truth_values_is_refused(two):
    with two.scope(), pytest.raises(ValueError, match="is a count"):
        rx.Variable(False, aggregation="SUM")


def test_random_keys_as_variables(strategy):
    key = make(strategy, jax.random.key(3))
    split = jax.random.split(key.value)[0]
    key.assign(split)
    assert (jax.random.key_data(key.value) == jax.random.key_data(split)).all()


def test_the_initial_value_is_made_in_replica_context(two, execution):
    if execution == "eager":
        made = two.run(lambda: rx.Variable(lambda: replica_id() + 7.0))
        equal(made, 7.0)


def test_local_results_of_a_nest_of_variables(strategy):
    variable = make(strategy, 1.0)
    nests = strategy.experimental_local_results([variable])
    assert len(nests) == len(strategy.topology.local_replicas)
    for nest in nests:
        equal(nest[0], 1.0)
