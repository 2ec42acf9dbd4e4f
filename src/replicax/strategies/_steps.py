"""Several steps on an iterator, with one call."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax import _context, _nest
from replicax._context import ContextKind, Frame
from replicax._enums import ReduceOp, ReduceOpLike
from replicax._typing import Nest
from replicax.errors import ContextError, InvalidArgument, InvalidType
from replicax.execution import (
    Element,
    Executor,
    Function,
    FunctionOfInstance,
    NotOneProgram,
    require_call,
    runs_as_python,
)
from replicax.input import DistributedIterator, require_iterator
from replicax.values import DistributedValues

if TYPE_CHECKING:
    from replicax.strategies._strategy import Strategy

_METHOD = "experimental_run_steps_on_iterator"
StepFunction = Callable[["MultiStepContext", Nest], object]
StepOutputs = tuple[dict[str, Nest], "_Untouched"]


@final
class MultiStepContext:
    """The outputs of the steps of `experimental_run_steps_on_iterator`, apart from updates.

    The function of a step gets one, and puts the step's outputs in it. The call returns that of the
    last step.
    """

    run_op = None
    """The operation to run after the call: None, as there are no sessions."""

    def __init__(self, strategy: Strategy, initial: Mapping[str, Nest]) -> None:
        self._strategy = strategy
        self._in_program = _context.current().program is not None
        self._last_step_outputs: dict[str, Nest] = dict(initial)
        self._non_tensor_outputs: dict[str, object] = {}

    @property
    def last_step_outputs(self) -> dict[str, Nest]:
        """The outputs passed to `set_last_step_output` in the last step, by name."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs passed to `set_non_tensor_output` in the last step, by name."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: Nest, reduce_op: ReduceOpLike | None = None
    ) -> None:
        """Set an output of arrays, or a nest of them, to be kept if this is the last step.

        Args:
          name: The name of the output.
          output: A replica's own value, if called by a replica; otherwise, for example, what `run`
            returned.
          reduce_op: How to combine the replicas' values. Required if called by a replica.
        """
        frame = self._checked_frame(name)
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        if op is None and frame.kind is ContextKind.REPLICA:
            raise InvalidArgument(
                f"`set_last_step_output({name!r}, ...)` was called by a replica without a "
                "`reduce_op`. Say how the replicas' values are combined, for example by "
                "`reduce_op='SUM'`."
            )

        def keep(strategy: Strategy, output: Nest) -> None:
            if op is not None:
                output = strategy.reduce(op, output, axis=None)
            self._last_step_outputs[name] = output

        if frame.program is not None:
            frame.program.hand_out(output, functools.partial(keep, self._strategy))
        elif frame.kind is ContextKind.REPLICA and frame.replica is not None:
            frame.replica.merge(f"set_last_step_output({name!r})", keep, (output,))
        else:
            keep(self._strategy, output)

    def set_non_tensor_output(self, name: str, output: object) -> None:
        """Set any other output; from replicas, a tuple of theirs, or of one if all are the same."""
        frame = self._checked_frame(name)

        def keep(strategy: Strategy, output: object) -> None:
            if frame.program is not None and _has_arrays(output):
                raise InvalidType(
                    f"`set_non_tensor_output({name!r}, ...)` got arrays of a compiled function, "
                    f"which have no numbers yet: {output!r}. Use `set_last_step_output`."
                )
            if frame.kind is ContextKind.REPLICA:
                output = strategy.experimental_local_results(output)
            self._non_tensor_outputs[name] = output

        if frame.kind is ContextKind.REPLICA and frame.replica is not None:
            frame.replica.merge_call(keep, (output,))
        else:
            keep(self._strategy, output)

    def _checked_frame(self, name: str) -> Frame:
        frame = _context.current()
        if not isinstance(name, str):
            raise InvalidType(f"The name of an output must be a string; got {name!r}.")
        if self._in_program != (frame.program is not None):
            raise ContextError(
                f"Output {name!r} of a step was set in a compiled function that is part of the "
                "step, where it has no number yet. Make the step itself an `rx.function`, or "
                "return the value and set it in the step."
            )
        return frame

    def __repr__(self) -> str:
        names = [*self._last_step_outputs, *self._non_tensor_outputs]
        return f"<MultiStepContext with {', '.join(map(repr, names)) or 'no outputs'}>"


@final
class StepRunner:
    """Steps on an iterator, run as a loop in Python or, given an `rx.function`, as one program."""

    def __init__(self, strategy: Strategy, executor: Executor) -> None:
        self._strategy = strategy
        self._executor = executor

    def run(
        self,
        fn: Callable[..., Nest],
        iterator: DistributedIterator,
        iterations: int,
        initial_loop_values: Mapping[str, Nest] | None,
    ) -> MultiStepContext:
        frame = _context.cross_replica(self._strategy, _METHOD)
        require_call(_METHOD, fn, ())
        require_iterator(iterator)
        count, initial = _checked(iterations, initial_loop_values)
        context = MultiStepContext(self._strategy, initial)
        if count == 0:
            return context
        bound: tuple[Any, ...] = ()
        if isinstance(fn, FunctionOfInstance):
            fn, bound = fn.function, (fn.instance,)
        elif not isinstance(fn, Function):
            fn = self._executor.prepared(fn)
        if isinstance(fn, Function) and fn.input_signature is not None:
            raise InvalidArgument(
                f"{fn!r} has an `input_signature`, which cannot say what a context is. Leave it "
                "out: the elements of the iterator have their shapes."
            )
        with _context.entered(frame):
            if isinstance(fn, Function) and not runs_as_python(frame):
                outputs, others = self._program(fn)(bound, iterator, count)
            else:
                step = fn.python_function if isinstance(fn, Function) else fn
                outputs, others = self._loop(functools.partial(step, *bound), iterator, count)
        context.last_step_outputs.update(outputs)
        context.non_tensor_outputs.update(others.value)
        return context

    def _loop(self, step: StepFunction, iterator: DistributedIterator, count: int) -> StepOutputs:
        context = MultiStepContext(self._strategy, {})
        for done in range(count):
            try:
                inputs = next(iterator)
            except StopIteration:
                raise StopIteration(
                    f"The iterator was at its end after {done} of {count} steps, which have been "
                    "run. Ask for fewer iterations, or give it a dataset with `repeat()`."
                ) from None
            context = MultiStepContext(self._strategy, {})
            step(context, inputs)
        return context.last_step_outputs, _Untouched(context.non_tensor_outputs)

    def _program(self, fn: Function) -> Function:
        """Return the steps as one function, kept as long as the user keeps the step's."""
        return fn._inner.compiled(self._steps_of(fn.python_function))

    def _steps_of(self, python_function: Callable[..., object]) -> Callable[..., StepOutputs]:
        @functools.wraps(python_function)
        def steps(
            bound: tuple[object, ...], iterator: DistributedIterator, count: int
        ) -> StepOutputs:
            step = functools.partial(python_function, *bound)
            if _context.current().program is None:  # replicas' shapes differ, or too few elements
                return self._loop(step, iterator, count)
            elements = [Element(next(iterator)) for _ in range(count)]
            outputs: StepOutputs = {}, _Untouched({})
            # A smaller last element, say, ends one scan and begins another.
            for _, alike in itertools.groupby(elements, key=lambda element: element.key):
                outputs = self._scan(step, list(alike))
            return outputs

        return steps

    def _scan(self, step: StepFunction, elements: Sequence[Element]) -> StepOutputs:
        """Run steps on elements of the same shapes; only the last step's outputs are kept."""
        found: list[tuple[Element, _Untouched]] = []

        def body(arrays: Sequence[object]) -> list[Any]:
            context = MultiStepContext(self._strategy, {})
            step(context, elements[0].rebuild(arrays))
            outputs = Element(context.last_step_outputs)
            found.append((outputs, _Untouched(context.non_tensor_outputs)))
            if outputs.arrays is None:
                raise NotOneProgram
            return outputs.arrays

        columns = [element.arrays or [] for element in elements]
        if len(elements) == 1:
            arrays = body(columns[0])
        else:
            begin = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(body, columns[0])]
            stacked = [jnp.stack(column) for column in zip(*columns, strict=True)]
            arrays, _ = jax.lax.scan(
                lambda _, arrays: (body(arrays), None), begin, stacked, length=len(elements)
            )
        outputs, others = found[-1]
        return outputs.rebuild(arrays), others


class _Untouched:
    """A result that a compiled function returns unchanged, not as arrays."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value


def _has_arrays(nest: Nest) -> bool:
    return any(isinstance(leaf, (Tracer, DistributedValues)) for leaf in _nest.leaves(nest))


def _checked(iterations: Any, initial_loop_values: Any) -> tuple[int, Mapping[str, Nest]]:
    try:
        count = operator.index(iterations)
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidArgument(
            f"`iterations` of `{_METHOD}` must be a whole number of steps; got {iterations!r}."
        )
    if initial_loop_values is not None and not isinstance(initial_loop_values, Mapping):
        raise InvalidType(
            "`initial_loop_values` must be a mapping of the names of outputs to values; got "
            f"{initial_loop_values!r}."
        )
    return count, initial_loop_values or {}
