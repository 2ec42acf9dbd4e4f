"""The diffs of CONTRIBUTING.md do what is said of them."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def the_hunks(about: str) -> list[tuple[str, list[str]]]:
    """Return the files that a diff changes, with the lines of each change.

    `about` is a word that occurs in one diff only.
    """
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if about in block]
    hunks = []
    for file in re.split(r"^--- .*\n", block, flags=re.M)[1:]:
        name, *changes = re.split(r"^@@.*\n", file, flags=re.M)
        name = name.strip().removeprefix("+++ b/")
        hunks += [(name, change.splitlines()) for change in changes]
    return hunks


def changed_copy(hunks: list[tuple[str, list[str]]], directory: Path) -> None:
    """Copy the library, and change the copy."""
    shutil.copytree(ROOT / "src", directory / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in hunks:
        file = directory / name
        before = "\n".join(line[1:] for line in lines if line[0] in " -")
        after = "\n".join(line[1:] for line in lines if line[0] in " +")
        text = file.read_text() if before else ""
        assert not before or text.count(before) == 1, f"{name} has changed:\n{before}"
        file.write_text(text.replace(before, after) if before else f"{after}\n")


def output_of(code: str, directory: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)],
        env={
            **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
            "PYTHONPATH": str(directory / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("about", "new_files", "new_lines"),
    [("_open_mpi", 1, 1), ("_every_second", 1, 2), ("PRODUCT", 0, None)],
)
def test_how_much_is_touched(about, new_files, new_lines):
    hunks = the_hunks(about)
    assert all("-" not in {line[0] for line in lines} for _, lines in hunks), "nothing is removed"
    new = [name for name, lines in hunks if {line[0] for line in lines} == {"+"}]
    added = [line for name, lines in hunks for line in lines if name not in new and line[0] == "+"]
    assert len(new) == new_files
    if new_lines is None:
        assert len(hunks) == 2, "places"
    else:
        assert len(added) == new_lines


def test_a_strategy(tmp_path):
    changed_copy(the_hunks("_every_second"), tmp_path)
    code = """
        import replicax as rx
        strategy = rx.EverySecondDeviceStrategy([f"CPU:{i}" for i in range(4)])
        with strategy.scope():
            total = rx.Variable(0.0, aggregation="SUM")
        strategy.run(lambda: total.assign_add(1.0))
        print(strategy, float(total), [device.id for device in strategy.extended.worker_devices])
        print(type(strategy).__module__)
    """
    assert output_of(code, tmp_path) == ["EverySecondDeviceStrategy(2) 2.0 [0, 2]", "replicax"]


def test_a_cluster_resolver(tmp_path):
    changed_copy(the_hunks("_open_mpi"), tmp_path)
    code = """
        import replicax as rx
        from replicax.doctor._cluster import find_cluster
        print(type(rx.MultiWorkerMirroredStrategy().cluster_resolver).__name__)
        print(find_cluster().checks[0].found)
        print("OpenMPIClusterResolver" in dir(rx.cluster_resolver))
    """
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert output_of(code, tmp_path, **ranks) == [
        "OpenMPIClusterResolver",
        "OpenMPIClusterResolver, because OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set",
        "True",
    ]


def test_a_reduce_op(tmp_path):
    changed_copy(the_hunks("PRODUCT"), tmp_path)
    code = """
        import jax, jax.numpy as jnp, numpy as np
        import replicax as rx

        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        own = [np.float32([2, 3, 4]), np.float32([5])]
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: own[context.replica_id_in_sync_group]
        )

        def replica(x):
            reduce = rx.get_replica_context().all_reduce
            return jax.value_and_grad(lambda x: reduce(rx.ReduceOp.PRODUCT, x))(jnp.prod(x))

        def whole(rows):
            return strategy.reduce(rx.ReduceOp.PRODUCT, rows, axis=0)

        for wrap in (lambda function: function, rx.function):
            results = strategy.run(wrap(replica), args=(rows,))
            print([list(map(float, each.values)) for each in results], wrap(whole)(rows))
    """
    assert output_of(code, tmp_path) == ["[[120.0, 120.0], [10.0, 48.0]] 120.0"] * 2
