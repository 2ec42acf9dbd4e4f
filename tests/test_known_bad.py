"""Versions of jaxlib that are known to be broken."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

import replicax as rx
from replicax import _known_bad, _once
from replicax.doctor._versions import check_versions

ROOT = Path(__file__).parents[1]
CURE = "--xla_cpu_experimental_ynn_fusion_type=individual_dot"


@pytest.fixture
def jaxlib(monkeypatch):
    """Pretends that another version is installed, before or after JAX has started."""
    jax.devices()  # so that XLA has read its flags before they are made up
    monkeypatch.setattr(_once, "_said", _once._Said())
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")

    def installed(version: str, *, started: bool) -> None:
        monkeypatch.setattr(_known_bad, "installed_version", lambda: version)
        monkeypatch.setattr(_known_bad, "backends_are_initialized", lambda: started)

    return installed


def test_the_requirements_exclude_what_is_known_to_be_broken():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bad = {version for defect in _known_bad.DEFECTS for version in defect.versions}
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["cuda12"], *extras["cuda13"], *extras["tpu"]]
    of_jax = [each for each in map(Requirement, requirements) if each.name.startswith("jax")]
    assert [each.name for each in of_jax] == ["jax", "jaxlib", "jax", "jax", "jax"]
    for requirement in of_jax:
        excluded = {s.version for s in requirement.specifier if s.operator == "!="}
        assert excluded == bad, f"{requirement} and the table of defects differ"
    assert not _known_bad.defects_of(_known_bad.installed_version())


def test_the_page_about_installing_has_the_tables_that_are_made_of_both():
    made = runpy.run_path(str(ROOT / "docs" / "support_table.py"))
    page = (ROOT / "docs" / "install.md").read_text()
    assert made["written"](page) == page, "run docs/support_table.py"
    assert "| jax | >=0.10.1, !=0.10.2" in page
    assert page.count("jax-ml/jax#39103") == 1


def test_flags_are_set_while_they_have_an_effect(jaxlib):
    jaxlib("0.10.2", started=False)
    rx.MirroredStrategy(["CPU:0"])
    assert os.environ["XLA_FLAGS"] == f"--xla_one=1 {CURE}"
    rx.MirroredStrategy()
    assert os.environ["XLA_FLAGS"] == f"--xla_one=1 {CURE}", "it was set twice"


@pytest.mark.parametrize(
    ("version", "started", "flags"),
    [
        ("0.10.1", False, "--xla_one=1"),  # nothing to cure
        ("0.11.2", False, "--xla_one=1"),  # no flag helps
        ("0.10.2", True, "--xla_one=1"),  # too late
        ("0.10.2", False, f"{CURE}_and_more"),  # the user knows better
        ("0.10.2", False, "/a/file/of.flags"),  # which XLA reads
    ],
)
def test_flags_are_left_alone(jaxlib, monkeypatch, version, started, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    jaxlib(version, started=started)
    _known_bad.set_curing_flags()
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize(
    ("version", "threads"),
    [("0.10.2", ["39103", "39257"]), ("0.11.0", ["39257"]), ("0.11.2", ["empty array"])],
)
def test_a_strategy_on_a_bad_version_warns_once_with_what_to_do(jaxlib, version, threads):
    jaxlib(version, started=True)
    with pytest.warns(rx.errors.KnownBadVersion, match=f"jaxlib {version} is known") as caught:
        rx.MirroredStrategy(["CPU:0", "CPU:1"])
    rx.MirroredStrategy(["CPU:0", "CPU:1"])  # a second warning would be an error
    (warning,) = caught
    assert all(thread in str(warning.message) for thread in threads)
    assert "pip install" in str(warning.message)
    assert warning.filename == __file__


def test_no_warning_where_it_is_cured_or_does_not_show(jaxlib, monkeypatch):
    jaxlib("0.10.2", started=True)
    _known_bad.warn_of_defects(["tpu"])
    monkeypatch.setenv("XLA_FLAGS", CURE)
    rx.MirroredStrategy(["CPU:0", "CPU:1"])


def test_the_doctor_reports_it_as_a_problem(jaxlib):
    jaxlib("0.10.2", started=True)
    found = [check for check in check_versions() if check.name == "jaxlib 0.10.2"]
    assert [check.verdict.value for check in found] == ["problem", "problem"]
    assert "wrong numbers" in found[0].found
    assert "39103" in found[0].found
    assert "!=0.10.2" in found[0].advice


def test_empty_arrays_are_in_no_sum(strategy):
    empty, full = np.zeros((0, 3), np.float32), np.arange(3, dtype=np.float32)

    def replica_step(empty, full):
        return rx.get_replica_context().all_reduce("SUM", [empty, full])

    @rx.function
    def step(empty, full):
        return strategy.run(replica_step, args=(empty, full))

    for result in (step(empty, full), strategy.run(replica_step, args=(empty, full))):
        nothing, total = (strategy.experimental_local_results(each)[0] for each in result)
        assert (nothing.shape, nothing.dtype) == ((0, 3), np.float32)
        np.testing.assert_array_equal(total, full * strategy.num_replicas_in_sync)
    text = step.lower(empty, full).compile().as_text()
    assert not re.search(r"\[(\d+,)*0(,\d+)*\]\S* all-reduce", text), text


def test_empty_means_of_whole_numbers_are_fractional(two):
    empty = two.experimental_distribute_values_from_function(lambda _: np.zeros((0, 2), np.int32))
    for mean in (
        two.reduce("MEAN", empty, axis=None),
        rx.function(lambda: two.reduce("MEAN", empty, axis=None))(),
    ):
        assert mean.dtype == jnp.float32
        assert mean.shape == (0, 2)


# A version that really is broken.

PROGRAM = """
    import sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    import replicax as rx

    warnings.simplefilter("error")
    if "late" in sys.argv:
        jax.devices()
        try:
            rx.MirroredStrategy(["CPU:0"])
        except rx.errors.KnownBadVersion as warning:
            print(warning)
        warnings.simplefilter("ignore")
    strategy = rx.MirroredStrategy(["CPU:0"])
    numbers = np.arange(32_769, dtype=np.float32)
    rows = np.stack([numbers, 0 * numbers, 0 * numbers], axis=1)
    matrix = jnp.eye(3)
    with strategy.scope():
        scale = rx.Variable(1.0, name="scale")

    def last(rows):
        return scale * jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)[-1]

    @rx.function
    def alone(rows):
        return strategy.run(last, args=(rows,))

    @rx.function
    def differentiated(rows):
        return strategy.run(rx.value_and_grad(last, scale), args=(rows,))

    for function in (alone, differentiated):
        report = rx.audit(function, rows)
        print("agrees" if report.ok else report)
        print(*map(float, jax.tree.leaves(report.result)))
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, str]:
    """An environment in which jaxlib 0.10.2 is found before the one that is installed."""
    target = tmp_path_factory.mktemp("jaxlib")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    done = subprocess.run(
        [*command, "jax==0.10.2", "jaxlib==0.10.2"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"jaxlib 0.10.2 cannot be installed here: {done.stderr.strip()[-300:]}")
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_strategy_that_comes_first_makes_the_numbers_right(broken):
    done = run(broken, "-c", inspect.cleandoc(PROGRAM))
    assert done.returncode == 0, done.stderr
    right = "1073741824.0"
    assert done.stdout.splitlines() == ["agrees", right, "agrees", f"{right} {right}"]


@pytest.mark.slow
def test_an_audit_finds_wrong_numbers(broken):
    done = run(broken, "-c", inspect.cleandoc(PROGRAM), "late")
    assert done.returncode == 0, done.stderr
    assert "jaxlib 0.10.2 is known to be broken" in done.stdout
    wrong = r"differs by 8\.\d+e\+06; rounding explains 7\.\d+e\+04 in float32\n"
    assert re.search(rf"`alone`.*\n  output {wrong}", done.stdout)
    both = rf"`differentiated`.*\n  output\[0\] {wrong}  output\[1\] {wrong}"
    assert re.search(both, done.stdout)
    assert done.stdout.splitlines()[-1] == "1065369600.0 1065369600.0"


@pytest.mark.slow
def test_the_doctor_fails_with_the_reason(broken):
    done = run(broken, "-m", "replicax", "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (
        r"problem +jaxlib 0\.10\.2 +computes wrong numbers .*jax-ml/jax#39103",
        r"problem +float32 products +gives 1065369600\.0 instead of 1073741824\.0",
        r"problem +float64 products +gives 266342400\.0 instead of 268435456\.0",
        r"ok +empty in a sum ",
        r"problem +rank-7 reduction +crashed the process \(SIGSEGV\)",
        r"problem +rank-8 reduction +crashed the process \(SIGSEGV\)",
        rf"note +with XLA_FLAGS +{CURE}: every check passes",
        r"ok +strategy\.reduce +gives \[3\.0\]",
        r"6 problems\.",
    ):
        assert re.search(f"^ *{line}", done.stdout, re.MULTILINE), f"{line}\n{done.stdout}"
