"""However a function comes by a module, it is found; what a program depends on is noticed."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_models import Model, X, Y, made, nnx, over, plain_step, shared, step
from support import components_equal, equal

import replicax as rx
from replicax.integrations.flax import _fingerprint
from replicax.integrations.flax._discovery import Reach


class Line(nnx.Module):
    """The smallest model: y = weight * x."""

    def __init__(self, weight=1.0):
        self.weight = nnx.Param(jnp.float32(weight))
        self.scale = 1.0

    def __call__(self, x):
        return self.weight * x * self.scale


def trained(weight=1.0):
    line = Line(weight)
    return line, nnx.Optimizer(line, optax.sgd(0.25), wrt=nnx.Param)


def descend(line, optimizer, x):
    optimizer.update(line, nnx.grad(lambda line: line(x))(line))


LINE, OPTIMIZER = trained()
HELD = {}


def by_globals(x):
    descend(LINE, OPTIMIZER, x)


def by_a_global_dictionary(x):
    descend(*HELD["both"], x)


class Trainer:
    def __init__(self, line, optimizer):
        self.line, self.steps, self.optimizers = line, 0, [optimizer]

    def step(self, x):
        self.steps += 1
        self.inner(x)

    def inner(self, x):
        descend(self.line, self.optimizers[0], x)

    compiled = rx.function(step)


def ways():
    """Step functions of x alone, each with the model that it trains."""
    line, optimizer = trained()
    yield "closure", line, lambda x: descend(line, optimizer, x)
    OPTIMIZER.__dict__.update(nnx.Optimizer(LINE, optax.sgd(0.25), wrt=nnx.Param).__dict__)
    LINE.weight[...] = jnp.float32(1.0)
    yield "globals", LINE, by_globals
    HELD["both"] = trained()
    yield "dictionary", HELD["both"][0], by_a_global_dictionary
    partial_line, partial_optimizer = trained()
    yield "partial", partial_line, functools.partial(descend, partial_line, partial_optimizer)
    trainer = Trainer(*trained())
    yield "bound method", trainer.line, trainer.step
    compiled = Trainer(*trained())
    yield "compiled method", compiled.line, compiled.compiled
    inner = rx.function(trainer_step := Trainer(*trained()).step)
    yield "function in function", trainer_step.__self__.line, lambda x: inner(x)
    default_line, default_optimizer = trained()

    def by_defaults(x, line=default_line, *, optimizer=default_optimizer):
        descend(line, optimizer, x)

    yield "defaults", default_line, by_defaults
    jitted_line, jitted_optimizer = trained()
    gradient = nnx.jit(nnx.grad(lambda line, x: line(x)))

    def by_jit(x):
        jitted_optimizer.update(jitted_line, gradient(jitted_line, x))

    yield "nnx.jit inside", jitted_line, by_jit


@pytest.mark.parametrize("outside", [False, True], ids=["run(function)", "function(run)"])
def test_modules_are_found_wherever_they_are(two, outside):
    for name, line, fn in ways():
        # 1 - 0.25 * (2 + 4), twice
        x = rx.PerReplica((jnp.float32(2.0), jnp.float32(4.0)))
        if outside:
            compiled = rx.function(lambda x, fn=fn: two.run(fn, args=(x,)))
        else:
            compiled = functools.partial(
                two.run, rx.function(fn) if name != "compiled method" else fn
            )
        for _ in range(2):
            compiled(x) if outside else compiled(args=(x,))
        assert float(line.weight[...]) == -2.0, name


@over("mirrored 2")
def test_what_is_handed_over_keeps_its_identity(strategy, execution):
    line, optimizer = trained()
    seen = []

    def step(models, *, optimizer, x):
        seen.append(models["line"] is line and optimizer.step is count)
        descend(models["line"], optimizer, x)
        return models, nnx.state(models["line"]), x

    count = optimizer.step
    kwargs = {"optimizer": optimizer, "x": jnp.float32(1.0)}
    models, state, x = strategy.run(step, args=({"line": line},), kwargs=kwargs)
    assert all(seen)
    assert models["line"] is line
    equal(strategy.experimental_local_results(x)[0], 1.0)
    assert int(optimizer.step[...]) == 1
    after = 1 - 0.25 * strategy.num_replicas_in_sync
    equal(line.weight[...], after)
    replicas = strategy.num_replicas_in_sync
    components_equal(strategy, state["weight"].get_raw_value(), [after] * replicas)


def test_attributes_are_part_of_what_a_program_is_for(two):
    model = Model(rate=0.5)

    @rx.function
    def forward(x):
        return two.run(lambda x: model(x), args=(x,))

    def first():
        return two.experimental_local_results(forward(X))

    plain = nnx.jit(lambda model, x: model(x))
    one, other = first()
    assert not np.allclose(one, other)
    model.eval()
    one, other = first()
    equal(one, other)
    equal(one, plain(model, X), 1e-5)
    model.train()
    one, other = first()
    assert not np.allclose(one, other)
    assert forward.tracing_count == 2
    model.eval()
    model.second = nnx.Linear(6, 1, rngs=nnx.Rngs(5))
    equal(first()[0], plain(model, X), 1e-5)
    model.second.kernel[...] = jnp.zeros((6, 1))
    equal(first()[1], plain(model, X), 1e-5)
    assert forward.tracing_count == 3
    model.second.kernel.set_value(jnp.ones((6, 1), jnp.bfloat16))
    equal(first()[1], plain(model, X), 1e-2)
    assert forward.tracing_count == 4


def test_functions_of_nnx_in_between_are_no_reason_to_trace_again(two):
    ours = made(optax.adam(0.1))
    compiled = rx.function(step)
    (batch,) = shared(two, (X, Y))
    for _ in range(2):
        two.run(compiled, args=(*ours, *batch))
        plain_step(*ours, X, Y)
    assert compiled.tracing_count == 1


def test_objects_are_looked_for_once(two, monkeypatch):
    ours = made()
    roots = []

    def noting(found):
        roots.append(found)
        return Reach(found)

    monkeypatch.setattr(_fingerprint, "Reach", noting)
    compiled = rx.function(step)
    for batch in shared(two, *[(X, Y)] * 3):
        two.run(compiled, args=(*ours, *batch))
    assert roots == [[step, *ours]]


def test_the_function_may_be_a_module_or_a_method_of_one(two):
    class Doubling(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return 2 * self.inner(x)

        compiled = rx.function(__call__)

    model = Doubling()
    plain = nnx.jit(lambda model, x: model(x))(model, X)
    for fn in (model, rx.function(model), model.compiled, rx.function(model.__call__)):
        equal(two.experimental_local_results(two.run(fn, args=(X,)))[1], plain)


def test_a_counter_of_a_plain_object_is_no_reason_to_trace_again(two):
    trainer = Trainer(*trained())
    before = trainer.compiled.tracing_count
    for _ in range(3):
        two.run(trainer.compiled, args=(jnp.float32(1.0),))
    assert trainer.compiled.tracing_count == before + 1
    assert trainer.steps == 2  # both passes of the one time that it was traced
    trainer.line.scale = 2.0
    two.run(trainer.compiled, args=(jnp.float32(1.0),))
    assert trainer.compiled.tracing_count == before + 2
    trainer.line, trainer.optimizers[0] = trained(5.0)
    two.run(trainer.compiled, args=(jnp.float32(1.0),))
    equal(trainer.line.weight[...], 4.5)


class Hidden:
    """Holds a module where nobody looks."""

    __slots__ = ("line",)

    def __init__(self, line):
        self.line = line


def test_a_module_that_was_not_found_is_told(two):
    model = Hidden(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(rx.errors.InvalidArgument, match=r"not found.*Param of shape.*argument"):
        two.run(rx.function(lambda x: model.line(x)), args=(X,))
    counter = Hidden(nnx.Variable(jnp.zeros(3)))

    def write():
        counter.line[...] += 1

    with pytest.raises(Exception, match="different trace level") as caught:
        two.run(rx.function(write))
    assert "not found before it ran" in "".join(caught.value.__notes__)
    two.run(rx.function(lambda model, x: model(x)), args=(model.line, X))
    # It is known now, but not to another function.
    with pytest.raises(rx.errors.InvalidArgument, match="was not found"):
        two.run(rx.function(lambda x: model.line(x)), args=(X,))


def test_modules_made_inside_stay_inside(two):
    with pytest.raises(rx.errors.InvalidType, match="Line that was made inside"):
        two.run(rx.function(lambda: Line()))
    lines = two.experimental_local_results(two.run(lambda: Line(3.0)))
    assert [float(line.weight[...]) for line in lines] == [3.0, 3.0]


def test_a_module_goes_from_strategy_to_strategy(two):
    line, optimizer = trained()
    step = rx.function(descend)
    three = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    x = jnp.float32(1.0)
    step(line, optimizer, x)  # no strategy
    equal(line.weight[...], 0.75)
    two.run(step, args=(line, optimizer, x))
    equal(line.weight[...], 0.25)
    three.run(step, args=(line, optimizer, x))
    equal(line.weight[...], -0.5)
    two.run(step, args=(line, optimizer, x))
    equal(line.weight[...], -1.0)
    assert line.weight[...].devices() == {jax.devices()[0]}
    line.weight[...] = jnp.float32(7.0)
    two.run(step, args=(line, optimizer, x))
    equal(line.weight[...], 6.5)


def test_modules_are_not_kept_alive(two):
    line, optimizer = trained()
    two.run(descend, args=(line, optimizer, jnp.float32(1.0)))
    alive = weakref.ref(line), weakref.ref(optimizer), weakref.ref(line.weight[...])
    del line, optimizer
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_compiled_functions_without_a_strategy():
    ours, plain = trained(), trained()
    compiled = rx.function(descend)
    for _ in range(3):
        compiled(*ours, jnp.float32(1.0))
        descend(*plain, jnp.float32(1.0))
    equal(ours[0].weight[...], plain[0].weight[...])
    assert compiled.tracing_count == 1


class Anything:
    """Says that it has every attribute, and can be called."""

    def __getattr__(self, name):
        return Anything()

    def __call__(self):
        return 1.0


ANYTHING = Anything()


def test_what_makes_up_attributes_leads_nowhere():
    assert float(rx.function(lambda x: x * ANYTHING())(2.0)) == 2


state = nnx.state(Line())  # as a training loop may call what goes in and out of its steps


def test_an_attribute_is_no_global_of_its_name():
    def read(module, x):
        return nnx.state(module), module.state(x)

    assert Reach([read]).is_empty
    assert not Reach([lambda: (lambda: state)()]).is_empty


def test_functions_without_modules_keep_nothing_alive():
    class Holder:
        factor = 3.0

    holder = Holder()
    function = rx.function(lambda held, x: x * held.factor)
    assert float(function(holder, 2.0)) == 6
    reference = weakref.ref(holder)
    del holder
    gc.collect()
    assert reference() is None
