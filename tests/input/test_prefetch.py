"""The thread that works ahead: how far, what it passes on, and that it ends."""

from __future__ import annotations

import contextlib
import gc
import inspect
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from pipelines import Rows, shares_of

import replicax as rx
from replicax.input import _prefetch


def input_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("replicax", "grain"))]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.002)


class Batches:
    """Counts what is pulled."""

    def __init__(self, count: int = 1000) -> None:
        self.pulled = 0
        self._count = count

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(self._count):
            self.pulled += 1
            yield np.full(2, number, np.float32)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_elements_are_made_ahead_and_not_further(two, depth):
    batches = Batches()
    options = rx.InputOptions(experimental_per_replica_buffer_size=depth)
    iterator = iter(two.experimental_distribute_dataset(batches, options))
    time.sleep(0.05)
    assert batches.pulled == 0, "nothing is read before somebody wants an element"
    for taken in range(1, 4):
        next(iterator)
        # `depth` ready on the devices, and two in the memory of the host.
        wait_until(lambda taken=taken: batches.pulled == taken + depth + 2, "work ahead")
    time.sleep(0.1)
    assert batches.pulled == 3 + depth + 2
    iterator.close()
    wait_until(lambda: not input_threads(), "the threads to end")


def test_an_error_comes_at_its_element_with_its_traceback(two):
    def broken_pipeline():
        yield np.zeros(2)
        yield np.ones(2)
        raise ArithmeticError("broken row")

    iterator = iter(two.experimental_distribute_dataset(broken_pipeline))
    assert shares_of(two, [next(iterator), next(iterator)]) == [[[0], [0]], [[1], [1]]]
    state = iterator.get_state()
    for _ in range(2):  # and no StopIteration afterwards, which would look like the end
        with pytest.raises(ArithmeticError, match="broken row") as caught:
            next(iterator)
        assert "broken_pipeline" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert iterator.get_state() == state
    wait_until(lambda: not input_threads(), "the threads to end")


def test_an_error_in_a_grain_pipeline_comes_at_its_element(two):
    import grain

    def parse(row):
        if row == 5:
            raise ArithmeticError("broken row")
        return row

    dataset = grain.MapDataset.source(Rows(np.arange(12))).map(parse).batch(2)
    iterator = iter(two.experimental_distribute_dataset(dataset))
    assert shares_of(two, [next(iterator), next(iterator)]) == [[[0], [1]], [[2], [3]]]
    with pytest.raises(ArithmeticError, match="broken row") as caught:
        next(iterator)
    assert "in parse" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_a_batch_that_cannot_be_divided_is_an_error_at_its_element(two):
    batches = [(np.zeros(4), np.zeros(4)), (np.zeros(4), np.zeros(3))]
    iterator = iter(two.experimental_distribute_dataset(batches))
    next(iterator)
    with pytest.raises(rx.errors.ShapeMismatch, match=r"\[0\]: \(4,\), \[1\]: \(3,\)"):
        next(iterator)


@pytest.mark.parametrize("kind", ["dropped", "in a cycle", "closed", "exhausted", "failed loop"])
def test_no_thread_and_no_memory_is_left(two, kind):
    batches = Batches(5 if kind == "exhausted" else 1000)
    dataset = two.experimental_distribute_dataset(batches)
    iterator = iter(dataset)
    elements = [weakref.ref(next(iterator)) for _ in range(2)]
    assert input_threads()
    if kind == "dropped":
        del iterator
    elif kind == "in a cycle":
        cycle = [iterator]
        cycle.append(cycle)
        del iterator, cycle
        gc.collect()
    elif kind == "closed":
        iterator.close()
        with pytest.raises(ValueError, match="has been closed"):
            next(iterator)
    elif kind == "exhausted":
        assert len(list(iterator)) == 3
    else:

        def loop():
            for step, _ in enumerate(dataset):
                if step == 3:
                    raise KeyError("in the loop")

        with pytest.raises(KeyError):
            loop()
        del iterator
    wait_until(lambda: not input_threads(), "the thread to end")
    assert all(element() is None for element in elements)
    pulled = batches.pulled
    time.sleep(0.02)
    assert batches.pulled == pulled


class Large:
    """Stands for what a caller holds while it takes elements."""


def taken_by_a_loop(dataset):
    for _ in dataset:
        pass


def taken_one_by_one(dataset):
    iterator = iter(dataset)
    with contextlib.suppress(StopIteration):
        while True:
            next(iterator)


def taken_beyond_the_end(dataset):
    iterator = iter(dataset)
    while iterator.get_next_as_optional().has_value():
        pass
    assert next(iterator, None) is None
    assert not list(iterator)


def taken_in_a_function(dataset):
    iterator = iter(dataset)
    with contextlib.suppress(StopIteration):
        while True:
            taken_by_the_function(iterator)


@rx.function
def taken_by_the_function(iterator):
    return next(iterator)


@rx.function
def taken_by_a_loop_in_a_function(dataset):
    for _ in dataset:
        pass


PASSES = [
    taken_by_a_loop,
    taken_one_by_one,
    taken_beyond_the_end,
    taken_in_a_function,
    taken_by_a_loop_in_a_function,
]


@pytest.mark.parametrize("take_all", PASSES, ids=lambda way: way.__name__)
def test_a_pass_to_the_end_keeps_nothing_of_the_caller(two, take_all):
    dataset = two.experimental_distribute_dataset(Batches(2))

    def call() -> weakref.ref[Large]:
        large = Large()
        take_all(dataset)
        return weakref.ref(large)

    call()
    gc.collect()
    gc.disable()  # which holds no less for callers who cannot wait for the garbage collector
    try:
        kept = [call() for _ in range(25)]
        assert [reference() for reference in kept] == [None] * 25
    finally:
        gc.enable()


def test_a_pass_that_fails_keeps_nothing_of_the_caller(two):
    def batches():
        yield np.zeros(2)
        raise ArithmeticError("broken row")

    dataset = two.experimental_distribute_dataset(batches)

    def call() -> weakref.ref[Large]:
        large = Large()
        iterator = iter(dataset)
        next(iterator)
        depths = []
        for _ in range(3):
            with pytest.raises(ArithmeticError) as caught:
                next(iterator)
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(depths)) == 1, "an error that is raised again does not collect frames"
        return weakref.ref(large)

    kept = [call() for _ in range(25)]
    gc.collect()
    assert [reference() for reference in kept] == [None] * 25


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_the_memory_of_a_thousand_passes_is_flat():
    done = run_to_its_end(
        """
        import gc, resource, numpy as np, replicax as rx

        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        distribute = strategy.experimental_distribute_dataset
        batches = [np.zeros(2, np.float32)] * 2
        datasets = [distribute(batches), distribute(lambda: iter(batches)),
                    distribute(rx.from_tensor_slices(np.zeros(4, np.float32)).batch(2))]

        @rx.function
        def step(iterator):
            return strategy.run(lambda x: 2 * x, args=(next(iterator),))

        def train(number):
            local = np.ones(25_000)
            dataset = datasets[number % 3]
            if number % 2:
                for element in dataset:
                    pass
            else:
                iterator = iter(dataset)
                try:
                    while True:
                        step(iterator)
                except StopIteration:
                    pass

        def measured():
            gc.collect()
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            return pages * resource.getpagesize(), len(gc.get_objects())

        for number in range(100):
            train(number)
        before = measured()
        for number in range(1000):
            train(number)
        after = measured()
        print(*(100 * (now / then - 1) for then, now in zip(before, after)))
        """
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert all(float(growth) < 1 for growth in done.stdout.split()), done.stdout


def test_a_generator_is_closed_with_its_iterator(two):
    closed = []

    def batches():
        try:
            while True:
                yield np.zeros(2)
        finally:
            closed.append(threading.current_thread().name)

    iterator = iter(two.experimental_distribute_dataset(batches))
    next(iterator)
    iterator.close()
    wait_until(lambda: bool(closed), "the generator to be closed")
    assert closed == ["replicax-input"]


def test_the_dataset_does_not_keep_elements(two):
    class Memory:
        """Gives NumPy its memory, so that it can be seen when that is not used any more."""

        def __init__(self):
            self.bytes = bytearray(1000)
            self.__array_interface__ = np.frombuffer(self.bytes, np.uint8).__array_interface__

    alive: list[weakref.ref[Memory]] = []

    def batches():
        for _ in range(20):
            memory = Memory()
            alive.append(weakref.ref(memory))
            yield np.asarray(memory)

    kept = []
    for element in two.experimental_distribute_dataset(batches):
        kept.append(element)  # a copy on the devices
        assert sum(memory() is not None for memory in alive) <= 5
    assert len(kept) == len(alive) == 20


def test_a_source_that_uses_its_memory_again_does_no_harm(two):
    memory = np.zeros((4, 64), np.float32)

    def batches():
        for number in range(50):
            memory[:] = number
            yield memory

    options = rx.InputOptions(experimental_per_replica_buffer_size=8)
    elements = list(two.experimental_distribute_dataset(batches, options))
    for number, element in enumerate(elements):
        assert all((np.asarray(part) == number).all() for part in element.values)


def run_to_its_end(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_interpreter_ends_with_an_iterator_under_way():
    done = run_to_its_end(
        """
        import itertools, threading, time, numpy as np, replicax as rx
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        options = rx.InputOptions(experimental_per_replica_buffer_size=4)
        dataset = strategy.experimental_distribute_dataset(
            lambda: (np.zeros((256, 256)) for _ in itertools.count()), options)
        iterators = [iter(dataset) for _ in range(3)]
        for iterator in iterators:
            next(iterator)
        print("done")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_interpreter_ends_though_the_source_blocks():
    start = time.monotonic()
    done = run_to_its_end(
        """
        import threading, numpy as np, replicax as rx
        def batches():
            yield np.zeros(2)
            threading.Event().wait()
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        next(iterator)
        print("done")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert time.monotonic() - start < 30


def test_a_failed_loop_shows_its_error_only():
    done = run_to_its_end(
        """
        import itertools, numpy as np, replicax as rx
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        for x in strategy.experimental_distribute_dataset(
                lambda: (np.zeros(4) for _ in itertools.count())):
            raise KeyError("in the loop")
        """
    )
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'in the loop'\n")
    assert done.stderr.count("Traceback") == 1


def test_a_long_wait_says_for_what(two, monkeypatch):
    monkeypatch.setattr(_prefetch, "_LONG", 0.1)

    def slow_pipeline():
        time.sleep(0.35)
        yield np.zeros(2)

    iterator = iter(two.experimental_distribute_dataset(slow_pipeline))
    with pytest.warns(rx.errors.PerformanceHint, match=r"in slow_pipeline(.|\n)*time.sleep"):
        next(iterator)
    iterator.close()


def test_the_users_code_runs_outside_of_every_scope(two):
    seen = []

    def batches():
        seen.append(rx.has_strategy())
        yield np.zeros(2)

    with two.scope():
        list(two.experimental_distribute_dataset(batches))
    assert seen == [False]


def test_two_iterators_in_two_threads(two):
    dataset = two.experimental_distribute_dataset(Batches(200))
    results: list[list[float]] = []

    def consume():
        results.append([float(two.gather(x, axis=0)[0]) for x in dataset])

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[float(i) for i in range(200)]] * 2


@pytest.mark.parametrize("failing", [False, True])
def test_the_interpreter_ends_with_a_source_that_uses_jax(failing):
    done = run_to_its_end(
        f"""
        import jax.numpy as jnp, numpy as np, replicax as rx
        def batches():
            while True:
                yield np.asarray(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        for _ in range(20):
            next(iterator)
        if {failing}:
            raise ValueError("of the program")
        """
    )
    assert done.returncode == int(failing), done.stderr
    assert done.stderr.endswith("ValueError: of the program\n" if failing else "")
    assert "FATAL" not in done.stderr


def test_each_element_goes_to_one_of_several_threads(two):
    iterator = iter(two.experimental_distribute_dataset(Batches(300)))
    taken: list[float] = []

    def consume():
        for element in iterator:
            taken.append(float(element.values[0][0]))

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == list(range(300))
    assert iterator.get_state()["steps"] == 300


def test_closing_while_another_thread_waits(two):
    waiting, end = threading.Event(), threading.Event()

    def batches():
        waiting.set()
        end.wait()
        yield np.zeros(2)

    iterator = iter(two.experimental_distribute_dataset(batches))
    errors: list[BaseException] = []

    def consume():
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    waiting.wait(10)
    start = time.monotonic()
    iterator.close()
    thread.join(10)
    assert time.monotonic() - start < 4
    end.set()
    assert [type(error) for error in errors] == [rx.errors.InvalidArgument]
    assert "was closed" in str(errors[0])


def test_shuffled_arrays_go_with_their_dataset():
    dataset = rx.from_tensor_slices(np.arange(6)).shuffle(seed=1)
    next(iter(dataset.batch(3)))
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None
