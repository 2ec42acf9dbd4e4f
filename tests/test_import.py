"""The effects of `import replicax`, and those it must not have."""

import ast
import functools
import inspect
import subprocess
import sys

import pytest

import replicax as rx


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_starts_no_jax_backend():
    # JAX refuses this setting once a backend is up.
    run_python("import replicax, jax; jax.config.update('jax_num_cpu_devices', 3)")


WHAT_JAX_HAS = """
from jax._src import checkify, config, core, dtypes, pallas, tree_util, xla_bridge
import jax.ad_checkpoint, jax.extend.core, jax.experimental.pallas


def what_jax_has():
    modules = (jax, jax.numpy, jax.lax, jax.tree, jax.tree_util, jax.nn, jax.random)
    attributes = {
        f"{module.__name__}.{name}": id(value)
        for module in modules
        for name, value in vars(module).items()
    }
    settings = {name: repr(state.value) for name, state in config.config_states.items()}
    factories = {name: id(each.factory) for name, each in xla_bridge._backend_factories.items()}
    registered = {
        f"{table} {kind.__module__}.{kind.__qualname__}": id(handler)
        for table, handlers in (
            ("node", tree_util._registry),
            ("aval", core.pytype_aval_mappings),
            ("array", dtypes.canonicalize_value_handlers),
        )
        if isinstance(handlers, dict)  # JAX 0.12 has the third in C++, where it cannot be listed
        for kind, handler in handlers.items()
    }
    others = {"XLA_FLAGS": os.environ.get("XLA_FLAGS"), "hooks": id(sys.excepthook)}
    return {**attributes, **settings, **factories, **registered, **others}


before = what_jax_has()
import replicax
after = what_jax_has()
print(sorted(key for key in before | after if before.get(key) != after.get(key)))
"""


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (None, []),
        # Workers must come together before JAX starts. Which line has started it too early can be
        # told only if it was noted, and that line may come before the first strategy is made.
        ("{}", ["cpu"]),
    ],
)
def test_importing_changes_nothing_in_jax(monkeypatch, config, changed):
    """But for what is registered for our own classes."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    differs = ast.literal_eval(run_python(f"import os, sys\nimport jax\n{WHAT_JAX_HAS}"))
    ours = [name for name in differs if " replicax." in name]
    assert len(ours) >= 10
    assert [name for name in differs if name not in ours] == changed


def test_importing_takes_no_optional_library_along():
    code = """
        import sys, replicax
        print(sorted({name.partition('.')[0] for name in sys.modules}))
    """
    loaded = run_python(inspect.cleandoc(code))
    for library in (
        "optax",
        "orbax",
        "ray",
        "tensorflow",
        "torch",
        "keras",
        "flax",
        "grain",
        "rich",
        "sklearn",
    ):
        assert f"'{library}'" not in loaded


@pytest.mark.parametrize("name", rx.__all__)
def test_every_public_name_has_one_path(name):
    thing = getattr(rx, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__module__ == "replicax"
        assert thing.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize(
    "module",
    [
        rx.cluster_resolver,
        rx.compat.v1,
        rx.compat.v1.data,
        rx.compat.v1.experimental,
        rx.config,
        rx.coordinator,
        rx.errors,
        rx.experimental,
        rx.metrics,
        rx.parts,
        rx.planning,
        rx.preemption,
        rx.tpu.experimental,
    ],
)
def test_the_names_of_submodules_exist_and_have_docstrings(module):
    names = getattr(module, "__all__", None) or [
        n for n in vars(module) if n[0].isupper() and n != "Any"
    ]
    for name in names:
        thing = getattr(module, name)
        assert thing.__doc__, f"{module.__name__}.{name} has no docstring"
        if inspect.isclass(thing) or inspect.isfunction(thing):
            path = thing.__module__.split(".")[1:]
            public = functools.reduce(getattr, path, rx)
            assert not any(part.startswith("_") for part in path)
            assert thing in vars(public).values()


def test_strategies_that_name_cpus_split_the_host_before_jax_is_up():
    code = """
        import replicax as rx
        print(rx.MirroredStrategy(["CPU:0", "CPU:2"]).extended.worker_devices[1].id)
    """
    assert run_python(inspect.cleandoc(code)).strip() == "2"


def test_xla_flags_are_not_undercut():
    code = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=6"
        import jax, replicax as rx
        rx.MirroredStrategy(["CPU:0", "CPU:1"])
        print(len(jax.devices()))
    """
    assert run_python(inspect.cleandoc(code)).strip() == "6"


def test_too_late_to_split_says_what_to_do():
    code = """
        import jax, replicax as rx
        jax.devices()
        for attempt in (lambda: rx.OneDeviceStrategy("CPU:3"),
                        lambda: rx.config.set_logical_cpu_devices(4)):
            try:
                attempt()
            except ValueError as error:
                print(error)
    """
    named, explicit = run_python(inspect.cleandoc(code)).splitlines()
    assert "CPU:0" in named
    assert "set_logical_cpu_devices(4)" in named
    assert "already running with 1 CPU device" in explicit
