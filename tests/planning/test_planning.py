"""Plans of real programs: what XLA makes of them is what was worked out by hand."""

import functools
import importlib.util
import inspect
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.planning._chips import CHIPS
from replicax.planning._topologies import SHAPES

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; `pip install 'replicax[tpu]'`, or `make test-all`",
)

PROJECT = Path(__file__).parents[2]
SIZES = (784, 512, 512, 10)
ROWS = 64
GRADIENT_BYTES = sum(4 * (a * b + b) for a, b in itertools.pairwise(SIZES))
LOSS_BYTES = 4


def mlp(strategy, sizes=SIZES, rows=ROWS):
    """A network with biases, trained by SGD with momentum."""
    layers = list(itertools.pairwise(sizes))
    batch = rows * strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [
            rx.Variable(lambda a=a, b=b: jnp.zeros((a, b)), name=f"weight_{a}_{b}")
            for a, b in layers
        ]
        biases = [rx.Variable(lambda b=b: jnp.zeros((b,)), name=f"bias_{b}") for _, b in layers]
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9))
    variables = [*weights, *biases]

    def replica_step(x, y):
        def loss():
            hidden = x
            for weight, bias in zip(weights, biases, strict=True):
                hidden = jax.nn.relu(hidden @ weight + bias)
            return optax.softmax_cross_entropy_with_integer_labels(hidden, y).sum() / batch

        value, gradients = rx.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # the gradients' line
        return value

    @rx.function
    def step(x, y):
        per_replica = strategy.run(replica_step, args=(x, y))
        return strategy.reduce("SUM", per_replica, axis=None)  # the loss's line

    return step, (
        jax.ShapeDtypeStruct((batch, sizes[0]), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


class Peak:
    """The growth of this process's peak memory since this object was created, in bytes."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak that there was
        self._before = self._now()

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    def grown(self) -> int:
        return self._now() - self._before


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "chips"), [("v5e:2x2", 4), ("v5e:4x4", 16), ("v5e:8x8", 64), ("v5e:16x16", 256)]
)
def test_the_network_on_a_v5e(topology, chips):
    plan = rx.planning.plan(mlp, topology)
    assert (plan.chips, plan.replicas, plan.devices_per_replica) == (chips, chips, 1)
    assert plan.batch == ROWS * chips
    # What is communicated: the gradients and the loss, each once, from these lines.
    assert {each.kind for each in plan.collectives} == {"all-reduce"}
    assert {each.group_size for each in plan.collectives} == {chips}
    assert sum(each.bytes for each in plan.collectives) == GRADIENT_BYTES + LOSS_BYTES
    by_line = {}
    for origin in (origin for each in plan.collectives for origin in each.origins):
        assert origin.file == __file__
        by_line[origin.line] = by_line.get(origin.line, 0) + origin.bytes
    assert by_line == {
        line_of("# the gradients' line"): GRADIENT_BYTES,
        line_of("# the loss's line"): LOSS_BYTES,
    }
    # What is kept: the variables, their momentum, and the count of steps.
    by_hand = 2 * GRADIENT_BYTES + 4
    assert sum(variable.bytes for variable in plan.variables) == by_hand
    assert plan.memory.variables == pytest.approx(by_hand, rel=0.01)
    assert plan.memory.inputs == pytest.approx(ROWS * (784 + 1) * 4, rel=0.2)  # laid out in tiles
    assert plan.memory.capacity == CHIPS["v5e"].usable_memory
    assert plan.fits
    products = 3 * 2 * ROWS * (784 * 512 + 512 * 512 + 512 * 10) - 2 * ROWS * 784 * 512
    assert plan.flops == products  # the gradient of the input is not computed
    assert plan.estimate is not None
    assert plan.estimate.compute == pytest.approx(products / 197e12)


@needs_libtpu
def test_the_memory_by_kind_is_what_xla_says_it_needs(monkeypatch):
    seen = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, *args: seen.append(compile_(self, *args)) or seen[-1],
    )
    memory = rx.planning.plan(mlp, "v5e:2x2").memory
    said = seen[-1].memory_analysis()
    assert memory.variables + memory.inputs == said.argument_size_in_bytes
    assert memory.outputs == said.output_size_in_bytes - said.alias_size_in_bytes
    assert memory.temporaries == said.temp_size_in_bytes


@needs_libtpu
def test_a_step_that_cannot_fit_says_so_with_the_numbers():
    program = functools.partial(mlp, sizes=(784, 50_000, 50_000, 10))
    peak = Peak()
    plan = rx.planning.plan(program, "v5e:4x4")
    assert peak.grown() < 2**30  # the variables alone would be 20 GB
    assert not plan.fits
    by_hand = 2 * sum(4 * (a * b + b) for a, b in ((784, 50_000), (50_000, 50_000), (50_000, 10)))
    assert plan.memory.variables == pytest.approx(by_hand, rel=0.01)
    assert plan.memory.capacity == 15.75 * 2**30
    assert plan.memory.needed > by_hand
    warning = plan.warnings[0]
    assert warning.startswith("The step does not fit: it needs ")
    assert "on a device that has 15.75 GiB. Variables are 18.92 GiB of it" in warning
    assert "`computation_shape`" in warning
    assert "'weight_50000_50000'" in plan.warnings[1]
    assert "whole on every device" in plan.warnings[1]
    assert "too little" in str(plan)
    assert plan.estimate is None


def large(strategy, layers=80, width=8192, inner=28672, tokens=2048):
    """70 billion parameters, in all; divided over the devices of each replica."""
    parts = strategy.topology.logical_devices_per_replica
    replicas = strategy.num_replicas_in_sync

    def divided(shape, dimension):
        sides = [parts if place == dimension else 1 for place in range(len(shape))]
        with strategy.extended.partition(sides):
            return rx.Variable(lambda: jnp.zeros(shape, jnp.bfloat16), name=f"{shape}")

    with strategy.scope():
        weights = [
            divided((layers, width, inner), 2),
            divided((layers, width, inner), 2),
            divided((layers, inner, width), 1),
            divided((layers, width, 2 * width), 2),
        ]
        embedding = divided((32_000, width), 1)
        optimizer = rx.Optimizer(optax.sgd(1e-3))
    variables = [*weights, embedding]

    def layer(x, weights):
        up, gate, down, mixing = weights
        left, right = jnp.split(x @ mixing, 2, axis=-1)
        return x + left * right + (jax.nn.silu(x @ gate) * (x @ up)) @ down, None

    def replica_step(tokens):
        def loss():
            x = jnp.take(embedding.value, tokens[:, :-1], axis=0)
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, tuple(w.value for w in weights))
            logits = (x @ embedding.value.T).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean() / replicas

        value, gradients = rx.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    def step(tokens):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(tokens,)), axis=None)

    return step, (jax.ShapeDtypeStruct((replicas, tokens + 1), jnp.int32),)


@needs_libtpu
def test_seventy_billion_parameters_take_no_memory_here():
    peak = Peak()
    plan = rx.planning.plan(large, "v5e:16x16", computation_shape=(2, 2))
    assert peak.grown() < 2**30  # the variables would be 140 GB
    parameters = sum(np.prod(variable.shape) for variable in plan.variables)
    assert 6.5e10 < parameters < 7.5e10
    assert (plan.replicas, plan.devices_per_replica) == (64, 4)
    assert not plan.fits
    assert plan.memory.variables == pytest.approx(parameters * 2 / 4, rel=0.01)


@needs_libtpu
def test_variables_that_are_divided_over_the_devices_of_a_replica():
    program = functools.partial(large, layers=4, width=512, inner=1024, tokens=128)
    plan = rx.planning.plan(program, "v5e:4x4", computation_shape=(2, 2))
    assert (plan.chips, plan.replicas, plan.devices_per_replica) == (16, 4, 4)
    trained = 2 * (4 * (3 * 512 * 1024 + 512 * 2 * 512) + 32_000 * 512)
    assert plan.memory.variables == pytest.approx(trained / 4, rel=0.01)
    assert not any(variable.whole for variable in plan.variables if len(variable.shape) > 1)
    gradients = [
        each
        for each in plan.collectives
        for origin in each.origins
        if origin.function.endswith("replica_step") and each.kind == "all-reduce"
    ]
    assert sum(each.bytes for each in gradients) == pytest.approx(trained / 4, rel=0.01)
    # In each of the layers, forward, the same once more but for the last product, which nobody
    # needs again, and backward, which takes twice as much. The embedding is multiplied by once.
    layer = 4 * (3 * 512 * 1024 + 512 * 2 * 512) - 512 * 1024
    assert plan.flops == pytest.approx(2 * 128 * (4 * layer + 3 * 32_000 * 512) / 4)
    assert {each.times for each in plan.collectives} >= {1, 4}


@needs_libtpu
def test_a_replica_of_chips_of_several_hosts():
    program = functools.partial(large, layers=2, width=512, inner=1024, tokens=128)
    plan = rx.planning.plan(program, "v5e:4x8", computation_shape=(4, 4))
    assert (plan.chips, plan.replicas, plan.devices_per_replica) == (32, 2, 16)
    trained = 2 * (2 * (3 * 512 * 1024 + 512 * 2 * 512) + 32_000 * 512)
    assert plan.memory.variables == pytest.approx(trained / 16, rel=0.01)


def test_what_is_made_where_variables_are_divided_is_as_in_training():
    """A scalar stays whole, a slot follows its variable, an ON_READ variable is refused."""

    def program(strategy):
        with strategy.scope(), strategy.extended.partition([2]):
            weight = rx.Variable(lambda: jnp.zeros(8))
            optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9))
            with pytest.raises(ValueError, match="cannot be divided"):
                rx.Variable(jnp.zeros(8), synchronization="ON_READ")

        def step(x):
            optimizer.apply_gradients([(x.sum(0), weight)])

        return rx.function(lambda x: strategy.run(step, args=(x,))), (
            jax.ShapeDtypeStruct((4, 8), jnp.float32),
        )

    plan = rx.planning.plan(program, "cpu:4", computation_shape=(2,))
    assert plan.memory.variables == 4 * 4 + 4 * 4 + 4


def test_on_cpus():
    plan = rx.planning.plan(mlp, "cpu:8")
    assert (plan.chips, plan.replicas, plan.batch) == (8, 8, 8 * ROWS)
    assert sum(each.bytes for each in plan.collectives) == GRADIENT_BYTES + LOSS_BYTES
    assert plan.memory.variables == 2 * GRADIENT_BYTES + 4
    assert (plan.memory.capacity, plan.estimate, plan.fits) == (None, None, True)
    assert rx.planning.plan(mlp, "cpu:8", computation_shape=(2,)).replicas == 4


def divided_by_hand(parts):
    """Return the bytes per device of the matrices, and of what is too small to be divided."""
    pairs = list(itertools.pairwise(SIZES))
    matrices = [4 * a * b for a, b in pairs]
    divided = [size for size in matrices if size >= 64 * 1024]
    whole = sum(matrices) - sum(divided) + sum(4 * b for _, b in pairs)
    return divided, 2 * (sum(divided) // parts + whole) + 4


def test_state_that_is_divided_over_the_replicas():
    plan = rx.planning.plan(mlp, "cpu:4", placement=rx.parts.ShardedPlacement())
    divided, by_hand = divided_by_hand(4)
    assert plan.memory.variables == by_hand == sum(each.bytes for each in plan.variables)
    assert {each.name for each in plan.variables if not each.whole} == {
        "weight_784_512", "weight_512_512",
        "Optimizer/weight_784_512[0].trace", "Optimizer/weight_512_512[0].trace",
    }  # fmt: skip
    moved = {}
    for each in plan.collectives:
        moved.setdefault(each.kind, []).append(each.bytes)
    assert sorted(moved["all-gather"]) == sorted(divided)
    assert sorted(moved["reduce-scatter"]) == sorted(divided)
    assert sum(moved["all-reduce"]) == GRADIENT_BYTES - sum(divided) + LOSS_BYTES


@needs_libtpu
def test_divided_state_falls_with_the_number_of_chips():
    topologies = ["v5e:2x2", "v5e:4x4", "v5e:8x8"]
    scaling = rx.planning.scaling(mlp, topologies, placement=rx.parts.ShardedPlacement())
    for plan in scaling.plans:
        _, by_hand = divided_by_hand(plan.chips)
        assert sum(each.bytes for each in plan.variables) == by_hand
        assert by_hand <= plan.memory.variables <= by_hand + 64 * 1024  # laid out in tiles


@pytest.mark.slow
@needs_libtpu
def test_seven_billion_parameters_fit_where_they_are_divided():
    program = runpy.run_path(str(PROJECT / "examples" / "seven_billion.py"))["program"]
    sharded, mirrored = (
        rx.planning.plan(program, "v5e:16x16", placement=placement)
        for placement in (rx.parts.ShardedPlacement(), None)
    )
    layer = 4 * 4096**2 + 3 * 4096 * 11_008
    parameters = 32 * layer + 2 * 32_000 * 4096
    state = 3 * 4 * parameters  # with both moments of Adam
    assert not mirrored.fits
    assert sum(each.bytes for each in mirrored.variables) == state + 8
    assert sharded.fits
    assert sum(each.bytes for each in sharded.variables) == state // 256 + 8
    # Weights are gathered layer by layer, forward and backward, in bfloat16.
    gathered = [each for each in sharded.collectives if each.kind == "all-gather"]
    in_layers = sum(each.bytes for each in gathered if each.times == 32)
    assert in_layers == 2 * 2 * layer
    # What else is there is less than the gradients alone would be, or all weights.
    assert sharded.memory.temporaries < 4 * parameters / 4


def test_a_placement_that_is_none():
    with pytest.raises(rx.errors.InvalidType, match=r"must be an `rx\.parts\.ShardedPlacement`"):
        rx.planning.plan(mlp, "cpu:4", placement=rx.FullyShardedStrategy)


@pytest.mark.parametrize("sharded", [False, True])
def test_it_is_the_program_that_trains(sharded):
    devices = [f"CPU:{index}" for index in range(4)]
    strategy = (rx.FullyShardedStrategy if sharded else rx.MirroredStrategy)(devices)
    step, args = mlp(strategy)
    arrays = [np.zeros(arg.shape, arg.dtype) for arg in args]
    batch = next(iter(strategy.experimental_distribute_dataset([tuple(arrays)])))
    trained = step.lower(*batch).as_text()
    planned = []
    compile_ = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered,
            "compile",
            lambda self, *args: planned.append(self.as_text()) or compile_(self, *args),
        )
        rx.planning.plan(mlp, "cpu:4", placement=rx.parts.ShardedPlacement() if sharded else None)
    assert planned == [trained]


def test_nothing_is_run_while_planning():
    def program(strategy):
        with strategy.scope():
            weight = rx.Variable(1.0)
        strategy.run(lambda: weight.value)

    with pytest.raises(rx.errors.ContextError, match="`run` was called while a program is planned"):
        rx.planning.plan(program, "cpu:2")


def test_variables_have_no_numbers_while_planning():
    def program(strategy):
        with strategy.scope():
            weight = rx.Variable(1.0)
        assert (weight.shape, weight.dtype) == ((), jnp.float32)
        float(weight)

    with pytest.raises(rx.errors.ContextError, match="shapes and no numbers"):
        rx.planning.plan(program, "cpu:2")


def test_all_kinds_of_variables_and_arguments():
    def program(strategy):
        with strategy.scope():
            total = rx.Variable(0.0, aggregation="SUM", name="total")
            seen = rx.Variable(
                np.zeros((3,), np.int32), synchronization="ON_READ", aggregation="SUM", name="seen"
            )
        made = []

        def replica_step(batch, factor, words):
            if not made:
                made.append(rx.Variable(lambda: jnp.ones((5, 5)), name="lazily"))
            context = rx.get_replica_context()
            seen.assign_add(jnp.ones((3,), jnp.int32))
            rows = context.all_reduce("SUM", batch["x"] * factor)
            total.assign_add(rows.sum() + made[0].value.sum())
            return len(words) + rows

        def step(batch, factor, words):
            return strategy.gather(strategy.run(replica_step, (batch, factor, words)), axis=0)

        return step, ({"x": np.zeros((8, 2), np.float32)}, jnp.asarray(2.0), "words")

    plan = rx.planning.plan(program, "cpu:4", batch=16)
    assert plan.batch == 16
    assert {v.name: v.bytes for v in plan.variables} == {"lazily": 100, "seen": 12, "total": 4}
    assert {v.name for v in plan.variables if v.whole} == {"lazily", "total"}
    assert plan.memory.inputs == 4 * 2 * 4 + 4


def test_loops_count_as_often_as_they_run():
    def program(strategy):
        with strategy.scope():
            weight = rx.Variable(lambda: jnp.ones((8, 8)), name="weight")

        def replica_step(x):
            def body(carry, _):
                return rx.get_replica_context().all_reduce("SUM", carry @ weight.value), None

            x, _ = jax.lax.scan(body, x, None, length=10)
            return jax.lax.cond(x.sum() > 0, lambda x: x @ weight.value, lambda x: x, x)

        return lambda x: strategy.run(replica_step, (x,)), (np.zeros((8, 8), np.float32),)

    plan = rx.planning.plan(program, "cpu:2")
    assert plan.flops == 11 * 2 * 4 * 8 * 8
    (reduced,) = plan.collectives
    assert (reduced.times, reduced.exact, reduced.bytes) == (10, True, 4 * 8 * 4)


@pytest.mark.parametrize("made", [None, (print,), (print, 1), (1, ())])
def test_a_program_that_returns_something_else(made):
    with pytest.raises(rx.errors.InvalidType, match=r"returns its step function and a tuple"):
        rx.planning.plan(lambda strategy: made, "cpu:2")


def test_batches_that_cannot_be_divided():
    with pytest.raises(rx.errors.InvalidArgument, match=r"A batch of 6 rows.*over 4 replicas"):
        rx.planning.plan(mlp, "cpu:4", batch=6)


@pytest.mark.parametrize(
    "name", ["v5e:3x3", "v5e:32x32", "v5e-16", "v7x:2x2", "v5e", "", "cpu:0", "cpu:x"]
)
def test_unknown_topologies_are_told_those_that_work(name):
    with pytest.raises(rx.errors.DeviceError, match="Those that work") as caught:
        rx.planning.plan(mlp, name)
    for known in ("v4:2x2x1|", "v5e:1x1|2x2|2x4|4x4", "v5p:", "v6e:", "tpu7x:", "cpu:1 and up"):
        assert known in str(caught.value)


def test_gpus_cannot_be_planned_for():
    with pytest.raises(rx.errors.DeviceError, match=r"'gpu:8' cannot be planned for.*CUDA plugin"):
        rx.planning.plan(mlp, "gpu:8")


def test_too_few_cpus():
    with pytest.raises(rx.errors.DeviceError, match=r"CPU:99"):
        rx.planning.plan(mlp, "cpu:100")


def test_without_libtpu_the_error_says_so():
    code = """
        import os, sys
        sys.modules["libtpu"] = None  # as if it were not installed
        os.environ.pop("TPU_LIBRARY_PATH", None)
        import replicax as rx
        try:
            rx.planning.plan(lambda strategy: None, "v5e:2x2")
        except rx.errors.DeviceError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=120
    )
    assert "'v5e:2x2' needs libtpu" in done.stdout, done.stderr
    assert "pip install 'replicax[tpu]'" in done.stdout


@pytest.mark.parametrize(
    ("block", "message"),
    [((3,), "cannot be divided into blocks of 3 chips"), ((0,), "has the sides"), ((), "sides")],
)
def test_blocks_that_cannot_be(block, message):
    with pytest.raises(rx.errors.DeviceError, match=message):
        rx.planning.plan(mlp, "cpu:8", computation_shape=block)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rx.planning.plan(mlp, None), "topology is given by its name; got None.*cpu:1"),
        (lambda: rx.planning.plan(mlp, 8), "topology is given by its name; got 8"),
        (lambda: rx.planning.scaling(mlp, ["cpu:8", None]), "given by its name; got None"),
        (lambda: rx.planning.scaling(mlp, 8), "`topologies` must be a list of names.*got 8"),
        (lambda: rx.planning.scaling(mlp, np.ones(2)), r"list of names.*got array of shape \(2,\)"),
        (lambda: rx.planning.plan(mlp, "cpu:8", 2), "has the sides.*got 2"),
        (lambda: rx.planning.plan(mlp, "cpu:8", batch="x"), "positive number of rows; got 'x'"),
        (lambda: rx.planning.plan(mlp, "cpu:8", batch=-8), "positive number of rows; got -8"),
        (lambda: rx.planning.plan(None, "cpu:8"), "is a function; got None"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(rx.errors.ReplicaxError, match=message):
        call()


@needs_libtpu
@pytest.mark.parametrize("kind", SHAPES)
def test_every_topology_of_the_list_can_be_described(kind):
    from replicax.planning._topologies import target_of

    environment = dict(os.environ)
    for shape in SHAPES[kind]:
        described = target_of(f"{kind}:{shape}")
        assert described.chips == np.prod([int(side) for side in shape.split("x")])
    assert dict(os.environ) == environment


def test_the_page_of_the_docs_has_the_figures_of_the_chips():
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for chip in CHIPS.values():
        figures = (
            f"{chip.usable_memory / 2**30:g} GiB",
            f"{chip.memory_bandwidth / 1e9:g} GB/s",
            f"{chip.peak_flops / 1e12:g} TFLOP/s",
            f"{chip.link_bandwidth / 1e9:g} GB/s",
            str(chip.links),
        )
        assert f"| {chip.name} | {' | '.join(figures)} | {chip.source.split(',')[0]}" in text


@needs_libtpu
def test_replicas_are_blocks_of_neighbours():
    from replicax.planning._topologies import target_of

    topology = target_of("v5e:4x4").topology((2, 2))
    for replica in topology.devices:
        places = np.array([device.coords for device in replica])
        assert (np.ptp(places, axis=0) == [1, 1, 0]).all()


def test_scaling():
    scaling = rx.planning.scaling(mlp, ["cpu:2", "cpu:4"])
    assert [plan.chips for plan in scaling.plans] == [2, 4]
    assert "cpu:2" in str(scaling)
    assert scaling.efficiency(scaling.plans[1]) is None
    with pytest.raises(rx.errors.InvalidType, match="a list of names"):
        rx.planning.scaling(mlp, "cpu:2")
