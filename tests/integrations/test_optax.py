"""rx.Optimizer, and whole training loops against NumPy and Optax on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica, shares

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")

ROWS, BATCH, EPOCHS, RATE = 28, 8, 3, 0.05
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
Y = (X @ np.float32([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)
BATCHES = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]  # last one partial


def numpy_weights():
    """The same training in plain NumPy, on whole batches."""
    w, b, losses = np.zeros((3, 1)), np.zeros(1), []
    for x, y in BATCHES * EPOCHS:
        error = x @ w + b - y
        losses.append(np.sum(error**2) / len(x))
        w = w - RATE * 2 * x.T @ error / len(x)
        b = b - RATE * 2 * error.sum(0) / len(x)
    return w, b, losses


def train(strategy, make_step):
    """Trains; `make_step(w, b)` gives what a replica does with `(loss_fn)`."""
    with strategy.scope():
        w, b = rx.Variable(np.zeros((3, 1), np.float32)), rx.Variable(np.zeros(1, np.float32))
        apply = make_step(w, b)

    def replica_step(x, y, rows):
        def loss_fn():
            return jnp.sum((x @ w + b - y) ** 2) / rows

        loss, gradients = rx.value_and_grad(loss_fn, [w, b])()
        apply(gradients)
        return loss

    losses = []
    for x, y in BATCHES * EPOCHS:
        args = (shares(strategy, x), shares(strategy, y), len(x))
        losses.append(strategy.reduce("SUM", strategy.run(replica_step, args=args), axis=None))
    return w, b, [float(loss) for loss in losses]


def by_hand(w, b):
    def apply(strategy, gradients):
        pairs = list(zip(gradients, [w, b], strict=True))
        reduced = strategy.extended.batch_reduce_to("SUM", pairs)
        for variable, gradient in zip([w, b], reduced, strict=True):
            strategy.extended.update(
                variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,)
            )

    return lambda gradients: rx.get_replica_context().merge_call(apply, args=(gradients,))


def by_all_reduce_and_assign(w, b):
    velocity = rx.Variable(np.zeros((3, 1), np.float32), aggregation="MEAN")

    def apply(gradients):
        context = rx.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        velocity.assign(gradients[0])

        def update(strategy, gradients):
            for variable, gradient in zip([w, b], gradients, strict=True):
                mean = strategy.reduce("MEAN", gradient, axis=None)
                variable.assign_sub(RATE * mean)

        context.merge_call(update, args=(gradients,))

    return apply


def by_optimizer(w, b):
    optimizer = rx.Optimizer(optax.sgd(RATE))
    return lambda gradients: optimizer.apply_gradients(zip(gradients, [w, b], strict=True))


@pytest.mark.parametrize("way", [by_hand, by_all_reduce_and_assign, by_optimizer])
def test_training_equals_numpy_on_the_whole_batch(strategy, way):
    w, b, losses = train(strategy, way)
    expected_w, expected_b, expected_losses = numpy_weights()
    equal(w.numpy(), expected_w, 1e-5)
    equal(b.numpy(), expected_b, 1e-5)
    equal(losses, expected_losses, 1e-4)
    for copy in w.values:
        equal(copy.numpy(), expected_w, 1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
        optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 5)),
    ],
    ids=["adam", "momentum", "chain", "multi steps", "schedule"],
)
def test_any_transformation_equals_optax_on_one_device(tx):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    optimizers = []

    def make_step(w, b):
        optimizers.append(rx.Optimizer(tx))
        return lambda gradients: optimizers[0].apply_gradients(zip(gradients, [w, b], strict=True))

    w, b, _ = train(strategy, make_step)
    values = [jnp.zeros((3, 1)), jnp.zeros(1)]
    state = tx.init(values)
    for x, y in BATCHES * EPOCHS:

        def loss(values, x=x, y=y):
            return jnp.sum((x @ values[0] + values[1] - y) ** 2) / len(x)

        updates, state = tx.update(jax.grad(loss)(values), state, values)
        values = optax.apply_updates(values, updates)
    equal(w.numpy(), values[0], 1e-4)
    equal(b.numpy(), values[1], 1e-4)
    slots = optimizers[0].variables[1:]
    for slot, expected in zip(slots, jax.tree.leaves(state), strict=True):
        equal(slot.numpy(), expected, 1e-4)


def test_iterations_and_slots(strategy):
    with strategy.scope():
        w, b = rx.Variable([1.0, 2.0], name="w"), rx.Variable(1.0, name="b")
        optimizer = rx.Optimizer(optax.adam(0.1), name="adam")
    assert int(optimizer.iterations) == 0
    assert optimizer.variables == (optimizer.iterations,)

    def step():
        optimizer.apply_gradients([(jnp.ones(2), w), (jnp.ones(()), b)])

    strategy.run(step)
    strategy.run(step)
    assert int(optimizer.iterations) == 2
    names = [slot.name for slot in optimizer.variables]
    assert names[0] == "adam/iterations"
    assert any("mu" in name and "/b" in name for name in names)
    for slot in optimizer.variables:
        assert strategy.extended.variable_created_in_scope(slot)
        assert [c.device for c in slot.values] == [c.device for c in w.values]
        assert not slot.trainable


def test_in_cross_replica_context_gradients_are_taken_as_they_are(strategy):
    with strategy.scope():
        w = rx.Variable([1.0, 2.0])
        optimizer = rx.Optimizer(optax.sgd(0.5))
        for gradient in (jnp.ones(2), np.float32([1, 1]), strategy.extended.broadcast_to(1.0, w)):
            if jnp.shape(gradient) == (2,):
                optimizer.apply_gradients([(gradient, w)])
    equal(w, [0, 1])


def test_the_order_of_the_pairs_does_not_matter(two):
    with two.scope():
        w, b = rx.Variable([1.0, 2.0]), rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.sgd(1.0))
        optimizer.apply_gradients([(jnp.ones(2), w), (jnp.float32(3), b)])
        optimizer.apply_gradients([(jnp.float32(3), b), (jnp.ones(2), w)])
    equal(w, [-1, 0])
    equal(b, -5.0)


@pytest.mark.parametrize("execution", ["eager"], indirect=True)  # compiled, they cannot differ
def test_replicas_have_to_give_their_pairs_in_one_order(two):
    with two.scope():
        a, b = rx.Variable(0.0, name="a"), rx.Variable(0.0, name="b")
        optimizer = rx.Optimizer(optax.sgd(1.0))

    def step():
        pairs = [(1.0, a), (10.0, b)]
        if rx.get_replica_context().replica_id_in_sync_group == 1:
            pairs.reverse()
        optimizer.apply_gradients(pairs)

    with pytest.raises(rx.errors.CollectiveMismatch, match=r"to 'a', 'b'; .* to 'b', 'a'"):
        two.run(step)
    equal(a, 0.0)


def test_refused_and_nothing_changes(two):
    with two.scope():
        w, b = rx.Variable([1.0, 2.0], name="w"), rx.Variable(1.0, name="b")
        optimizer = rx.Optimizer(optax.sgd(1.0))
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM", name="local")
    outside, late = rx.Variable(1.0), rx.Optimizer(optax.sgd(1.0))
    ones = jnp.ones(2)
    with two.scope():
        for pairs, message in [
            ([], "no gradients"),
            ([(None, w)], "no gradient"),
            ([(ones, ones)], "pairs"),
            ([(jnp.ones(3), w)], r"shape \(2,\), its gradient \(3,\)"),
            ([(ones, w), (ones, w)], "twice"),
            ([(1.0, outside)], "created by no strategy"),
            ([(1.0, local)], "cannot be trained"),
        ]:
            with pytest.raises(ValueError, match=message):
                optimizer.apply_gradients(pairs)
        with pytest.raises(ValueError, match="was created by no strategy"):
            late.apply_gradients([(ones, w)])
        optimizer.apply_gradients([(ones, w)])
        with pytest.raises(ValueError, match="trains 'w', and was given gradients for 'w', 'b'"):
            optimizer.apply_gradients([(ones, w), (1.0, b)])
    with pytest.raises(TypeError, match="wraps an Optax transformation"):
        rx.Optimizer(0.1)
    equal(w, [0, 1])
    assert int(optimizer.iterations) == 1


def test_transformations_with_random_state(two):
    tx = optax.noisy_sgd(0.1, key=jax.random.key(0))
    with two.scope():
        weight = rx.Variable([1.0, 2.0])
        optimizer = rx.Optimizer(tx)
    for _ in range(2):
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), weight)]))
    values, state = jnp.float32([1, 2]), tx.init([jnp.float32([1, 2])])
    for _ in range(2):
        (update,), state = tx.update([jnp.full(2, 2.0)], state, [values])
        values = values + update
    equal(weight, values, 1e-5)


def test_an_optimizer_whose_first_step_failed_can_be_used(two):
    with two.scope():
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        weight = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.adam(0.1))
        with pytest.raises(ValueError, match="cannot be trained"):
            optimizer.apply_gradients([(1.0, local)])
        optimizer.apply_gradients([(1.0, weight)])
    assert int(optimizer.iterations) == 1


# Gradients that have been summed already.


def summed_by_hand(strategy, clip, **arguments):
    """Two steps of "all_reduce, clip, apply"; the weight after them."""
    with strategy.scope():
        weight = rx.Variable(np.float32([0.0, 0.0]), name="weight")
        optimizer = rx.Optimizer(optax.sgd(1.0))

    def replica_step(x):
        (gradient,) = rx.grad(lambda: jnp.sum(x * weight), [weight])()
        total = rx.get_replica_context().all_reduce("SUM", gradient)
        total = jnp.clip(total, -1.5, 1.5) if clip else total
        optimizer.apply_gradients([(total, weight)], **arguments)

    rows = np.float32([[1.0, 0.25]] * strategy.num_replicas_in_sync)
    for _ in range(2):
        strategy.run(replica_step, args=(shares(strategy, rows),))
    for copy in weight.values:
        equal(copy.numpy(), weight.numpy())
    return weight.numpy()


@pytest.mark.parametrize(
    "arguments", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_all_reduce_clip_apply(strategy, arguments):
    count = strategy.num_replicas_in_sync
    total = np.float32([1.0, 0.25]) * count
    equal(summed_by_hand(strategy, False, **arguments), -2 * total)
    equal(summed_by_hand(strategy, True, **arguments), -2 * np.clip(total, -1.5, 1.5))


def test_sums_of_sums_are_warned_of_once(strategy):
    count = strategy.num_replicas_in_sync
    twice = -2 * np.float32([1.0, 0.25]) * count**2
    equal(summed_by_hand(strategy, False, skip_gradients_aggregation=False), twice)
    if count == 1:
        equal(summed_by_hand(strategy, False), twice)
        return
    with pytest.warns(rx.errors.SummedTwice, match="skip_gradients_aggregation=True") as caught:
        equal(summed_by_hand(strategy, False), twice)
    assert len(caught) == 1


def test_words_that_contradict_each_other(two):
    with two.scope():
        weight, optimizer = rx.Variable(1.0), rx.Optimizer(optax.sgd(1.0))
    with two.scope(), pytest.raises(rx.errors.InvalidArgument, match="contradict"):
        optimizer.apply_gradients(
            [(1.0, weight)], skip_gradients_aggregation=True, experimental_aggregate_gradients=True
        )


def test_nests_of_gradients_and_variables(strategy):
    with strategy.scope():
        params = {"w": rx.Variable(np.float32([1.0, 2.0])), "b": [rx.Variable(0.5)]}
        optimizer = rx.Optimizer(optax.sgd(1.0))

    def replica_step():
        optimizer.apply_gradients({"w": jnp.ones(2), "b": [jnp.float32(0.5)]}, params, name="step")

    strategy.run(replica_step)
    count = strategy.num_replicas_in_sync
    equal(params["w"].numpy(), np.float32([1.0, 2.0]) - count)
    equal(params["b"][0].numpy(), 0.5 - 0.5 * count)
    with pytest.raises(rx.errors.StructureMismatch, match="one gradient for each variable"):
        optimizer.apply_gradients({"w": jnp.ones(2)}, params)


def test_minimize_is_gradients_and_apply(strategy, execution):
    with strategy.scope():
        pair = [rx.Variable(np.float32([1.0, 2.0])) for _ in range(2)]
        optimizers = [rx.Optimizer(optax.sgd(0.1)) for _ in range(2)]
    own = per_replica(
        strategy, [np.float32([r + 1, 1]) for r in range(strategy.num_replicas_in_sync)]
    )

    def short(x):
        return optimizers[0].minimize(lambda: jnp.sum(x * pair[0] ** 2), {"w": pair[0]})

    def long(x):
        loss, gradient = rx.value_and_grad(lambda: jnp.sum(x * pair[1] ** 2), pair[1])()
        optimizers[1].apply_gradients([(gradient, pair[1])])
        return loss

    losses = [strategy.run(step, args=(own,)) for step in (short, long)]
    components_equal(
        strategy,
        losses[0],
        [np.sum([r + 1, 1] * np.float32([1, 4])) for r in range(strategy.num_replicas_in_sync)],
    )
    equal(pair[0].numpy(), pair[1].numpy())
    with pytest.raises(TypeError, match=r"there is no tape; got .*shape \(\) and dtype float32: 1"):
        optimizers[0].minimize(jnp.float32(1.0), pair)


def test_a_constraint_is_applied_to_what_the_optimizer_makes(strategy, execution):
    with strategy.scope():
        free = rx.Variable(np.float32([0.5, 2.0]))
        positive = rx.Variable(
            np.float32([0.5, 2.0]), constraint=lambda value: jnp.maximum(value, 0.0)
        )
        optimizer = rx.Optimizer(optax.sgd(1.0 / strategy.num_replicas_in_sync))
    assert free.constraint is None

    def replica_step():
        gradient = jnp.float32([1.0, 1.0])
        optimizer.apply_gradients([(gradient, free), (gradient, positive)])

    strategy.run(replica_step)
    equal(free.numpy(), [-0.5, 1.0])
    equal(positive.numpy(), [0.0, 1.0])
    assert positive.get_shape() == positive.shape == (2,)
    with pytest.raises(TypeError, match="`constraint` must be a function"):
        rx.Variable(1.0, constraint="positive")
