"""What `import replicax` does, and does not do."""

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


def test_importing_takes_no_optional_library_along():
    code = """
        import sys, replicax
        print(sorted({name.partition('.')[0] for name in sys.modules}))
    """
    loaded = run_python(inspect.cleandoc(code))
    for library in (
        "optax",
        "orbax",
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
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0].isupper()]
    for name in names:
        assert getattr(module, name).__doc__, f"{module.__name__}.{name} has no docstring"


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
