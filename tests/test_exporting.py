"""An exported program computes what the function computes, without replicax."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import STRATEGIES, cpus
from support import equal

import replicax as rx

ROWS = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 3"), jnp.float32)
X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def loaded(path):
    return jax.export.deserialize(path.read_bytes())


def require_same(path, function, *args):
    """Among workers, the first one has the file."""
    expected = function(*args)
    if rx.is_first_worker():
        actual = loaded(path).call(*args)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            equal(ours, theirs, 1e-5)
            assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("compiled", [False, True])
def test_variables_of_all_kinds_are_constants(strategy, tmp_path, compiled):
    outside = rx.Variable([1.0, 2.0, 3.0])
    with strategy.scope():
        weight = rx.Variable(np.eye(3, dtype=np.float32))
        seen = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        mean = rx.Variable([1.0], synchronization="ON_READ", aggregation="MEAN")
        first = rx.Variable(4, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
        weight.assign_add(np.ones((3, 3), np.float32))
    strategy.run(lambda: seen.assign_add(2.0))

    def predict(x):
        return {"y": x @ weight + outside, "seen": (seen * mean, [first.value]), "weight": weight}

    def plainly(x):
        return jax.tree.map(jnp.asarray, predict(x))

    function = rx.function(predict) if compiled else predict
    path = tmp_path / "model"
    exported = rx.export(function, path, input_signature=[ROWS])
    assert exported.nr_devices == 1
    assert exported.fun_name == "predict"
    require_same(path, plainly, X)
    require_same(path, plainly, X[:1])
    weight.assign(np.zeros((3, 3), np.float32))
    if rx.is_first_worker():
        equal(loaded(path).call(X)["weight"], np.eye(3) + 1)
        assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_variable_in_parts_is_whole_there(tmp_path):
    strategy = rx.MirroredStrategy(cpus(4), logical_devices_per_replica=2)
    with strategy.scope(), strategy.extended.partition((1, 2)):
        weight = rx.Variable(np.arange(12, dtype=np.float32).reshape(3, 4))
    rx.export(lambda x: x @ weight.value, tmp_path / "model", ROWS)
    require_same(tmp_path / "model", lambda x: x @ weight.numpy(), X)


def test_it_is_loaded_and_called_without_replicax(two, tmp_path):
    with two.scope():
        weight = rx.Variable([1.0, 2.0, 3.0])
    rx.export(lambda x: {"y": x @ weight.value}, tmp_path / "model", ROWS)
    code = f"""
import sys
sys.modules["replicax"] = None
import jax, json, numpy as np
exported = jax.export.deserialize(open({str(tmp_path / "model")!r}, "rb").read())
print(json.dumps(exported.call(np.ones((4, 3), np.float32))["y"].tolist()))
try:
    import replicax
except ImportError:
    print("none")
"""
    done = subprocess.run(
        [sys.executable, "-c", "import jax.export\n" + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers, replicax = done.stdout.splitlines()
    assert json.loads(numbers) == [6.0] * 4
    assert replicax == "none"


def test_arguments_and_their_sizes(tmp_path):
    path = tmp_path / "new" / "model"
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def add(nest, y):
        return nest["x"][0] + y, nest["n"] * 2

    rx.export(add, path, {"x": [X], "n": np.int32(3)}, X)  # examples
    require_same(path, add, {"x": [jnp.asarray(X)], "n": jnp.int32(7)}, jnp.asarray(X))
    with pytest.raises(ValueError, match="shape"):
        loaded(path).call({"x": [X[:2]], "n": np.int32(3)}, X[:2])

    batch, size = jax.export.symbolic_shape("batch, size")
    signature = [
        {"x": [f32((batch, size))], "n": jax.ShapeDtypeStruct((), jnp.int32)},
        f32((batch, 1)),
    ]
    rx.export(add, path, input_signature=signature)  # in the place of the other
    for rows, columns in ((2, 3), (4, 5)):
        ones = jnp.ones((rows, columns))
        require_same(path, add, {"x": [ones], "n": jnp.int32(1)}, ones[:, :1])

    rows, columns, other = jax.export.symbolic_shape("rows, 2*half, other")
    rx.export(lambda x, y: x.reshape(-1, 2).sum() + y, path, f32((rows, columns)), f32((other,)))
    equal(loaded(path).call(jnp.ones((3, 4)), jnp.ones(2)), [13.0, 13.0])

    rx.export(lambda: jnp.ones(2), path, input_signature=())
    equal(loaded(path).call(), [1.0, 1.0])


def test_the_signature_of_a_function_is_the_default(tmp_path):
    @rx.function(input_signature=[jax.ShapeDtypeStruct((5, 3), jnp.float32)])
    def double(x):
        return 2 * x

    rx.export(double, tmp_path / "model")
    require_same(tmp_path / "model", double, jnp.asarray(X))
    rx.export(double, tmp_path / "model", ROWS)
    equal(loaded(tmp_path / "model").call(X[:2]), 2 * X[:2])


class Layer:
    def __init__(self):
        self.weight = rx.Variable([1.0, 2.0, 3.0])

    @rx.function
    def __call__(self, x):
        return x * self.weight

    @rx.function
    def method(self, x):
        return self(x) + 1


def test_methods_objects_and_partials(tmp_path):
    layer, path = Layer(), tmp_path / "model"
    for function in (layer, layer.method, functools.partial(lambda y, x: layer(x) + y, 3.0)):
        rx.export(function, path, ROWS)
        require_same(path, function, jnp.asarray(X))


def test_a_single_replica_is_alone_and_may_say_so(tmp_path):
    weight = rx.Variable(2.0)

    def normalized(x):
        replica = rx.get_replica_context()
        mean = replica.all_reduce("MEAN", x.mean(0))
        rows = replica.all_reduce("SUM", jnp.int32(3)), replica.all_reduce(rx.ReduceOp.MAX, x > 0)
        assert rx.get_strategy().num_replicas_in_sync == 1
        return replica.all_gather((x - mean) * weight, axis=0), rows

    with rx.MirroredStrategy(cpus(2)).scope():
        rx.export(normalized, tmp_path / "model", ROWS)
    require_same(tmp_path / "model", normalized, jnp.asarray(X))


def test_gradients_and_control_flow(two, tmp_path):
    with two.scope():
        weight = rx.Variable([1.0, 2.0, 3.0])

    def sensitivity(x):
        total = jax.lax.fori_loop(0, 3, lambda _, t: t + weight.value, jnp.zeros(3))
        return rx.grad(lambda: jnp.sum(jnp.sin(x) @ weight.value), weight)() + total

    rx.export(sensitivity, tmp_path / "model", X)
    require_same(tmp_path / "model", sensitivity, jnp.asarray(X))


def test_random_keys(two, tmp_path):
    with two.scope():
        key = rx.Variable(jax.random.key(1), trainable=False)

    def draw(other):
        return jax.random.normal(key.value, (2,)) + jax.random.normal(other, (2,))

    rx.export(draw, tmp_path / "model", jax.random.key(2))
    require_same(tmp_path / "model", draw, jax.random.key(3))


def test_platforms(tmp_path):
    assert rx.export(jnp.sin, tmp_path / "a", X).platforms == ("cpu",)
    exported = rx.export(jnp.sin, tmp_path / "a", X, platforms=("cpu", "tpu"))
    assert exported.platforms == ("cpu", "tpu")
    for platforms in ("cpu", (), ("moon",)):
        with pytest.raises(ValueError, match="must be one or more of"):
            rx.export(jnp.sin, tmp_path / "a", X, platforms=platforms)


def test_what_writes_or_uses_replicas_is_refused(strategy, tmp_path):
    if strategy is rx.get_strategy():
        return  # has neither replicas nor scopes
    with strategy.scope():
        weight = rx.Variable(0.0, name="weight", aggregation="SUM")
        on_read = rx.Variable(0.0, name="on_read", synchronization="ON_READ", aggregation="SUM")
        metric = rx.metrics.Mean()
    value = strategy.experimental_distribute_values_from_function(lambda _: X[0])
    cases = [
        (lambda x: weight.assign(x[0, 0]), "writes to variable 'weight' (shape (), dtype float32)"),
        (lambda x: on_read.assign(x[0, 0]), "writes to variable 'on_read'"),
        (lambda x: strategy.run(lambda: x), f"runs a function on the replicas of {strategy!r}"),
        (lambda x: metric.update_state(x), "on the replicas"),
        (lambda x: list(dataset), "reads a distributed dataset"),
        (lambda x: next(iterator), "reads a distributed dataset"),
    ]
    if strategy.num_replicas_in_sync > 1:
        cases += [
            (lambda x: strategy.reduce("SUM", value, axis=None), "combines values of"),
            (lambda x: strategy.gather(value, axis=0), "combines values of"),
        ]
    by_rows = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    dataset = strategy.experimental_distribute_dataset([np.ones(8, np.float32)], by_rows)
    iterator = iter(dataset)
    for function, said in cases:
        with pytest.raises(rx.errors.InvalidArgument) as caught:
            rx.export(function, tmp_path / "model", X)
        assert said in str(caught.value)
    iterator.close()
    equal(weight, 0.0)
    equal(on_read, 0.0)
    assert not list(tmp_path.iterdir())


class Pair(NamedTuple):
    a: Any


@dataclasses.dataclass
class Record:
    a: Any


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, "model", X), "exports a function; got a int"),
        ((jnp.sin, 3, X), "must be the name of a file; got a int"),
        ((jnp.sin, "gs://bucket/model", X), "of this machine, or mounted there; got 'gs://"),
        ((jnp.sin, ".", X), "must name a file"),
        ((jnp.sin, "model"), "needs the arguments of the function"),
        ((jnp.sin, "model", 3.0), r"got a float as argument \[0\]. Bind other values first"),
        ((jnp.sin, "model", rx.PerReplica([1, 2])), "got a replicax.PerReplica"),
        ((jnp.sin, "model", np.array(["word"])), "got a numpy.ndarray as argument"),
        ((lambda x: "word", "model", X), "it returned a str"),
        ((lambda x: rx.PerReplica([x]), "model", X), "it returned a replicax.PerReplica"),
        ((lambda x: Record(x), "model", X), "Record, which JAX does not know"),
        ((lambda x: Pair(x), "model", X), "Take and return arrays in tuples, lists and dict"),
        ((lambda x: jax.debug.print("{}", x), "model", X), "must not call back into Python"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        rx.export(*arguments)
    assert not list(tmp_path.iterdir())


def test_examples_and_a_signature_are_one_too_many(tmp_path):
    with pytest.raises(ValueError, match="Give one"):
        rx.export(jnp.sin, tmp_path / "model", X, input_signature=[X])


def test_a_signature_is_a_list_or_tuple(tmp_path):
    with pytest.raises(rx.errors.InvalidType, match=r"must be a list or tuple.*got a int"):
        rx.export(jnp.sin, tmp_path / "model", input_signature=3)


def test_it_is_called_outside_of_functions(two, tmp_path):
    def step(x):
        rx.export(jnp.sin, tmp_path / "model", X)

    with pytest.raises(rx.errors.ContextError, match="outside the function given to `run`"):
        two.run(step, args=(1.0,))
    with pytest.raises(rx.errors.ContextError, match="traced or differentiated"):
        rx.function(step)(1.0)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "model"
    rx.export(jnp.sin, path, X)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match=r"disk is full\. What was there before is as it was"):
        rx.export(jnp.cos, path, X)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "strategy",
    [n for n in ("default", "mirrored 2", "workers") if n in STRATEGIES],
    indirect=True,
)
def test_keras_models(strategy, tmp_path):
    keras = pytest.importorskip("keras", reason="Keras is not installed: replicax[keras]")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        model.compile("sgd", "mse")
    model.fit(X, X[:, :2], batch_size=5, verbose=0)
    path = tmp_path / "model"
    for function in (model, rx.function(lambda x: model(x, training=False))):
        rx.export(function, path, ROWS)
        expected = model.predict(X, verbose=0)
        if rx.is_first_worker():
            equal(loaded(path).call(X), expected, 1e-5)
            equal(loaded(path).call(X[:2]), expected[:2], 1e-5)
    with pytest.raises(ValueError, match="writes to variable 'sequential"):
        rx.export(lambda x: model(x, training=True), path, ROWS)


@pytest.mark.parametrize(
    "strategy",
    [n for n in ("default", "mirrored 2", "workers") if n in STRATEGIES],
    indirect=True,
)
def test_flax_modules(strategy, tmp_path):
    flax_models = pytest.importorskip("flax_models")
    nnx = flax_models.nnx
    model, optimizer, metrics = flax_models.made(norm=True, rate=0.5)
    for x, y in flax_models.shared(strategy, (flax_models.X, flax_models.Y)):
        strategy.run(flax_models.quick_step, args=(model, optimizer, metrics, x, y))
    path = tmp_path / "model"
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 4"), jnp.float32)
    with pytest.raises(ValueError, match="writes to variable"):
        rx.export(model, path, rows)  # which trains
    model.eval()
    before = flax_models.numbers(model)
    for function in (model, rx.function(lambda x: model(x))):
        rx.export(function, path, rows)
        expected = nnx.jit(lambda model, x: model(x))(model, flax_models.X)
        if rx.is_first_worker():
            equal(loaded(path).call(flax_models.X), expected, 1e-5)
            equal(loaded(path).call(flax_models.X[:1]), expected[:1], 1e-5)
    after = flax_models.numbers(model)
    assert all((after[name] == value).all() for name, value in before.items())


def test_an_export_does_not_take_the_place_of_a_device_or_fifo(tmp_path):
    os.mkfifo(tmp_path / "model")
    with pytest.raises(rx.errors.InvalidArgument, match="must name a file"):
        rx.export(lambda x: x, tmp_path / "model", X)
    assert (tmp_path / "model").is_fifo()
