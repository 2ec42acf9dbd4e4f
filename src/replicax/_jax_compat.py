"""Everything that depends on JAX's version or on its private parts.

Tested with JAX 0.10.1 and 0.12.0.1; code that differs between versions says which one it is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl
from jax._src.interpreters.partial_eval import DynamicJaxprTracer
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import utils as _utils  # pyright: ignore[reportPrivateImportUsage]
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, get_opaque_trace_state

from replicax.errors import InvalidArgument

_P = ParamSpec("_P")
_T = TypeVar("_T")


def thread_configuration() -> Callable[[], AbstractContextManager[None]]:
    """Capture this thread's settings from JAX context managers, for another thread to enter.

    Why: `jax.default_matmul_precision("highest")`, `jax.enable_x64()`, `jax.disable_jit()` and
    the like are thread-local. A replica that runs on a thread of ours must compute under the
    settings of the thread that called `run`, and JAX has no public way to carry them over.
    """
    unset = _config.config_ext.unset
    captured: list[tuple[Any, Any]] = [
        (state, value)
        for state in _config.config_states.values()
        if (value := state.get_local()) is not unset
    ]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state, value in captured:
                stack.enter_context(state(value))
            yield

    return entered


_started_at: list[str] = []


def backends_are_initialized() -> bool:
    """Tell whether JAX has looked for devices. Public functions would make it look."""
    return _xla_bridge.backends_are_initialized()


def note_where_backend_starts() -> None:
    """Remember which line of the program makes JAX look for devices, for a message.

    Why: workers must connect before that, and JAX says only that it is too late.
    """
    if not backends_are_initialized():
        _xla_bridge.register_backend_factory("cpu", _noting_cpu_client, priority=0)


def backend_started_at() -> str:
    """Return the lines that made JAX look for devices, if they were noted."""
    return "".join(_started_at)


def make_cpu_collectives(host: str) -> object:
    """Make Gloo listen on `host`, an address of this machine.

    Why: by default it listens on the address of the machine's own name, which exposes a loopback
    cluster to the network, and in a container or a network namespace may be unreachable. JAX has
    the parameter, but no setting for it. Call this after `jax.distributed.initialize`. Gloo listens
    from now on, but does not connect before the first collective.
    """
    return _jax.make_gloo_tcp_collectives(
        distributed_client=_distributed.global_state.client, hostname=host
    )


def use_cpu_collectives(collectives: object) -> None:
    """Make the CPU backend, which must not have started yet, use these collectives."""
    factory = functools.partial(_xla_bridge.make_cpu_client, collectives)
    _xla_bridge.register_backend_factory("cpu", factory, priority=0)


def keep_programs_of_all_workers() -> None:
    """Have JAX's persistent compilation cache keep what each process compiles for CPUs.

    Why: JAX writes on process 0 only, as accelerator programs are the same for all processes. CPU
    programs are not: their keys contain the process, so all other processes would compile again. A
    version of JAX that does this in another way is left alone.
    """
    original = getattr(_compiler, "_cache_write", None)
    if original is None or getattr(original, "__module__", None) != _compiler.__name__:
        return
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    as_first = types.FunctionType(original.__code__, {**vars(_compiler), "distributed": first})

    def write(key: str, seconds: float, name: str, backend: Any, *rest: Any) -> None:
        (as_first if backend.platform == "cpu" else original)(key, seconds, name, backend, *rest)

    _compiler._cache_write = write  # pyright: ignore[reportPrivateUsage]


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Keep warnings of XLA off stderr for a `with` block.

    Why: JAX warns of a feature of its coordination service that is used on purpose, and XLA ignores
    the environment variable for this once it has been loaded.
    """
    usual = _log_level(os.environ.get("TF_CPP_MIN_LOG_LEVEL", ""))
    _utils.absl_set_min_log_level(max(usual, 2))
    try:
        yield
    finally:
        _utils.absl_set_min_log_level(usual)


def _log_level(text: str) -> int:
    """Return the level that XLA reads from the text: 0 if there is no number, and 3 at most."""
    found = re.match(r"\s*(\d{1,3})", text)
    return min(int(found[1]), 3) if found else 0


def abandon_distributed_runtime() -> None:
    """Let the process end without signing off from the other processes.

    Why: JAX signs off at exit, and if the process with the service has ended, that aborts with a
    C++ trace, and the program's own exit code is lost. The destructors do the same, so the objects
    must outlive the interpreter.
    """
    state = _distributed.global_state
    for thing in (state.client, state.service):
        if thing is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    state.client = state.service = None


def _noting_cpu_client() -> object:
    own = ("/jax/", "/replicax/", "<frozen")
    stack = [f for f in traceback.extract_stack() if not any(part in f.filename for part in own)]
    _started_at[:] = traceback.format_list(stack[-2:])
    return _xla_bridge.make_cpu_client()


def derivative_rules(parameters: Mapping[str, object]) -> tuple[Any, ...] | None:
    """Return the user's rules behind a `custom_jvp_call` or `custom_vjp_call`, if they are found.

    Why: two traces of one function have equal jaxprs apart from these parameters, which are new
    objects each time. To tell that the traces mean the same, one must compare the rules
    themselves, which JAX keeps inside closures. The result is None if JAX keeps them elsewhere.
    """
    try:
        if "jvp_jaxpr_fun" in parameters:
            rules = [_wrapped_rule(parameters["jvp_jaxpr_fun"], "jvp")]
        else:
            rules = [_wrapped_rule(parameters["fwd_jaxpr_thunk"], "fwd"), parameters["bwd"]]
        # One transformation flattens the arguments; further ones hold static arguments
        # (`nondiff_argnums`), which are part of what the rule computes.
        if any(len(rule.transforms) != 1 for rule in rules):
            return None
        return tuple(rule.f for rule in rules)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _wrapped_rule(thunk: Any, name: str) -> Any:
    return _captured(_captured(thunk.f, "fn"), name)


def _captured(function: Any, name: str) -> Any:
    """Return the variable `name` in the closure of `function`."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def all_gather(array: jax.Array, axis_name: str) -> jax.Array:
    """Stack an array over a mesh axis, as `jax.lax.all_gather` does, even one of random keys.

    Why: for keys, JAX (0.10.1 to 0.12.0.1) makes a program that its own verifier refuses.
    """
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.lax.all_gather(array, axis_name)
    data = jax.lax.all_gather(jax.random.key_data(array), axis_name)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


# In JAX 0.12 a jaxpr contains its constants, and `ClosedJaxpr` is another name for `Jaxpr`.
_CONSTANTS_INSIDE = ClosedJaxpr is Jaxpr
_untraced = get_opaque_trace_state()
# In JAX 0.12 every argument of a primitive is first converted to an array.
CANONICAL_FIRST = not hasattr(_core, "canonicalize_value")


def without_constants(jaxpr: ClosedJaxpr) -> Jaxpr:
    """Return a jaxpr that does not keep the values of its constants alive."""
    if _CONSTANTS_INSIDE:
        return jaxpr.with_consts(())  # pyright: ignore[reportAttributeAccessIssue]  new in 0.12
    return jaxpr.jaxpr


def with_constants(jaxpr: Jaxpr, constants: Sequence[object]) -> ClosedJaxpr:
    """Return a jaxpr from `without_constants`, closed over these constants."""
    if _CONSTANTS_INSIDE:
        return jaxpr.with_consts(constants)  # pyright: ignore[reportAttributeAccessIssue]  as above
    return ClosedJaxpr(jaxpr, constants)


def closed_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr from the parameters of an equation as a closed one."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else with_constants(jaxpr, ())


def jaxprs_within(parameters: Mapping[str, object]) -> list[Jaxpr | ClosedJaxpr]:
    """Return the jaxprs among the parameters of an equation, such as the branches of a `cond`."""
    leaves = jax.tree.leaves(
        list(parameters.values()), is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))
    )
    return [leaf for leaf in leaves if isinstance(leaf, (Jaxpr, ClosedJaxpr))]


def constants_in(jaxpr: Jaxpr | ClosedJaxpr) -> list[Any]:
    """Return the values that a program, or any jaxpr within it, closes over."""
    found = list(getattr(jaxpr, "consts", ()))
    for equation in jaxpr.eqns:
        for inner in jaxprs_within(equation.params):
            found += constants_in(inner)
    return found


def needed_inputs(jaxpr: ClosedJaxpr, results: Iterable[int]) -> list[bool]:
    """Tell which inputs of a program the given ones of its results depend on.

    Functions that are jitted inside are looked into. An equation with another jaxpr in it, such as
    a loop, needs all of its operands.
    """
    inner = without_constants(jaxpr)
    atoms = [inner.outvars[index] for index in results]
    needed = {atom for atom in atoms if not isinstance(atom, Literal)}
    for equation in reversed(inner.eqns):
        wanted = [index for index, atom in enumerate(equation.outvars) if atom in needed]
        if not (wanted or equation.effects):
            continue
        used = [True] * len(equation.invars)
        if equation.primitive.name in ("jit", "pjit") and not equation.effects:
            used = needed_inputs(closed_jaxpr(equation.params["jaxpr"]), wanted)
        needed.update(
            atom
            for atom, is_used in zip(equation.invars, used, strict=True)
            if is_used and not isinstance(atom, Literal)
        )
    return [variable in needed for variable in inner.invars]


def calls_python(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Return whether a program has callbacks anywhere in it."""
    return any(
        "callback" in equation.primitive.name
        or equation.primitive.name == "debug_print"
        or any(calls_python(inner) for inner in jaxprs_within(equation.params))
        for equation in jaxpr.eqns
    )


def users_line_of(equation: JaxprEqn) -> str:
    """Return the user's line that made an equation, as " (file:line)", or "" if unknown.

    Why: an error should name the culprit, and the traceback of an equation has no public name.
    """
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        libraries = ("site-packages", str(Path(__file__).parent), "<")
        if not any(part in frame.file_name for part in libraries):
            return f" ({frame.file_name}:{frame.line_num})"
    return ""


def scan_sizes(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants, and how many are carried."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()  # JAX 0.12
    return len(constants), len(carry)


def mapped_axes(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a `shard_map` maps over."""
    new_name = "newly_manual_axes"  # JAX 0.12 only
    return parameters[new_name if new_name in parameters else "manual_axes"]


def apply_equation(equation: JaxprEqn, operands: Sequence[object]) -> list[Any]:
    """Return the results of one equation of a jaxpr.

    JAX documents interpreters of jaxprs, but not the attribute that holds the context of an
    equation (which mesh is set, how random numbers are divided).
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager, named_as(equation):
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def named_as(equation: JaxprEqn) -> AbstractContextManager[None]:
    """Return a context that puts new equations into the named scopes of another equation.

    Why: profiles show these names, and the backward pass is recognised by them. JAX keeps them when
    it evaluates equations again, but by a context manager that is private.
    """
    names = _source_info_util.current_name_stack() + equation.source_info.name_stack
    return _source_info_util.set_name_stack(names)


def is_of_backward_pass(equation: JaxprEqn) -> bool:
    """Tell whether an equation is part of the backward pass of a derivative.

    Why: JAX says so only in the names of equations, which are private.
    """
    return any(
        isinstance(each, _source_info_util.Transform) and each.name == "transpose"
        for each in equation.source_info.name_stack.stack
    )


def has_side_effects(equation: JaxprEqn) -> bool:
    """Return whether an equation does more than compute its results, such as write to a ref.

    Why: a collective has an effect too, which says only that its axis must be known. The class of
    that effect is not public.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


@dataclasses.dataclass(frozen=True)
class ShardMapCall:
    """The single `shard_map` of a traced function.

    Why: a replica's code must be inspected before the layout of its results is known, and it
    should be traced only once. The parameters of the equation are not a public interface.
    """

    program: ClosedJaxpr
    equation: JaxprEqn

    @property
    def body(self) -> Jaxpr | ClosedJaxpr:
        return self.equation.params["jaxpr"]

    @property
    def in_specs(self) -> Sequence[Any]:
        return self.equation.params["in_specs"]

    def operands(self, arguments: Sequence[object]) -> list[Any]:
        """Return the operands of the `shard_map`, including values that its body closes over."""
        known = dict(zip(self.program.jaxpr.constvars, self.program.consts, strict=True))
        known.update(zip(self.program.jaxpr.invars, arguments, strict=True))
        return [x.val if isinstance(x, Literal) else known[x] for x in self.equation.invars]


def shard_map_of(program: ClosedJaxpr) -> ShardMapCall:
    """Return the `shard_map` in the jaxpr of a function that consists of nothing else."""
    (equation,) = program.eqns
    return ShardMapCall(program, equation)


def is_tracing() -> bool:
    """Return whether this code runs inside a JAX transformation."""
    return get_opaque_trace_state() != _untraced


def without_mesh(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function run as if no mesh were set by `jax.set_mesh`.

    Why: strategies have a mesh of their own, and JAX refuses arrays and programs over devices other
    than those of the mesh that is set. `jax.set_mesh(None)` works, but is not documented.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_tracing() or jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        with jax.set_mesh(None):  # pyright: ignore[reportArgumentType]
            return function(*args, **kwargs)

    return wrapped


def accept_as_array(
    kind: type,
    array_of: Callable[[Any], jax.Array],
    known_of: Callable[[Any], jax.Array | jax.ShapeDtypeStruct],
) -> None:
    """Make every function of JAX take objects of a class, and of its subclasses, as arrays.

    `known_of` returns what is known of the array without computing anything.

    Why: `__jax_array__` is enough for functions that convert their arguments. Jitted ones (most of
    `jax.numpy`) and primitives (`jax.lax`) refuse an object that has it, and the public way around
    that, a pytree node, would take apart what must stay a leaf in nests.
    """

    def canonical(value: object) -> jax.Array:
        array = array_of(value)
        return array if isinstance(array, Tracer) else _dtypes.canonicalize_value(array)

    _dtypes.canonicalize_value_handlers[kind] = canonical
    if CANONICAL_FIRST:
        _core.pytype_aval_mappings[kind] = lambda value: _core.typeof(known_of(value))
        return

    # JAX 0.10 canonicalizes only Python and NumPy numbers. Tracing asks values for
    # `dimension_as_value`, which exists for symbolic dimensions; so an integer, which may itself be
    # a dimension (`jnp.linspace(0, 1, variable)`), must not have it. Differentiation asks for
    # nothing, and would take the object for a constant.
    def as_dimension(value: object) -> Callable[[], jax.Array] | None:
        return None if may_be_dimension(value) else functools.partial(array_of, value)

    def may_be_dimension(value: object) -> bool:
        known = known_of(value)
        return not known.shape and jnp.issubdtype(known.dtype, jnp.integer)

    def aval(value: object) -> Any:
        known = known_of(value)
        traced = isinstance(known, Tracer)
        overlooked = traced and not isinstance(known, DynamicJaxprTracer)
        if overlooked or (may_be_dimension(value) and is_tracing()):
            # This is not a `TypeError`, whose message JAX would replace with one of its own.
            raise InvalidArgument(
                f"A {type(value).__name__} of shape {known.shape} and dtype {known.dtype} was "
                "given to a function of `jax.lax`, or to a jitted one, inside of a JAX "
                "transformation. Give it the array: `variable.value`, or `jnp.asarray(value)`."
            )
        return _core.typeof(known)

    kind.dimension_as_value = property(as_dimension)
    _core.pytype_aval_mappings[kind] = aval


def uncommitted(array: jax.Array) -> jax.Array:
    """Return the array, in the same memory, as one that JAX moves to wherever it is used.

    Why: arrays that are computed from committed ones are committed, and mixing them with those of
    another device is an error. The public way to undo that is a round trip through the host.
    """
    if not isinstance(array, ArrayImpl) or not array.committed or len(array.devices()) > 1:
        return array
    return ArrayImpl(array.aval, array.sharding, array._arrays, committed=False, _skip_checks=True)
