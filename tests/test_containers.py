"""Containers that JAX does not take apart: mappings, dict subclasses, records."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica

import replicax as rx
from replicax import _nest


class Encoding(collections.UserDict):
    """A mapping like the batches of Hugging Face's tokenizers."""


class Settings(dict):
    pass


@dataclasses.dataclass
class Record:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any

    def __post_init__(self):
        assert self.x is not None, "an object was made of something else than numbers"


@attrs.define
class Attributes:
    x: Any
    y: Any


class Pair(NamedTuple):
    x: Any
    y: Any


MAKERS = {
    "UserDict": lambda x, y: Encoding(x=x, y=y),
    "dict subclass": lambda x, y: Settings(x=x, y=y),
    "dataclass": Record,
    "frozen dataclass": Frozen,
    "attrs": Attributes,
    "namedtuple": Pair,
    "nested": lambda x, y: {"inside": [Encoding(x=x, y=Record(y, None))]},
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def fields(nest):
    """Return the arguments of `make`."""
    if isinstance(nest, dict) and "inside" in nest:
        (inner,) = nest["inside"]
        assert isinstance(inner, Encoding)
        assert isinstance(inner["y"], Record)
        return inner["x"], inner["y"].x
    return (nest["x"], nest["y"]) if isinstance(nest, collections.abc.Mapping) else (nest.x, nest.y)


def batch(make, rows):
    return make(np.arange(rows, dtype=np.float32), np.arange(rows) + 10)


def test_batches_are_divided_and_keep_their_class(make, strategy, execution):
    rows = 2 * strategy.num_replicas_in_sync
    given = batch(make, rows)
    options = rx.InputOptions(auto_shard_policy="DATA")
    dataset = strategy.experimental_distribute_dataset([given] * 2, options)
    assert type(dataset.element_spec) is type(given)

    def replica_step(element):
        assert type(element) is type(given)
        x, y = fields(element)
        return make(x * 2, y)

    for element in dataset:
        assert type(element) is type(given)
        result = strategy.run(replica_step, args=(element,))
        assert type(result) is type(given)
        x, y = fields(strategy.gather(result, axis=0))
        equal(np.sort(x), 2 * np.arange(rows, dtype=np.float32))
        equal(np.sort(y), np.arange(rows) + 10)


def test_per_replica_values_in_arguments_are_taken_apart(make, strategy, execution):
    count = strategy.num_replicas_in_sync
    x = per_replica(strategy, [np.float32([replica]) for replica in range(count)])
    results = strategy.run(lambda given: fields(given)[0] + fields(given)[1], args=(make(x, x),))
    components_equal(strategy, results, [np.float32([2 * replica]) for replica in range(count)])


def test_reduce_and_all_reduce(make, strategy, execution):
    def replica_step():
        value = make(jnp.ones(2), jnp.float32(3.0) * jnp.ones(2))
        return value, rx.get_replica_context().all_reduce("SUM", value)

    value, summed = strategy.run(replica_step)
    for x, y in (fields(strategy.reduce("SUM", value, axis=None)), fields(summed)):
        count = strategy.num_replicas_in_sync
        equal(strategy.experimental_local_results(x)[0], np.full(2, count, np.float32))
        equal(strategy.experimental_local_results(y)[0], np.full(2, 3 * count, np.float32))
    one, *_ = strategy.experimental_local_results(value)
    assert type(one) is type(value)


def test_functions_take_and_return_them(make, two):
    @rx.function
    def double(given):
        x, y = fields(given)
        return make(x * 2, y * 2)

    for _ in range(2):
        x, y = fields(double(make(jnp.ones(2), jnp.arange(2))))
        equal(x, [2.0, 2.0])
        equal(y, [0, 2])
    assert double.tracing_count == 1


def test_rows_of_arrays_in_memory(make, two):
    pipeline = rx.from_tensor_slices(batch(make, 6)).shuffle(seed=0).batch(2)
    seen = [x for element in pipeline for x in fields(element)[0].tolist()]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    one = rx.from_tensor_slices(batch(make, 6))[3]
    assert float(fields(one)[0]) == 3.0


@pytest.mark.parametrize("kind", ["UserDict", "dict subclass", "dataclass", "attrs"])
def test_checkpoints_restore_them_in_place(kind, two, tmp_path):
    make = MAKERS[kind]
    with two.scope():
        weight = rx.Variable(jnp.ones(2))
    state = make(weight, np.float32([1.0, 2.0]))
    path = rx.Checkpoint(state=state, step=3).save(str(tmp_path / "ckpt"))
    weight.assign([0.0, 0.0])
    state = make(weight, np.float32([0.0, 0.0]))
    checkpoint = rx.Checkpoint(state=state, step=0)
    checkpoint.restore(path)
    equal(weight.numpy(), [1.0, 1.0])
    assert type(checkpoint.state) is type(state)
    assert checkpoint.state is state
    equal(fields(state)[1], [1.0, 2.0])
    assert checkpoint.step == 3


def test_a_mapping_from_elsewhere_is_no_row_of_keys(two):
    dataset = two.experimental_distribute_dataset([Encoding(x=np.arange(4), y=np.arange(4))])
    (element,) = dataset
    assert set(element) == {"x", "y"}
    components_equal(two, element["x"], [[0, 1], [2, 3]])


# What is more than data, or none.


def test_objects_that_hold_variables_are_handed_over_as_they_are(two, execution):
    @dataclasses.dataclass(eq=False)  # so that it is known by its identity
    class Trainer:
        weight: rx.Variable
        steps: int = 0

    with two.scope():
        trainer = Trainer(rx.Variable(1.0, aggregation="SUM"))
    seen = []

    def replica_step(given):
        seen.append(given is trainer)
        return given.weight + 1

    components_equal(two, two.run(replica_step, args=(trainer,)), [2.0, 2.0])
    assert all(seen)


def test_objects_with_more_than_their_fields_are_handed_over_as_they_are(two):
    record = Record(jnp.ones(1), 2)
    record.note = "made later"
    seen = []
    two.run(lambda given: seen.append(given is record), args=(record,))
    assert all(seen)


def test_what_no_array_can_hold_is_refused_with_its_place(two):
    class Thing:
        pass

    rows = [{"x": np.arange(2), "meta": [Encoding(thing=Thing())]}]
    with pytest.raises(rx.errors.InvalidType, match=r"Thing at \['meta'\]\[0\]\['thing'\]"):
        next(iter(two.experimental_distribute_dataset(rows)))


class Strange(collections.UserDict):
    def __init__(self, *, only):
        super().__init__(only)


def test_a_class_that_cannot_be_made_of_a_dict(two):
    strange = Strange(only={"x": np.ones(2)})
    with pytest.raises(rx.errors.InvalidType, match="register_pytree_node"):
        next(iter(two.experimental_distribute_dataset([strange])))
    seen = []
    two.run(lambda given: seen.append(given is strange), args=(strange,))
    assert all(seen)


def unset():
    record = object.__new__(Record)
    record.x = jnp.ones(1)
    return record


def cyclic():
    record = Record(jnp.ones(1), None)
    record.y = record
    return record


def tagged():
    settings = Settings(x=jnp.ones(1))
    settings.tag = "t"
    return settings


@pytest.mark.parametrize(
    "made",
    [
        lambda: Record(0, "no array"),
        lambda: Record(jnp.ones(1), object()),
        lambda: Settings(x="no array"),
        lambda: os.environ,
        tagged,
        unset,
        cyclic,
    ],
)
def test_what_is_not_only_data_is_handed_over_as_it_is(made, two):
    given, seen = made(), []

    def replica_step(got):
        seen.append(got is given)
        rx.get_replica_context().merge_call(lambda _, got: seen.append(got is given), args=(got,))

    two.run(replica_step, args=(given,))
    assert seen == [True] * 3
    assert two.experimental_local_results(given)[0] is given


def test_what_a_record_derives_from_its_fields_is_no_state_of_its_own(two):
    @dataclasses.dataclass
    class Batch:
        x: Any

        @functools.cached_property
        def rows(self):
            return np.shape(self.x)

    batch = Batch(per_replica(two, [1.0, 2.0]))
    batch.__dict__["rows"] = "derived"
    components_equal(two, two.run(lambda got: got.x * 2, args=(batch,)), [2.0, 4.0])


def test_an_ordered_mapping_keeps_its_order(two):
    class Outputs(collections.OrderedDict):
        pass

    result = two.run(lambda: Outputs(loss=jnp.ones(1), aux=jnp.zeros(1)))
    assert list(result) == ["loss", "aux"]


def test_records_in_an_input_signature(two):
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    double = rx.function(lambda given: given.x * 2, input_signature=[Record(spec, spec)])
    equal(double(Record(jnp.ones(2), jnp.ones(2))), [2.0, 2.0])


def test_classes_that_are_registered_with_jax_stay_what_they_are_there():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Registered:
        x: Any
        name: str = dataclasses.field(metadata={"static": True})

    leaves, structure = _nest.flatten(Registered(1, "one"))
    assert leaves == [1]
    assert jax.tree.unflatten(structure, [2]) == Registered(2, "one")
