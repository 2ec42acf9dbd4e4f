"""The state of the whole process: every module-level name that changes, and its reason.

`tests/test_process_state.py` finds these names in the source and compares them with this list, so a
new one needs a line here. All other state is kept by objects that users hold.

State that belongs together is one object, with its lock. Entries about objects that are not ours to
change last only as long as the object, and are written by the thread that uses it, so they need no
lock.

Three kinds follow a rule, and need no individual reason:

- `CACHES`: functions, or tables keyed by class, that remember results which depend on the arguments
  alone. At worst, another thread computes one again.
- `MADE_ONCE`: functions without arguments that make or register the only object of its kind when it
  is first needed.
- Names in capital letters are constants.

Locks are taken in the order of `LOCKS`: a thread that holds one takes only those after it.
"""

from __future__ import annotations

LOCKS = {
    "checkpoint._writer_thread._writers.one_at_a_time": "Orbax writes one checkpoint at a time; "
    "held by the thread that writes, which runs no program",
    "execution._compiled_program._lock": "a compiled step takes and leaves the states of variables "
    "as a whole",
    "variables._state.reusing_states": "memory that a program reuses is not read meanwhile; taken "
    "within a step, or alone by the thread that reads a variable",
    "variables._gradient_programs._cache._lock": "the table of gradient programs; no program runs "
    "under it",
    "collectives._dispatch._guard.lock": "programs with collectives start in one order on all "
    "devices; the innermost, as a program is started under it",
}

STATE = {
    "_bridges._bridges": "the bridges to libraries that are loaded, once per process",
    "_context._frame": "the ambient frame: scope, replica, update",
    "_jax_compat._started_at": "the line that started JAX, for the message that it was too early",
    "_nest._opaque_classes": "the opaque classes of bridges",
    "_once._said": "what the user has been told once",
    "_settings.settings": "what `rx.config` sets",
    "checkpoint._entries._handlers": "handlers of types, which bridges have registered",
    "checkpoint._writer_thread._writers": "checkpoints that are being written, awaited at exit",
    "cluster._forking._connections": "sockets that a forked child must close",
    "cluster._session._current": "the place of this process in a cluster, which it joins once",
    "collectives._dispatch._guard": "the program that must end before the next one on CPUs",
    "execution._gradient_reduction._reductions": "strategies that do not sum gradients: compiled "
    "functions depend on them, whichever they run",
    "input._prefetch._open": "threads that prefetch, which end before the interpreter does",
    "integrations._keras_checkpoint._waiting": "values for slots that a Keras optimizer will make",
    "integrations.flax._swap.active": "which replica's objects NNX modules hold, in this context",
    "integrations.flax._variables._adoptions": "variables of NNX and ours that stand for them",
    "integrations.keras._records.records": "what is known of models and variables of Keras",
    "variables._gradient_programs._cache": "gradient programs, the last used ones",
}

CACHES = {
    "_containers._kinds",
    "_containers._plain",
    "_known_bad.installed_version",
    "_nest._is_opaque_class",
    "cluster._messages._hints",
    "collectives._across_arrays._combination",
    "collectives._across_arrays._first_of_all",
    "collectives._across_arrays._reduction",
    "collectives._across_arrays._replication",
    "collectives._across_arrays._scattering",
    "collectives._interface._is_of",
    "integrations.flax._discovery._globals_in",
    "integrations.flax._discovery._names_in",
    "integrations.flax._discovery._objects_may_lead_somewhere",
}

MADE_ONCE = {
    "checkpoint._writer_thread._wait_at_exit",
    "compat.v1._current._default_strategy",
    "integrations.keras._scope.ownership",
    "preemption._handler",
    "strategies._default.default_strategy",
}
