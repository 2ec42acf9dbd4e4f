"""Saved state is restored: into the same objects, into others, under other strategies."""

from __future__ import annotations

import collections
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import STRATEGIES, cpus
from small_training import Training
from support import components_equal, copies_equal, equal

import replicax as rx
from replicax.checkpoint import _files as files
from replicax.variables import whole_array


def saved(tmp_path, strategy, steps: int = 4) -> tuple[Training, str]:
    training = Training(strategy)
    training.steps(steps)
    return training, training.checkpoint.save(tmp_path / "model")


def test_everything_comes_back_under_every_strategy(strategy, tmp_path):
    def make(value):
        with strategy.scope():
            weight = rx.Variable(np.float32([value, 2.0]))
            count = rx.Variable(0, synchronization="ON_READ", aggregation="SUM", dtype=np.int32)
            optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9))
        batches = [np.arange(8), np.arange(8, 16), np.arange(16, 24)]
        options = rx.InputOptions(auto_shard_policy="DATA")
        data = iter(strategy.experimental_distribute_dataset(batches, options))
        return rx.Checkpoint(nest=[weight, {"count": count}], optimizer=optimizer, data=data, n=0)

    def step(checkpoint):
        weight, others = checkpoint.nest

        def replica(rows):
            checkpoint.optimizer.apply_gradients([(weight.value, weight)])
            others["count"].assign_add(jnp.int32(rows.shape[0]))

        strategy.run(replica, args=(next(checkpoint.data),))
        checkpoint.n += 1

    def state(checkpoint):
        weight, others = checkpoint.nest
        return [
            weight.numpy().tolist(),
            int(others["count"].numpy()),
            int(checkpoint.optimizer.iterations),
            checkpoint.data.get_state(),
            checkpoint.n,
        ]

    checkpoint = make(1.0)
    step(checkpoint)
    path = checkpoint.save(tmp_path / "model")
    before = state(checkpoint)
    step(checkpoint)
    expected = state(checkpoint)
    # Into other objects, where the optimizer makes its slots in its first step.
    other = make(5.0)
    report = other.restore(path)
    assert state(other) == before
    assert (report.missing, report.unused) == ((), ())
    assert report.deferred == ("optimizer/slots/[0].trace/nest/0",)
    step(other)
    assert state(other) == expected
    assert report.deferred == ()
    report.assert_consumed()
    # And back in place.
    checkpoint.restore(path).assert_consumed()
    assert state(checkpoint) == before
    step(checkpoint)
    assert state(checkpoint) == expected
    for each in (checkpoint, other):
        each.data.close()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> tuple[str, dict]:
    """A checkpoint saved by two replicas, and what came after three further steps."""
    training, path = saved(tmp_path_factory.mktemp("two"), rx.MirroredStrategy(cpus(2)))
    training.steps(3)
    training.iterator.close()
    return path, training.state()


@pytest.mark.parametrize("name", ["one device", "mirrored 1", "mirrored 3", "central 2"])
def test_a_run_goes_on_under_other_strategies(name, of_two):
    path, expected = of_two
    strategy = STRATEGIES[name]()
    training = Training(strategy, seed=3.0)
    training.checkpoint.restore(path)
    training.steps(3)
    for name, value in training.state().items():
        equal(value, expected[name], 1e-5)
    training.iterator.close()


@pytest.mark.parametrize(
    ("aggregation", "restored"), [("SUM", [3.0, 3.0, 3.0, 3.0]), ("MEAN", [6.0, 6.0, 6.0, 6.0])]
)
def test_on_read_variables_are_saved_by_their_aggregate(aggregation, restored, tmp_path):
    def make(count):
        strategy = rx.MirroredStrategy(cpus(count))
        with strategy.scope():
            variable = rx.Variable(0.0, synchronization="ON_READ", aggregation=aggregation)
        return strategy, variable

    strategy, variable = make(2)
    own = strategy.experimental_distribute_values_from_function(
        lambda c: [4.0, 8.0][c.replica_id_in_sync_group]
    )
    strategy.run(lambda x: variable.assign(x), args=(own,))
    path = rx.Checkpoint(v=variable).save(tmp_path / "model")
    total = 12.0 if aggregation == "SUM" else 6.0
    strategy, variable = make(4)
    rx.Checkpoint(v=variable).restore(path)
    equal(variable.numpy(), total)
    components_equal(strategy, variable, restored)


def test_an_on_read_variable_without_aggregation_is_refused(tmp_path, two):
    with two.scope():
        variable = rx.Variable(0.0, synchronization="ON_READ", name="loose")
    with pytest.raises(rx.errors.AggregationRequired, match="loose"):
        rx.Checkpoint(v=variable).save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restored_in_parts", [True, False])
def test_variables_in_parts(tmp_path, restored_in_parts):
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    divided = rx.MirroredStrategy(cpus(8), logical_devices_per_replica=4)

    def make(in_parts, value):
        if not in_parts:
            strategy = rx.MirroredStrategy(cpus(2))
            with strategy.scope():
                return strategy, rx.Variable(value)
        with divided.scope(), divided.extended.partition([2, 2]):
            return divided, rx.Variable(value)

    _, variable = make(not restored_in_parts, value)
    path = rx.Checkpoint(v=variable).save(tmp_path / "model")
    strategy, variable = make(restored_in_parts, np.zeros_like(value))
    layout = whole_array(variable).sharding
    rx.Checkpoint(v=variable).restore(path).assert_consumed()
    copies_equal(strategy, variable, value)
    assert whole_array(variable).sharding == layout


class Pair(NamedTuple):
    first: object
    second: object


def test_nests_arrays_and_plain_values(tmp_path):
    def make(factor):
        key = jax.random.key(3 * factor)
        counts = {"steps": 5 * factor, "names": ["a" * factor], "done": factor == 1}
        return rx.Checkpoint(
            counts=counts,
            pair=Pair(np.float32([factor, 2.0]), 1.5 * factor),
            arrays=[jnp.arange(3) * factor, np.float64(factor), jnp.ones((2, 0)), key],
            half=rx.Variable(jnp.ones(2, jnp.bfloat16) * factor),
            nothing=None,
        ), counts

    checkpoint, _ = make(1)
    path = checkpoint.save(tmp_path / "model")
    other, counts = make(2)
    names = other.counts["names"]
    other.restore(path).assert_consumed()
    # Dicts and lists stay the objects that they were.
    assert other.counts is counts
    assert other.counts["names"] is names
    assert counts == {"steps": 5, "names": ["a"], "done": True}
    assert isinstance(other.pair, Pair)
    assert other.pair.second == 1.5
    equal(other.pair.first, [1.0, 2.0])
    integers, number, empty, key = other.arrays
    equal(integers, [0, 1, 2])
    assert isinstance(integers, jax.Array)
    assert (type(number), number) == (np.float64, 1.0)
    assert empty.shape == (2, 0)
    equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    assert other.half.dtype == jnp.bfloat16
    equal(other.half.numpy().astype(np.float32), [1.0, 1.0])


def test_collections_stay_the_objects_that_they_were(tmp_path):
    def make(number):
        inner, listed = {"n": number}, [number]
        ordered = collections.OrderedDict(b=number, a=number)
        missing = collections.defaultdict(int, {"n": number})
        return inner, listed, ordered, missing, Pair(inner, (listed,))

    path = rx.Checkpoint(nest=list(make(1))[2:]).save(tmp_path / "model")
    inner, listed, ordered, missing, pair = make(2)
    checkpoint = rx.Checkpoint(nest=[ordered, missing, pair])
    checkpoint.restore(path).assert_consumed()
    assert (inner, listed, list(ordered.items())) == ({"n": 1}, [1], [("b", 1), ("a", 1)])
    assert (missing["n"], missing["another"]) == (1, 0)
    assert checkpoint.nest[0] is ordered
    assert checkpoint.nest[2].first is inner


def test_what_is_not_known_yet_is_a_value(tmp_path):
    unknown = rx.Checkpoint(best=None, worst={"at": None})
    first = unknown.save(tmp_path / "model")
    known = rx.Checkpoint(best=0.5, worst={"at": 3})
    second = known.save(tmp_path / "model")
    unknown.restore(second).assert_consumed()
    assert (unknown.best, unknown.worst) == (0.5, {"at": 3})
    known.restore(first).assert_consumed()
    assert (known.best, known.worst) == (None, {"at": None})


def test_arrays_of_unusual_kinds(tmp_path):
    no_keys = jax.random.split(jax.random.key(0), 0)
    checkpoint = rx.Checkpoint(swapped=np.arange(3, dtype=">i4"), no_keys=no_keys)
    path = checkpoint.save(tmp_path / "model")
    checkpoint.swapped = np.zeros(3, ">i4")
    checkpoint.restore(path).assert_consumed()
    equal(checkpoint.swapped, [0, 1, 2])
    assert checkpoint.no_keys.shape == (0,)
    for refused in (jnp.zeros(2, jnp.uint4), np.zeros(2, np.longdouble), np.zeros(2, "i4,f4")):
        with pytest.raises(rx.errors.InvalidType, match="'odd': its format has no arrays of"):
            rx.Checkpoint(odd=refused)


def test_arrays_stay_as_free_to_move_as_they_were(tmp_path):
    there = jax.device_put(jnp.ones(2), jax.devices()[1])
    checkpoint = rx.Checkpoint(free=jnp.ones(2), key=jax.random.key(1), there=there)
    checkpoint.restore(checkpoint.save(tmp_path / "model"))
    assert not checkpoint.free.committed
    assert not checkpoint.key.committed
    assert checkpoint.there.devices() == there.devices()
    _ = checkpoint.free + checkpoint.there  # raises where both are committed


def test_paths_are_numbered_and_never_overwritten(tmp_path):
    checkpoint = rx.Checkpoint(epoch=1)
    paths = [checkpoint.save(tmp_path / "model") for _ in range(2)]
    assert [Path(path).name for path in paths] == ["model-1", "model-2"]
    assert checkpoint.save_counter == 2
    again = rx.Checkpoint(epoch=3)
    assert Path(again.save(tmp_path / "model")).name == "model-3"
    again.restore(paths[0])
    assert (again.epoch, again.save_counter) == (1, 1)
    assert Path(again.save(tmp_path / "model")).name == "model-4"


def test_slots_are_found_by_their_variables(tmp_path, two):
    def make(order):
        with two.scope():
            variables = [rx.Variable(np.float32([i, i])) for i in (1.0, 2.0)]
            optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9))

        def step(gradients):
            pairs = list(zip(gradients, variables, strict=True))
            optimizer.apply_gradients([pairs[i] for i in order])

        return variables, rx.Checkpoint(a=variables[0], b=variables[1], optimizer=optimizer), step

    gradients = [np.float32([1.0, 1.0]), np.float32([3.0, 3.0])]
    variables, checkpoint, step = make([0, 1])
    two.run(step, args=(gradients,))
    path = checkpoint.save(tmp_path / "model")
    two.run(step, args=(gradients,))
    others, checkpoint, step = make([1, 0])
    checkpoint.restore(path)
    two.run(step, args=(gradients,))
    for ours, theirs in zip(others, variables, strict=True):
        equal(ours.numpy(), theirs.numpy())


def test_slots_that_are_not_made_yet_are_saved_again(tmp_path, two):
    training, path = saved(tmp_path, two)
    idle = Training(two)
    idle.checkpoint.restore(path)
    again = idle.checkpoint.save(tmp_path / "again")
    resumed = Training(two)
    resumed.checkpoint.restore(again)
    training.steps(1)
    resumed.steps(1)
    assert resumed.state() == training.state()
    for each in (training, resumed, idle):
        each.iterator.close()


def momentum(strategy):
    with strategy.scope():
        weight = rx.Variable([1.0, 1.0])
        optimizer = rx.Optimizer(optax.sgd(0.5, momentum=0.9))

    def step():
        strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2), weight)]))
        return weight.numpy().tolist()

    return weight, optimizer, step


def test_slots_of_a_checkpoint_do_not_outlive_another_one(tmp_path, two):
    weight, optimizer, step = momentum(two)
    checkpoint = rx.Checkpoint(w=weight, o=optimizer)
    without = checkpoint.save(tmp_path / "model")
    expected = step()
    later = checkpoint.save(tmp_path / "model")
    weight, optimizer, step = momentum(two)
    checkpoint = rx.Checkpoint(w=weight, o=optimizer)
    checkpoint.restore(later)
    checkpoint.restore(without).assert_consumed()
    assert step() == expected


def test_slots_that_wait_are_saved_by_the_new_names_of_their_variables(tmp_path, two):
    weight, optimizer, step = momentum(two)
    step()
    path = rx.Checkpoint(w=weight, o=optimizer).save(tmp_path / "model")
    expected = step()
    weight, optimizer, _ = momentum(two)
    rx.Checkpoint(w=weight, o=optimizer).restore(path)
    path = rx.Checkpoint(weight=weight, o=optimizer).save(tmp_path / "renamed")
    weight, optimizer, step = momentum(two)
    report = rx.Checkpoint(weight=weight, o=optimizer).restore(path)
    assert step() == expected
    report.assert_consumed()


def test_another_optimizer_is_told_by_the_report(tmp_path, two):
    training, path = saved(tmp_path, two)
    other = Training(two, optimizer=lambda rate: optax.sgd(rate, momentum=0.9))
    report = other.checkpoint.restore(path)
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"Not made yet are 'optimizer/slots"):
        report.assert_consumed()
    other.steps(1)
    assert any("mu" in name for name in report.unused)
    assert any("trace" in name for name in report.missing)
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"It lacks 'optimizer/slots/.*trace"):
        report.assert_consumed()
    for each in (training, other):
        each.iterator.close()


def test_what_does_not_match_is_reported(tmp_path):
    path = rx.Checkpoint(a=rx.Variable(1.0), b=2, c=3.0).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(a=rx.Variable(0.0), d=rx.Variable(5.0), c=1)
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"'c' is 1 now and 3\.0 in"):
        checkpoint.restore(path)
    assert float(checkpoint.a) == 0.0
    checkpoint.c = 1.0
    report = checkpoint.restore(path).expect_partial()
    assert (report.restored, report.unused, report.missing) == (("a", "c"), ("b",), ("d",))
    assert repr(report) == (
        f"<RestoreReport: restored 2 of 3 from {path}; unused: 'b'; missing: 'd'>"
    )
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"It lacks 'd'\. It also has"):
        report.assert_existing_objects_matched()
    assert float(checkpoint.d) == 5.0


def test_what_is_of_another_kind_now_is_missing(tmp_path):
    path = rx.Checkpoint(a=rx.Variable(1.0)).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(a=2.0)
    report = checkpoint.restore(path)
    assert (report.restored, report.unused, report.missing) == ((), ("a",), ("a",))
    assert checkpoint.a == 2.0


def test_shapes_and_dtypes_that_differ_change_nothing(tmp_path):
    path = rx.Checkpoint(a=rx.Variable([1.0, 2.0]), b=rx.Variable(1)).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(a=rx.Variable([1.0, 2.0, 3.0]), b=rx.Variable(7), c=0)
    with pytest.raises(rx.errors.CheckpointMismatch) as raised:
        checkpoint.restore(path)
    assert "'a' is float32[3] now and float32[2] in the checkpoint" in str(raised.value)
    assert int(checkpoint.b) == 7
    checkpoint = rx.Checkpoint(a=rx.Variable([5.0, 6.0]), b=rx.Variable(1.0))
    with pytest.raises(ValueError, match=r"'b' is float32\[\] now and int32\[\]"):
        checkpoint.restore(path)
    equal(checkpoint.a.numpy(), [5.0, 6.0])


def damage(path: Path, how: str) -> None:
    largest = max((path / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)
    if how == "a byte":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        largest.write_bytes(bytes(content))
    elif how == "no arrays":
        shutil.rmtree(path / "arrays")
    elif how == "garbled manifest":
        (path / "manifest" / "metadata").write_text("{")
    elif how == "changed manifest":
        file = path / "manifest" / "metadata"
        file.write_text(file.read_text().replace('"epoch": 3', '"epoch": 4'))
    elif how == "another format":
        (path / "manifest" / "metadata").write_text('{"format": "something"}')
    elif how == "another version":
        file = path / "manifest" / "metadata"
        file.write_text(file.read_text().replace('"version": 1', '"version": 9'))
    elif how == "no manifest":
        shutil.rmtree(path / "manifest")
    elif how == "a file":
        shutil.rmtree(path)
        path.write_text("")
    elif how == "nothing":
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a byte", "'weight' is damaged|arrays cannot be read"),
        ("no arrays", "arrays cannot be read"),
        ("garbled manifest", "its manifest cannot be read"),
        ("changed manifest", "its manifest is damaged"),
        ("another format", "written by another program"),
        ("another version", "version 9 of the format"),
        ("no manifest", "it has no manifest"),
        ("a file", "it is a file"),
        ("nothing", r"There is no checkpoint .* there is other-2"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(how, message, tmp_path, two):
    rows = np.random.default_rng(0).normal(size=(50, 50)).astype(np.float32)
    with two.scope():
        weight, small = rx.Variable(rows), rx.Variable(1.0)
    dataset = two.experimental_distribute_dataset([np.arange(4), np.arange(4)])
    checkpoint = rx.Checkpoint(weight=weight, small=small, epoch=3, data=iter(dataset))
    path = Path(checkpoint.save(tmp_path / "model"))
    checkpoint.save(tmp_path / "other")
    damage(path, how)
    weight.assign(rows + 1)
    small.assign(2.0)
    checkpoint.epoch = 5
    next(checkpoint.data)
    kind = rx.errors.CheckpointNotFound if how == "nothing" else rx.errors.InvalidCheckpoint
    with pytest.raises(kind, match=message):
        checkpoint.restore(path)
    equal(weight.numpy(), rows + 1)
    assert (float(small), checkpoint.epoch) == (2.0, 5)
    assert checkpoint.data.get_state()["steps"] == 1
    checkpoint.data.close()


def test_directories_of_others_are_refused(tmp_path):
    checkpoint = rx.Checkpoint(epoch=1)
    with pytest.raises(rx.errors.InvalidCheckpoint, match="it has no manifest"):
        checkpoint.restore(tmp_path)
    with pytest.raises(FileNotFoundError, match="Nor is there a directory"):
        checkpoint.restore(tmp_path / "no" / "where")
    path = Path(checkpoint.save(tmp_path / "model"))
    unfinished = path.rename(path.with_name("model-1.writing-0a1b"))
    with pytest.raises(rx.errors.InvalidCheckpoint, match="was cut off"):
        checkpoint.restore(unfinished)


def test_an_iterator_over_other_data_changes_nothing(tmp_path, two):
    numbers = rx.from_tensor_slices(np.arange(8)).batch(2)
    path = rx.Checkpoint(
        data=iter(two.experimental_distribute_dataset(numbers)), weight=rx.Variable(1.0)
    ).save(tmp_path / "model")

    class Strange:
        def get_state(self):
            return {"at": 3}

        def set_state(self, state):
            if "at" not in state:
                raise KeyError("at")

    checkpoint = rx.Checkpoint(data=Strange(), weight=rx.Variable(2.0))
    with pytest.raises(KeyError, match="at"):
        checkpoint.restore(path)
    assert float(checkpoint.weight) == 2.0


def test_all_iterators_are_set_back(tmp_path):
    class Position:
        def __init__(self, at, fails=False):
            self.at, self.fails = at, fails

        def get_state(self):
            return {"at": self.at}

        def set_state(self, state):
            if self.fails:
                raise ValueError("this one cannot be moved")
            self.at = state["at"]

    path = rx.Checkpoint(a=Position(1), b=Position(1), c=Position(1)).save(tmp_path / "model")
    first, second, third = Position(7), Position(8, fails=True), Position(9)
    checkpoint = rx.Checkpoint(a=second, b=first, c=third)
    with pytest.raises(ValueError, match="cannot be moved") as raised:
        checkpoint.restore(path)
    assert (first.at, third.at) == (7, 9)
    assert "'a' could not be set back" in "".join(raised.value.__notes__)


def test_what_a_checkpoint_cannot_hold(tmp_path):
    with pytest.raises(rx.errors.InvalidType, match=r"cannot hold 'nest/a'.*builtins\.object"):
        rx.Checkpoint(nest={"a": object()})
    with pytest.raises(rx.errors.InvalidType, match=r"cannot hold 'words'.*numpy\.ndarray"):
        rx.Checkpoint(words=np.array(["a"]))
    with pytest.raises(rx.errors.InvalidArgument, match="'save'"):
        rx.Checkpoint(save=1)
    checkpoint = rx.Checkpoint(a=1)
    with pytest.raises(rx.errors.InvalidArgument, match="'_hidden'"):
        checkpoint._hidden = 1
    with pytest.raises(rx.errors.InvalidType):
        checkpoint.b = object()
    with pytest.raises(AttributeError, match="no object 'b'"):
        _ = checkpoint.b
    with pytest.raises(rx.errors.InvalidArgument, match=r"Two entries .* 'n/a/b'"):
        rx.Checkpoint(n={"a": {"b": 1}, "a/b": 2})

    class Odd:
        def get_state(self):
            return {1, 2}

        def set_state(self, state):
            raise AssertionError

    with pytest.raises(rx.errors.InvalidType, match="'odd' cannot be saved, because JSON"):
        rx.Checkpoint(odd=Odd()).save(tmp_path / "model")
    Odd.get_state = lambda self: {"seen": [{1: "a"}]}
    with pytest.raises(rx.errors.InvalidType, match="the key 1 would become the word '1'"):
        rx.Checkpoint(odd=Odd()).save(tmp_path / "model")


def test_replicas_and_traced_functions_do_not_save(tmp_path, two):
    checkpoint = rx.Checkpoint(a=1)
    with pytest.raises(rx.errors.ContextError, match="outside the function given to `run`"):
        two.run(lambda: checkpoint.save(tmp_path / "model"))
    with pytest.raises(rx.errors.ContextError, match="traced"):
        rx.function(lambda: checkpoint.restore(tmp_path / "model"))()


def test_addresses_are_no_paths():
    for call in (rx.Checkpoint().save, rx.Checkpoint().restore):
        with pytest.raises(rx.errors.InvalidArgument, match=r"got 'gs://bucket/model'\. Mount"):
            call("gs://bucket/model")


def test_a_save_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rx.errors.SaveFailed, match=r"/file cannot be listed: .*Not a directory"):
        rx.Checkpoint(a=1).save(tmp_path / "file" / "model")


def test_attributes_that_are_set_later_are_restored_then(tmp_path, strategy):
    def make(value):
        with strategy.scope():
            weight = rx.Variable(np.float32([value, value]))
            optimizer = rx.Optimizer(optax.sgd(0.5, momentum=0.9))

        def step():
            strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2), weight)]))
            return weight.numpy().tolist()

        return weight, optimizer, step

    weight, optimizer, step = make(1.0)
    step()
    original = rx.Checkpoint(nest=[weight, {"n": 3}], optimizer=optimizer, epoch=2, best=0.5)
    path = original.save(tmp_path / "model")
    expected = step()

    weight, optimizer, step = make(5.0)
    checkpoint = rx.Checkpoint(best=0.0)
    report = checkpoint.restore(path)
    assert (checkpoint.best, report.restored) == (0.5, ("best",))
    assert {"epoch", "nest/0", "nest/1/n"} < set(report.unused)
    # The optimizer comes before the variable that its slots are named after.
    checkpoint.optimizer = optimizer
    assert int(optimizer.iterations) == 1
    assert report.deferred == ("optimizer/slots/[0].trace/nest/0",)
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"No object wants .*'epoch'"):
        report.assert_consumed()
    checkpoint.nest = [weight, {"n": 0}]
    checkpoint.epoch = 0
    assert (checkpoint.nest[1], checkpoint.epoch) == ({"n": 3}, 2)
    assert report.unused == ()
    checkpoint.epoch = 7  # once only
    assert checkpoint.epoch == 7
    assert step() == expected
    report.assert_consumed()


def test_what_is_set_later_and_does_not_fit_changes_nothing(tmp_path):
    path = rx.Checkpoint(v=rx.Variable([1.0, 2.0]), w=rx.Variable(3.0)).save(tmp_path / "model")
    checkpoint = rx.Checkpoint()
    report = checkpoint.restore(path)
    wrong = rx.Variable([7.0, 7.0, 7.0])
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"'v' is float32\[3\] now"):
        checkpoint.v = wrong
    with pytest.raises(AttributeError, match="no object 'v'"):
        _ = checkpoint.v
    equal(wrong.numpy(), [7.0, 7.0, 7.0])
    assert report.unused == ("v", "w")
    checkpoint.v = rx.Variable([0.0, 0.0])
    equal(checkpoint.v.numpy(), [1.0, 2.0])
    # Another restore, or a checkpoint that is gone, leaves nothing to wait for.
    other = rx.Checkpoint(v=rx.Variable([5.0, 6.0])).save(tmp_path / "other")
    checkpoint.restore(other)
    checkpoint.w = rx.Variable(0.0)
    assert float(checkpoint.w) == 0.0
    fresh = rx.Checkpoint()
    fresh.restore(path)
    shutil.rmtree(path)
    with pytest.raises(rx.errors.CheckpointNotFound, match="There is no checkpoint"):
        fresh.w = rx.Variable(0.0)
    fresh.other = 1  # nothing waits for it


def test_what_is_set_later_is_restored_outside_of_run_only(tmp_path, two):
    path = rx.Checkpoint(v=rx.Variable(1.0)).save(tmp_path / "model")
    checkpoint = rx.Checkpoint()
    checkpoint.restore(path)
    with pytest.raises(rx.errors.ContextError, match="outside the function given to `run`"):
        two.run(lambda: setattr(checkpoint, "v", rx.Variable(0.0)))


def test_parts_that_are_missing_are_told_also_later(tmp_path):
    path = rx.Checkpoint(a=[rx.Variable(1.0)], b=rx.Variable(2.0)).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(b=1.0)
    report = checkpoint.restore(path)
    assert report.missing == ("b",)
    checkpoint.a = [rx.Variable(0.0), rx.Variable(9.0)]
    equal([v.numpy() for v in checkpoint.a], [1.0, 9.0])
    assert (report.missing, report.unused) == (("b", "a/1"), ("b",))
    # One that was there when it was restored has had its turn: nothing is read any more.
    shutil.rmtree(path)
    for value in (3.0, rx.Variable(0.0)):
        checkpoint.b = value
    assert float(checkpoint.b) == 0.0
    assert report.unused == ("b",)


def test_writing_to_a_path_and_reading_it(tmp_path, strategy):
    with strategy.scope():
        weight = rx.Variable([1.0, 2.0])
    checkpoint = rx.Checkpoint(weight=weight, n=1)
    path = tmp_path / "deep" / "final"
    assert checkpoint.write(path) == str(path)
    checkpoint.save(tmp_path / "final")
    weight.assign([3.0, 4.0])
    checkpoint.read(path).assert_consumed()
    equal(weight.numpy(), [1.0, 2.0])
    assert checkpoint.save_counter == 1
    # The next one takes its place.
    checkpoint.n = 2
    assert checkpoint.write(path) == str(path)
    checkpoint.n = 3
    checkpoint.read(path)
    assert checkpoint.n == 2
    assert [each.name for each in path.parent.iterdir()] == ["final"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("notes", "file"):
        with pytest.raises(rx.errors.InvalidArgument, match="there is something else"):
            checkpoint.write(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(rx.errors.InvalidArgument, match="where there is no name"):
        checkpoint.write(f"{tmp_path}/")
    with pytest.raises(rx.errors.InvalidType, match="A checkpoint has a path; got None"):
        checkpoint.read(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("then", ["read", "write"])
def test_a_writer_that_was_killed_while_it_replaced_a_checkpoint(tmp_path, then):
    """Between two renames: the old one is aside, and the new one has no name yet."""
    path, checkpoint = tmp_path / "final", rx.Checkpoint(n=1)
    for checkpoint.n, name in ((1, "replaced"), (2, "checkpoint")):
        checkpoint.write(tmp_path / name)
    (workplace := tmp_path / "final.writing-0a1b").mkdir()
    for name in ("replaced", "checkpoint"):
        (tmp_path / name).rename(workplace / name)
    checkpoint.n = 3
    if then == "write":
        checkpoint.write(path)
        assert [each.name for each in tmp_path.iterdir()] == ["final"]
        checkpoint.n = 0
    checkpoint.read(path)
    assert checkpoint.n == (3 if then == "write" else 2)


def test_a_reader_leaves_a_writer_alone_that_is_replacing_a_checkpoint(tmp_path, monkeypatch):
    path, checkpoint = tmp_path / "final", rx.Checkpoint(n=1)
    checkpoint.write(path)
    workplace = tmp_path / "final.writing-0a1b"
    workplace.mkdir()
    monkeypatch.setattr(files, "_REPLACEMENT_LOOKS", 3)
    with files._locked(workplace):
        path.rename(workplace / "replaced")
        (workplace / "checkpoint").mkdir()
        with pytest.raises(rx.errors.CheckpointNotFound):
            checkpoint.read(path)
        assert (workplace / "checkpoint").exists()


def test_options_of_tensorflow_are_accepted(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    path = checkpoint.save(tmp_path / "model", options=object())
    checkpoint.restore(path, options=object())
    checkpoint.read(checkpoint.write(tmp_path / "exact", options=object()), options=object())
    manager = rx.CheckpointManager(checkpoint, tmp_path / "run")
    assert manager.save(options=object()) == manager.latest_checkpoint
