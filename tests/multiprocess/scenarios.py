"""The scenarios of test_scenarios.py: one pair of processes runs all of them, in order.

Each scenario takes the strategy and this worker's index, and returns what JSON can express. One
that raises ends the program. Arguments choose some of them by name.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from workers import message_of

import replicax as rx
from replicax import cluster

SCENARIOS: list[Callable[[rx.Strategy, int], Any]] = []


def scenario(function: Callable[[rx.Strategy, int], Any]) -> Callable[[rx.Strategy, int], Any]:
    SCENARIOS.append(function)
    return function


def of_worker(strategy: rx.Strategy, value: Any) -> rx.PerReplica:
    return strategy.experimental_distribute_values_from_function(lambda _: value)


@scenario
def beginnings(strategy, worker):
    with strategy.scope():
        mirrored = rx.Variable(np.float32([worker, 7.0]), name="mirrored")
        on_read = rx.Variable(
            np.float32(worker + 1), synchronization="ON_READ", aggregation="SUM", name="on_read"
        )
        key = rx.Variable(jax.random.key(worker), trainable=False)
    lazily = {}

    def step():
        if "made" not in lazily:
            lazily["made"] = rx.Variable(float(worker), aggregation="MEAN")
        return lazily["made"].value

    value = strategy.run(step)
    return {
        "mirrored": mirrored.numpy().tolist(),
        "on_read": float(on_read.numpy()),
        "key": jax.random.key_data(key.value).tolist(),
        "lazily": [float(each) for each in strategy.experimental_local_results(value)],
    }


@scenario
def many_beginnings(strategy, worker):
    """Create variables and slots; count what the workers do together meanwhile."""
    progress = cluster.current().progress

    def created_and_trained(count):
        before = progress.number
        with strategy.scope():
            weights = [rx.Variable(np.full(3, i + worker, np.float32)) for i in range(count)]
            others = [rx.Variable(worker + i, trainable=False) for i in range(count)]
            flag = rx.Variable(worker == 0, trainable=False)
            empty = rx.Variable(np.zeros((0, 2), np.float32))
            optimizer = rx.Optimizer(optax.adam(0.1))
        created = progress.number

        @rx.function
        def step():
            def replica_step():
                loss = lambda: sum((weight**2).sum() for weight in weights)  # noqa: E731
                optimizer.minimize(loss, weights)

            strategy.run(replica_step)

        step()
        values = [float(weight[0]) for weight in weights]
        numbers = [int(other) for other in others]
        taken = (created - before, progress.number - created)
        return taken, values, [numbers, bool(flag), empty.shape]

    few, many = created_and_trained(2), created_and_trained(30)
    return {"few": few, "many": many}


@scenario
def beginnings_read_by_one(strategy, worker):
    """Read a variable on one worker, while the others go on to create more."""
    with strategy.scope():
        first = rx.Variable(float(worker + 1))
        if worker == 0:
            float(first)
        others = [rx.Variable(float(worker + i)) for i in range(3)]
    return [float(first), *map(float, others)]


@scenario
def beginnings_read_by_one_before_input(strategy, worker):
    """Read a variable on one worker, while the other one goes on to wait for input."""
    options = rx.InputOptions(auto_shard_policy="data")
    with strategy.scope():
        variable = rx.Variable(float(worker + 1))
        elements = iter(
            strategy.experimental_distribute_dataset([np.ones((2, 3), np.float32)], options)
        )
        if worker == 0:
            float(variable)
        element = next(elements)
    return [float(variable), strategy.gather(element, axis=0).shape]


@scenario
def beginnings_cut_off(strategy, worker):
    """Fail to bring the value of the first worker; go on when that is possible again."""
    created = []

    def create():
        with strategy.scope():
            created.append(rx.Variable(float(worker + 1)))

    with mock.patch("replicax.variables._initial.first_workers", side_effect=OSError("cut off")):
        message = message_of(OSError, create)
    return [message, float(created[0])]


@scenario
def beginnings_that_differ_further_on(strategy, worker):
    made = []

    def create():
        with strategy.scope():
            made.append(rx.Variable(0.0, name="same"))
            made.append(rx.Variable(0.0, name=f"own {worker}"))

    created = message_of(rx.errors.CollectiveMismatch, create)
    return [created, *(message_of(rx.errors.CollectiveMismatch, each.numpy) for each in made)]


@scenario
def values_of_the_host(strategy, worker):
    """Reduce what is not distributed: each worker contributes its own, whatever its devices."""
    number, rows = np.float32(worker + 1), np.float32([[1, 2]] * (worker + 1))
    with strategy.scope():
        variable = rx.Variable(0.0)
        compiled = rx.function(
            lambda: [strategy.reduce(op, 3.0, axis=None) for op in ("SUM", "MEAN")]
        )()
        to_variable = strategy.extended.reduce_to("SUM", number, variable)
    in_merge = strategy.run(
        rx.function(
            lambda: rx.get_replica_context().merge_call(
                lambda strategy: strategy.reduce("SUM", 3.0, axis=None)
            )
        )
    )
    return {
        "sum": float(strategy.reduce("SUM", number, axis=None)),
        "python": float(strategy.reduce("SUM", worker + 1, axis=None)),
        "mean": float(strategy.reduce("MEAN", number, axis=None)),
        "rows": [strategy.reduce(op, rows, axis=0).tolist() for op in ("SUM", "MEAN")],
        "chosen": [
            float(strategy.reduce(op, number, axis=None))
            for op in (rx.ReduceOp.MAX, rx.ReduceOp.MIN)
        ],
        "chosen rows": strategy.reduce(rx.ReduceOp.MAX, rows * number, axis=0).tolist(),
        "to a variable": [float(x) for x in strategy.experimental_local_results(to_variable)],
        "compiled": [float(x) for x in compiled],
        "in merge_call": [float(x) for x in strategy.experimental_local_results(in_merge)],
        "shapes": message_of(
            rx.errors.ShapeMismatch, lambda: strategy.reduce("SUM", np.ones(worker + 1), axis=None)
        ),
    }


@scenario
def hints(strategy, worker):
    """Only the first worker says that something could be faster."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = rx.function(lambda x, n: x + n)
        for number in range(12):
            strategy.run(step, args=(jnp.ones(1), number))
    return [str(each.message) for each in caught]


@scenario
def variables_that_differ(strategy, worker):
    def create():
        with strategy.scope():
            rx.Variable(np.zeros(2 + worker, np.float32), name="odd")

    return message_of(rx.errors.CollectiveMismatch, create)


@scenario
def collectives_that_differ(strategy, worker):
    value = of_worker(strategy, np.float32([1.0, 2.0]))
    if worker == 0:
        return message_of(
            rx.errors.CollectiveMismatch, lambda: strategy.reduce("SUM", value, axis=None)
        )
    return message_of(rx.errors.CollectiveMismatch, lambda: strategy.gather(value, axis=0))


@scenario
def shapes_that_differ(strategy, worker):
    value = of_worker(strategy, np.ones(2 + worker, np.float32))
    return {
        "reduce": message_of(ValueError, lambda: strategy.reduce("SUM", value, axis=None)),
        "sum over rows": float(strategy.reduce("SUM", value, axis=0)),
        "mean over rows": float(strategy.reduce("MEAN", value, axis=0)),
        "gather": np.asarray(strategy.gather(value, axis=0)).shape,
        "dtype": message_of(
            TypeError,
            lambda: strategy.reduce(
                "SUM", of_worker(strategy, np.ones(2, [np.float32, np.int32][worker])), axis=None
            ),
        ),
    }


@scenario
def programs_that_differ(strategy, worker):
    with strategy.scope():
        weight = rx.Variable(1.0, aggregation="SUM")

    @rx.function
    def constant(x):
        return strategy.run(lambda x: x + (3.25 if worker == 0 else 4.75), args=(x,))

    @rx.function
    def shaped(x):
        return strategy.run(lambda x: x.sum(), args=(x,))

    @rx.function
    def reading(x):
        return strategy.run(lambda x: x + weight if worker else x, args=(x,))

    @rx.function
    def fine(x):
        return strategy.reduce("SUM", strategy.run(lambda x: x * 2.0, args=(x,)), axis=None)

    return {
        "constants": message_of(rx.errors.ProgramMismatch, lambda: constant(np.float32(1.0))),
        "shapes": message_of(
            rx.errors.ProgramMismatch, lambda: shaped(np.ones(2 + worker, np.float32))
        ),
        "variables": message_of(rx.errors.ProgramMismatch, lambda: reading(np.float32(1.0))),
        "afterwards": float(fine(np.float32(1.5))),
    }


@scenario
def eager_meetings_that_differ(strategy, worker):
    def step():
        context = rx.get_replica_context()
        if worker == 0:
            return context.all_reduce("SUM", jnp.ones(()))
        return context.all_reduce("MEAN", jnp.ones(()))

    return message_of(rx.errors.CollectiveMismatch, lambda: strategy.run(step))


@scenario
def large_meetings(strategy, worker):
    all_gather = cluster.current().all_gather
    refused = message_of(
        rx.errors.InvalidArgument, lambda: all_gather("a huge thing", "x" * 17_000_000)
    )
    together = all_gather("a large thing", "x" * 9_000_000)  # 18 MB of both
    return {
        "refused": refused.replace(f"worker {worker}", "a worker"),
        "together": [len(each) for each in together],
    }


@scenario
def plain_arguments(strategy, worker):
    @rx.function
    def total(array, number, scale):
        return strategy.reduce(
            "SUM", strategy.run(lambda a: a.sum() * number * scale, args=(array,)), axis=None
        )

    return [
        float(total(np.ones(3, np.float32), 2.0, 1)),
        float(total(jnp.ones(3), jnp.asarray(2.0), 1)),
        float(total(jax.device_put(jnp.ones(3), jax.local_devices()[0]), 2.0, 1)),
    ]


@scenario
def fetching(strategy, worker):
    with strategy.scope():
        weight = rx.Variable(np.float32([1.0, 2.0]))
    value = strategy.run(rx.function(lambda: weight + 0.0))
    mirrored = strategy.extended.reduce_to("MEAN", value, value)
    own = strategy.run(
        rx.function(lambda: weight + rx.get_replica_context().replica_id_in_sync_group)
    )
    return {
        "gather": np.asarray(strategy.gather(value, axis=0)).tolist(),
        "local": [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)],
        "mirrored": mirrored.numpy().tolist(),
        "variable": np.asarray(weight).tolist(),
        "repr": repr(value),
        "as array": message_of(TypeError, lambda: np.asarray(own)),
        "common as array": np.asarray(value).tolist(),
        "own number": float(of_worker(strategy, np.float32(worker))) == worker,
    }


@scenario
def listening(strategy, worker):
    """The addresses on which this process listens, as the kernel writes them."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if "socket" in link}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    # Columns: number, local address, remote address, state (0A listens), ..., inode.
    return sorted({f[1].partition(":")[0] for f in lines if f[3] == "0A" and f[9] in own})


@scenario
def printing(strategy, worker):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        rx.print("said once")
    return {"said": said.getvalue(), "first": rx.is_first_worker()}


def _lengths(strategy, dataset):
    """Return for each step the rows of all replicas, and their sum over the workers."""
    steps = []
    for element in dataset:
        rows = strategy.gather(element, axis=0)
        steps.append(np.asarray(rows).tolist())
    return steps


@scenario
def lengths_that_differ(strategy, worker):
    def dataset_fn(context):
        rows = np.arange(3 * (1 + 2 * context.input_pipeline_id)) + 100 * context.input_pipeline_id
        return [rows[start : start + 2] for start in range(0, len(rows), 2)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    return {
        "len": len(dataset),
        "first": _lengths(strategy, dataset),
        "again": _lengths(strategy, dataset),
    }


@scenario
def one_has_nothing(strategy, worker):
    def dataset_fn(context):
        if context.input_pipeline_id == 0:
            return []
        return [{"x": np.float32([1, 2]), "y": (np.int32([3, 4]),)}]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    sums = []
    for element in dataset:
        sums.append(
            [
                float(strategy.reduce("SUM", element["x"], axis=0)),
                int(strategy.reduce("SUM", element["y"][0], axis=0)),
                float(strategy.reduce("MEAN", element["x"], axis=0)),
            ]
        )
    return sums


@scenario
def nobody_has_anything(strategy, worker):
    dataset = strategy.distribute_datasets_from_function(lambda context: [])
    return len(list(dataset))


@scenario
def compiled_over_uneven_input(strategy, worker):
    def dataset_fn(context):
        count = 4 if context.input_pipeline_id else 3
        return [np.full(2 if i < 3 else 1, i + 1.0, np.float32) for i in range(count)]

    with strategy.scope():
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    @rx.function
    def step(iterator):
        strategy.run(lambda x: total.assign_add(x.sum()), args=(next(iterator),))

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    steps = 0
    with contextlib.suppress(StopIteration):
        while True:
            step(iterator)
            steps += 1
    return {"steps": steps, "total": float(total.numpy())}


@scenario
def input_that_fails(strategy, worker):
    def batches():
        yield np.float32([1.0])
        if worker == 1:
            raise ArithmeticError("a broken file")
        yield np.float32([2.0])

    dataset = strategy.distribute_datasets_from_function(lambda context: batches)
    iterator = iter(dataset)
    next(iterator)
    kind = ArithmeticError if worker == 1 else rx.errors.InputFailed
    return message_of(kind, lambda: next(iterator))


@scenario
def leaving_a_loop(strategy, worker):
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [np.float32([i]) for i in range(50)]
    )
    firsts = []
    for _ in range(3):
        for element in dataset:
            firsts.append(float(strategy.reduce("SUM", element, axis=0)))
            break
    return firsts


@scenario
def passes_to_the_end(strategy, worker):
    """Return the number of the callers' variables that are still alive."""

    class Large:
        pass

    def dataset_fn(context):
        return [np.float32([i]) for i in range(context.input_pipeline_id + 1)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)

    def call():
        large = Large()
        for _ in dataset:
            pass
        return weakref.ref(large)

    kept = [call() for _ in range(5)]
    gc.collect()
    return sum(reference() is not None for reference in kept)


@scenario
def resuming(strategy, worker):
    def dataset_fn(context):
        return [np.float32([i + 10 * context.input_pipeline_id]) for i in range(5)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dataset)
    for _ in range(2):
        next(iterator)
    other = iter(dataset)
    other.set_state(json.loads(json.dumps(iterator.get_state())))
    iterator.close()
    return _lengths(strategy, other)


@scenario
def resuming_with_an_empty_share(strategy, worker):
    """A batch of one row, which each worker has for itself: it is for one of two replicas."""
    options = rx.InputOptions(auto_shard_policy="OFF")
    dataset = strategy.experimental_distribute_dataset([np.float32([10 + worker])], options)
    iterator = iter(dataset)
    steps = [_rows(strategy, next(iterator))]
    other = iter(dataset)
    other.set_state(json.loads(json.dumps(iterator.get_state())))
    iterator.close()
    return steps + [_rows(strategy, element) for element in other]


def _rows(strategy, element):
    return np.asarray(strategy.gather(element, axis=0)).tolist()


@scenario
def shared_by_files_of_different_length(strategy, worker):
    import grain
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as directory:
        paths = []
        for file, rows in enumerate([3, 8]):
            path = Path(directory) / f"{file}.parquet"
            values = [10 * file + i for i in range(rows)]
            pq.write_table(pa.table({"x": values}), path)
            paths.append(str(path))
        dataset = grain.experimental.ParquetIterDataset(paths).batch(4)
        options = rx.InputOptions(auto_shard_policy="FILE")
        distributed = strategy.experimental_distribute_dataset(dataset, options)
        return [
            np.asarray(strategy.gather(element["x"], axis=0)).tolist() for element in distributed
        ]


@scenario
def devices_of_one_process(strategy, worker):
    local = rx.MirroredStrategy(jax.local_devices())
    with local.scope():
        weight = rx.Variable(float(worker))
    value = local.run(lambda: weight + 1.0)
    return float(value)


@scenario
def another_strategy(strategy, worker):
    again = rx.MultiWorkerMirroredStrategy()
    resolver = rx.cluster_resolver.SimpleClusterResolver(
        {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, task_type="worker", task_id=worker
    )
    return {
        "replicas": again.num_replicas_in_sync,
        "other cluster": message_of(RuntimeError, lambda: rx.MultiWorkerMirroredStrategy(resolver)),
    }


@scenario
def numbers_of_replicas(strategy, worker):
    """Python numbers, which each worker has its own of, or all the same."""
    own = strategy.run(lambda: (float(worker), 7, 2.5))
    means = [float(strategy.reduce("MEAN", each, axis=None)) for each in own]
    return {"means": means, "plain": [isinstance(each, rx.PerReplica) for each in own]}


@scenario
def values_made_by_hand(strategy, worker):
    value = rx.PerReplica([np.full(2 + worker, worker + 1.0, np.float32)])
    total = rx.function(lambda x: strategy.reduce("SUM", x, axis=0))
    return {
        "mean": float(strategy.reduce("MEAN", value, axis=0)),
        "gather": np.asarray(strategy.gather(value, axis=0)).tolist(),
        "compiled": float(total(value)),
    }


@scenario
def meetings_about_shapes(strategy, worker):
    """Return the names of the calls that wait for the other worker, with their counts."""
    labels = []
    all_gather = cluster.Session.all_gather

    def counted(self, label, value=None):
        labels.append(label)
        return all_gather(self, label, value)

    def meetings(call):
        labels.clear()
        result = call()
        return [len(labels), result]

    def shapes_of(value):
        return [list(shape) for shape in value.shapes]

    def gradient(values):
        def loss(values):
            gathered = rx.get_replica_context().all_gather(values, axis=0)
            return sum(jnp.sum(each**2) for each in gathered)

        return jax.grad(loss)(values)

    with strategy.scope():
        own = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    counting = rx.function(lambda: strategy.run(lambda: own.assign_add(1.0)))
    counting()
    value = of_worker(strategy, np.ones(2 + worker, np.float32))
    several = [of_worker(strategy, np.ones((2 + worker, n), np.float32)) for n in (1, 2, 3)]
    with mock.patch.object(cluster.Session, "all_gather", counted):
        seen = {
            "before": meetings(lambda: message_of(ValueError, lambda: value.shapes)),
            "reduce": meetings(lambda: float(strategy.reduce("SUM", value, axis=0))),
            "after": meetings(lambda: shapes_of(value)),
            "nest": meetings(lambda: [x.tolist() for x in strategy.reduce("SUM", several, axis=0)]),
            "gradient": meetings(
                lambda: [x.primary.sum().item() for x in strategy.run(gradient, (several,))]
            ),
            "written eagerly": meetings(lambda: strategy.run(own.assign_add, (1.0,)))[0],
            "then in a program": meetings(counting)[0],
            "assigned": meetings(lambda: own.assign(8.0))[0],
            "then again": meetings(counting)[0],
        }
    return {**seen, "counted": float(own.numpy())}


@scenario
def results_that_differ(strategy, worker):
    """Results of compiled functions have shapes that each worker knows, or believes to know."""
    rows = 3 - worker
    value = rx.PerReplica([jnp.ones(rows)], strategy.topology, shapes=[(rows,)] * 2)
    return message_of(ValueError, lambda: strategy.reduce("SUM", value, axis=None))


@scenario
def long_lines_that_differ(strategy, worker):
    constant = np.arange(400, dtype=np.float32)
    constant[-1] = worker

    @rx.function
    def adding(x):
        return strategy.run(lambda x: x + constant, args=(x,))

    return message_of(rx.errors.ProgramMismatch, lambda: adding(np.float32(1.0)))


@scenario
def strings_and_failing_beginnings(strategy, worker):
    words = [np.array(["a", "b"] if worker else ["long", "longer"])]
    dataset = strategy.distribute_datasets_from_function(lambda context: words)
    (element,) = list(dataset)

    class Broken:
        def __iter__(self):
            if worker == 1:
                raise OSError("no such file")
            return iter([np.float32([1.0])])

        def __len__(self):
            return 1

    kind = OSError if worker == 1 else rx.errors.InputFailed
    broken = strategy.distribute_datasets_from_function(lambda context: Broken())
    return {
        "words": [str(word) for word in strategy.experimental_local_results(element)[0]],
        "failure": message_of(kind, lambda: next(iter(broken))),
    }


@scenario
def callbacks(strategy, worker):
    seen = []

    @rx.function
    def step(x):
        def replica(x):
            jax.debug.callback(lambda x: seen.append(float(x)), x)
            return x

        return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)

    total = float(step(np.float32(2.0)))
    jax.effects_barrier()
    return [total, seen]


@scenario
def flax_modules(strategy, worker):
    try:
        from flax import nnx
    except ImportError:
        return None
    import optax

    model = nnx.Dict(weight=nnx.Param(jnp.float32(worker)), rngs=nnx.Rngs(worker))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    metric = nnx.metrics.Average()

    def step(x):
        optimizer.update(model, nnx.grad(lambda model: model.weight[...] * x)(model))
        metric.update(values=x)
        return model.rngs.uniform()

    x = of_worker(strategy, np.float32(worker + 1.0))
    drawn = [
        float(strategy.experimental_local_results(strategy.run(fn, args=(x,)))[0])
        for fn in (rx.function(step), step)
    ]
    plain = nnx.Rngs(0)
    own = drawn == [float(plain.uniform()), float(plain.uniform())]
    return {
        "weight": float(model.weight[...]),
        "metric": [float(metric.total[...]), int(metric.count[...])],
        "the numbers of worker 0 are those of one device": own == (worker == 0),
    }


@scenario
def audits(strategy, worker):
    @rx.function
    def step(x, only_compiled):
        def replica_step(x, only_compiled):
            return x + only_compiled if isinstance(x, jax.core.Tracer) else x

        return strategy.run(replica_step, args=(x, only_compiled))

    x, wrong = of_worker(strategy, np.float32(1.0)), of_worker(strategy, np.float32(worker))
    report = rx.audit(step, x, wrong)
    rx.config.audit_functions(every=1)
    sampled = message_of(rx.errors.AuditFailed, lambda: step(x, wrong))
    rx.config.audit_functions(None)
    return {"differences": [str(each) for each in report.differences], "sampled": sampled}


@scenario
def exports(strategy, worker):
    with strategy.scope():
        weight = rx.Variable(2.0)

    def export(path):
        return rx.export(lambda x: x * weight, path, np.float32([1, 2]))

    with tempfile.TemporaryDirectory() as directory:
        export(Path(directory) / "model")
        there = [each.name for each in Path(directory).iterdir()]
    failure = message_of(rx.errors.ExportFailed, lambda: export("/dev/null/model"))
    return {"there": there, "failure": failure}


@scenario
def means_over_uneven_rows(strategy, worker):
    with strategy.scope():
        weight = rx.Variable(0.0)
        optimizer = rx.Optimizer(optax.sgd(1.0), reduction="MEAN")

    def step(x):
        gradient = rx.grad(lambda: -(x * weight).mean(), weight)()
        optimizer.apply_gradients([(gradient, weight)])

    after = []
    for rows in ([1.0, 2.0, 3.0], []):  # of the first worker; the second one has a row
        own = rows if worker == 0 else [6.0]
        for fn in (step, rx.function(step)):
            strategy.run(fn, args=(of_worker(strategy, np.float32(own)),))
            after.append(float(weight))
    return after


@scenario
def what_is_done_together(strategy, worker):
    """The meetings and programs of a step."""
    with strategy.scope():
        weights = [rx.Variable(np.ones(200, np.float32)) for _ in range(3)]
        optimizer = rx.Optimizer(optax.sgd(0.5))

    def step(rows):
        def loss_of():
            return sum((rows * weight.value).sum() for weight in weights)

        loss, gradients = rx.value_and_grad(loss_of, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    def whole_step(rows):
        return strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)

    compiled = rx.function(whole_step)
    batches = [np.full((3, 200), 1 / 256, np.float32)] * 5
    options = rx.InputOptions(auto_shard_policy="data")
    elements = iter(strategy.experimental_distribute_dataset(batches, options))
    for function in (whole_step, compiled):
        function(next(elements))
    session, done = cluster.current(), []
    all_gather, run = session.all_gather, session.run
    session.all_gather = lambda label, value=None: (
        done.append(f"all_gather: {label}"),
        all_gather(label, value),
    )[1]
    session.run = lambda label, program: (done.append(f"run: {label}"), run(label, program))[1]
    try:
        losses = [float(function(next(elements))) for function in (whole_step, compiled)]
    finally:
        del session.all_gather, session.run
    values = [strategy.run(lambda n=n: jnp.full(n, worker + 1.0)) for n in (1, 1000)]
    return {
        "done": done,
        "losses": losses,
        "values": [float(each[0]) for each in strategy.reduce("SUM", values, axis=None)],
        "means": [float(strategy.reduce("MEAN", each, axis=None)[0]) for each in values],
    }


def main() -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id
    chosen = sys.argv[1:]
    for each in SCENARIOS:
        if chosen and each.__name__ not in chosen:
            continue
        print("RESULT", json.dumps([each.__name__, each(strategy, worker)]), flush=True)
    if not chosen or "read_by_one_at_the_end" in chosen:
        rx.experimental_set_strategy(strategy)
        last = rx.Variable(float(worker + 1))
        if worker == 0:  # the other one is at its end, and never reads it
            print("RESULT", json.dumps(["read_by_one_at_the_end", float(last)]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
