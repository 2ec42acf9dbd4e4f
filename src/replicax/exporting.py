"""`rx.export`: a trained function as a file that JAX alone can load and call."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.dtypes import canonicalize_dtype

from replicax import _bridges, _context, _nest, cluster
from replicax._context import ContextKind, Frame
from replicax._enums import ReduceOp, VariableAggregation
from replicax._typing import Nest, State
from replicax.collectives import (
    Collectives,
    CommunicationOptions,
    reduction_of,
    require_numeric,
)
from replicax.errors import ContextError, ExportFailed, InvalidArgument, InvalidType
from replicax.execution import Executor, Function, FunctionOfInstance
from replicax.topology import Topology
from replicax.values import DistributedValues, Mirrored, PerReplica, is_numeric
from replicax.variables import Variable, storage_of, stored_value

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.input import DistributedIterator

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    function: Callable[..., object],
    path: str | os.PathLike[str],
    *args: Nest,
    input_signature: Sequence[Nest] | None = None,
    platforms: Sequence[str] | None = None,
) -> jax_export.Exported:
    """Write a function to a file that JAX alone can load and call.

    The file contains the program of the function on one device, as `function(*args)` outside of
    every scope would compute it, with the values that variables have now. Load and call it with
    `jax.export.deserialize(Path(path).read_bytes()).call(...)`. All workers call this together;
    the first one writes, and all return when the file is complete.

    Args:
      function: An `rx.function` or any other function of arrays that writes no variables and runs
        nothing on replicas, such as the forward pass. A Keras model or an NNX module will do.
      path: The file. An existing one is replaced atomically.
      *args: Example arguments, or a `jax.ShapeDtypeStruct` in place of each array.
      input_signature: The arguments as one sequence; by default the signature of the `rx.function`.
        A size that may change from call to call, such as that of a batch, is a symbol of
        `jax.export.symbolic_shape`.
      platforms: The platforms of the program: "cpu", "cuda", "rocm", "tpu". By default the
        one in use.

    Returns:
      The exported program, a `jax.export.Exported`.

    >>> import jax, jax.numpy as jnp, pathlib, tempfile, replicax as rx
    >>> with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    ...     weight = rx.Variable([1.0, 2.0])
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model")
    >>> rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 2"), jnp.float32)
    >>> _ = rx.export(lambda x: x @ weight.value, path, rows)
    >>> jax.export.deserialize(path.read_bytes()).call(jnp.ones((3, 2)))
    Array([3., 3., 3.], dtype=float32)
    """
    called, name, signature = _taken(function, args, input_signature)
    target = _target(path)
    _require_platforms(platforms)
    _require_outside()
    _bridges.load()
    specs = _specs(signature, name)
    jitted = jax.jit(_pure(called, name))
    jitted.trace(*specs)  # raises errors of the function itself, before those of exporting it
    try:
        exported = jax_export.export(jitted, platforms=platforms)(*specs)
    except NotImplementedError as error:
        raise InvalidArgument(
            f"`{name}` cannot be exported: {error}. It must not call back into Python, as "
            "`jax.debug.print` and `jax.pure_callback` do."
        ) from error
    try:
        written = exported.serialize()
    except ValueError as error:
        raise InvalidType(
            f"`{name}` cannot be exported: {error} Take and return arrays in tuples, lists and "
            "dictionaries."
        ) from error
    _write_together(target, written, name)
    return exported


def _taken(
    function: object, args: tuple[Nest, ...], input_signature: Sequence[Nest] | None
) -> tuple[Callable[..., Any], str, tuple[Nest, ...]]:
    """Return the function, its name, and its arguments."""
    called: Any = function
    declared = None
    if isinstance(function, Function):
        called, declared = function.python_function, function.input_signature
    elif isinstance(function, FunctionOfInstance):
        called = function.function.python_function.__get__(function.instance)
    if not callable(called):
        raise InvalidType(
            f"`rx.export` exports a function; got {_kind(function)}. Pass the function, then the "
            "path, then its arguments."
        )
    name = getattr(called, "__name__", type(called).__name__)
    if args and input_signature is not None:
        raise InvalidArgument(
            f"`rx.export` of `{name}` got example arguments and an `input_signature`. Give one."
        )
    if input_signature is not None and not isinstance(input_signature, (list, tuple)):
        raise InvalidType(
            f"`input_signature` of `rx.export` of `{name}` must be a list or tuple, with one entry "
            f"for each argument; got {_kind(input_signature)}."
        )
    signature = args or (declared if input_signature is None else tuple(input_signature))
    if signature is None:
        raise InvalidArgument(
            f"`rx.export` of `{name}` needs the arguments of the function. Pass example "
            "arguments after the path, or `input_signature=[jax.ShapeDtypeStruct(...)]`; for a "
            "function without arguments, `input_signature=[]`."
        )
    return called, name, tuple(signature)


def _target(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"`path` of `rx.export` must be the name of a file; got {_kind(path)}.")
    text = os.fspath(path)
    if "://" in text or not text or Path(text).is_dir():
        raise InvalidArgument(
            f"`path` of `rx.export` must name a file of this machine, or mounted there; got "
            f"{text!r}."
        )
    target = Path(text).absolute()
    if target.exists() and not target.is_file():  # a device, which would be replaced by a file
        raise InvalidArgument(
            f"`path` of `rx.export` must name a file; {text!r} is something else."
        )
    return target


def _require_platforms(platforms: Sequence[str] | None) -> None:
    if platforms is None:
        return
    if isinstance(platforms, str) or not platforms or not set(platforms) <= set(_PLATFORMS):
        raise InvalidArgument(
            f"`platforms` of `rx.export` must be one or more of {_PLATFORMS}, in a tuple; got "
            f"{platforms!r}."
        )


def _require_outside() -> None:
    frame = _context.current()
    if frame.program is not None or frame.overlay is not None:
        raise ContextError(
            "`rx.export` was called while a function is traced or differentiated, where variables "
            "have no numbers. Call it outside."
        )
    if frame.kind is not ContextKind.CROSS_REPLICA and frame.strategy is not None:
        raise ContextError(
            f"`rx.export` is for all replicas together. Current context: {frame}. Call it outside "
            "the function given to `run`."
        )


def _specs(signature: tuple[Nest, ...], name: str) -> tuple[Nest, ...]:
    """Return the arguments as shapes and dtypes; refuse anything but arrays."""
    found, structure = jax.tree_util.tree_flatten_with_path(signature)
    for at, leaf in found:
        ours = isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array))
        if not ours and not (isinstance(leaf, (np.ndarray, np.generic)) and is_numeric(leaf.dtype)):
            raise InvalidType(
                f"`rx.export` of `{name}` takes arrays, or a `jax.ShapeDtypeStruct` for each; got "
                f"{_kind(leaf)} as argument {jax.tree_util.keystr(at)}. Bind other values first, "
                "with `functools.partial`; variables need not be given."
            )
    specs = [
        jax.ShapeDtypeStruct(leaf.shape, canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))
        for _, leaf in found
    ]
    return jax.tree.unflatten(structure, specs)


def _pure(function: Callable[..., object], name: str) -> Callable[..., Nest]:
    """Return the function for JAX to trace: variables are constants, and none may be written."""

    def called(*args: Nest) -> Nest:
        return function(*args)

    def pure(*args: Nest) -> Nest:
        with _context.entered(Frame(program=_OnOneDevice(name))):
            return _arrays(_bridges.surrounded(called)(*args), name)

    pure.__name__ = pure.__qualname__ = name
    return pure


def _arrays(result: Nest, name: str) -> Nest:
    """Return the result as arrays; refuse anything else."""
    leaves, structure = _nest.flatten(result)
    arrays = []
    for leaf in leaves:
        leaf = leaf.value if isinstance(leaf, Variable) else leaf
        if isinstance(leaf, DistributedValues) or not isinstance(
            leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
        ):
            raise InvalidType(
                f"`{name}` cannot be exported: it returned {_kind(leaf)}. Return arrays, in "
                "tuples, lists and dictionaries."
            )
        arrays.append(jnp.asarray(leaf))
    result = jax.tree.unflatten(structure, arrays)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result)):
        raise InvalidType(
            f"`{name}` cannot be exported: it returned {_kind(result)}, which JAX does not know as "
            "a container. Return arrays, in tuples, lists and dictionaries."
        )
    return result


def _kind(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")


def _write_together(path: Path, content: bytes | bytearray, name: str) -> None:
    """Write the file on the first worker, and tell all workers the outcome."""
    session = cluster.session()
    failure: OSError | None = None
    if session is None or session.members.index == 0:
        try:
            _write(path, content)
        except OSError as error:
            failure = error
    news = None if failure is None else f"{path}: {type(failure).__name__}: {failure}"
    if session is not None:
        news = session.all_gather(f"the export of `{name}`", news)[0]
    if news is not None:
        error = ExportFailed(
            f"The export of `{name}` could not be written to {news}. What was there before is as "
            "it was; export again when the cause is removed."
        )
        error.follows_another = failure is None
        raise error from failure


def _write(path: Path, content: bytes | bytearray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@final
class _OnOneDevice:
    """The program of an export while it is traced: the value of `Frame.program`.

    Variables are constants in it. Anything that one device without replicas cannot do is refused.
    """

    inside = False
    is_first_pass = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: dict[Variable, jax.Array] = {}
        self._topology: Topology | None = None

    def state_of(self, variable: Variable) -> State:
        """Return a state from which every read gives the variable's value."""
        if variable not in self._values:
            with jax.ensure_compile_time_eval():
                value = stored_value(variable)
                # The one device holds the whole value, even that of a divided variable.
                self._values[variable] = jax.device_put(value, jax.local_devices()[0])
        return storage_of(variable).wrap(self._values[variable], None, inside=True)

    def set_state_of(self, variable: Variable, state: object) -> NoReturn:
        self.refuse(
            f"writes to variable {variable.name!r} (shape {variable.shape}, dtype "
            f"{variable.dtype}), which is a constant there. Export a function that only reads "
            "variables, such as the forward pass of a model"
        )

    def skips_computing(self) -> bool:
        return False

    def note(self, topology: Topology) -> None:
        self._topology = topology

    def note_layout(self, array: jax.Array, sharding: object) -> None:
        pass  # there are no replicas over which it could be divided

    def is_split(self, value: object, topology: Topology) -> bool:
        return False

    @property
    def collectives(self) -> Collectives:
        assert self._topology is not None  # a strategy calls `note` before it asks for these
        return _WithoutReplicas(self, self._topology)

    @property
    def executor(self) -> Executor:
        return _RefusingExecutor(self)

    def next_element(self, iterator: DistributedIterator) -> NoReturn:
        self.loop()

    def loop(self) -> NoReturn:
        self.refuse("reads a distributed dataset. Export a function of one batch")

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        receive(value)

    def refuse(self, reason: str) -> NoReturn:
        raise InvalidArgument(
            f"`{self._name}` cannot be exported as a program for one device: it {reason}."
        )


@final
class _RefusingExecutor(Executor):
    def __init__(self, program: _OnOneDevice) -> None:
        self._program = program

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> NoReturn:
        self._program.refuse(
            f"runs a function on the replicas of {strategy!r}. Export the function that it gives "
            "to `run`"
        )


@final
class _WithoutReplicas(Collectives):
    """The collectives that remain on one device: those of a single replica."""

    def __init__(self, program: _OnOneDevice, topology: Topology) -> None:
        self._program, self._topology = program, topology

    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        return [self.as_mirrored(self._reduced(op, value)) for value in values]

    def reduce_scatter(
        self, op: ReduceOp, values: Sequence[PerReplica], axis: int, options: CommunicationOptions
    ) -> list[PerReplica]:
        return [self.distribute([self._reduced(op, value)]) for value in values]

    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        return self.as_mirrored(self._only(value))

    def broadcast(self, value: PerReplica) -> Mirrored:
        return self.as_mirrored(self._only(value))

    def mirror(self, value: object) -> Mirrored:
        return value if isinstance(value, Mirrored) else self.as_mirrored(jnp.asarray(value))

    def as_mirrored(self, array: jax.Array) -> Mirrored:
        return Mirrored.from_array(array, self._topology, inside=True)

    def distribute(self, values: Sequence[object]) -> PerReplica:
        return PerReplica.from_array(jnp.asarray(values[0]), self._topology, inside=True)

    def aggregate(self, aggregation: VariableAggregation, value: PerReplica) -> Mirrored:
        return self.as_mirrored(value.component(0))  # the state of a variable is its value here

    def _reduced(self, op: ReduceOp, value: PerReplica) -> jax.Array:
        reduction = reduction_of(op)
        require_numeric(value, f"reduce {op.value}", reduction)
        array = self._only(value)
        return array.astype(reduction.dtype(array.dtype))

    def _only(self, value: PerReplica) -> jax.Array:
        if self._topology.num_replicas > 1:
            self._program.refuse(
                f"combines values of {self._topology.num_replicas} replicas. Export a function "
                "that uses no collectives"
            )
        return jnp.asarray(value.component(0))
