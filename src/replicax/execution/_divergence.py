"""Collectives that some replicas reach and others do not, found before a program runs.

XLA would wait for those that do not: on CPUs for 40 s, after which it ends the process.
"""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from replicax._jax_compat import jaxprs_within, users_line_of
from replicax.errors import CollectiveMismatch
from replicax.execution._varying import Level, communicates, runs_in, visit_run

_CONDITIONAL = ("cond", "while")


def refuse_divergence(program: Jaxpr | ClosedJaxpr) -> None:
    """Refuse a program in which a condition that may differ between replicas leads to a collective.

    An example is a `lax.cond` or `lax.while_loop` whose condition depends on the replica's rows.
    """

    def visit(equation: JaxprEqn, level: Level, parting: JaxprEqn | None) -> None:
        if parting is not None and communicates(equation):
            raise CollectiveMismatch(
                f"A collective over the replicas (`{equation.primitive.name}`) is in a `lax.cond`, "
                f"`lax.switch` or `lax.while_loop`{users_line_of(parting)} whose condition may "
                "differ between the replicas: it depends on a replica's own rows, id or ON_READ "
                "variable, and those that do not get there would be waited for. Have all of them "
                'decide alike, such as by `rx.get_replica_context().all_reduce("SUM", condition) > '
                "0`, by a mirrored variable, or by a plain argument; or communicate outside of it, "
                "and use `jnp.where`."
            )

    for run in runs_in(program):
        if _has_conditional_collective(run.params["jaxpr"]):
            visit_run(run, visit)


def _has_conditional_collective(jaxpr: Jaxpr | ClosedJaxpr, conditional: bool = False) -> bool:
    """Tell whether any collective is under a condition; the full check takes longer than this."""
    return any(
        (conditional and communicates(equation))
        or any(
            _has_conditional_collective(
                inner, conditional or equation.primitive.name in _CONDITIONAL
            )
            for inner in jaxprs_within(equation.params)
        )
        for equation in jaxpr.eqns
    )
