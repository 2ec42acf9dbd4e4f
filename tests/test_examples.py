"""The examples run, and do what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  here, because it sets environment variables
from click.testing import CliRunner
from support import equal

PROJECT = Path(__file__).parent.parent


@pytest.mark.parametrize("replicas", [1, 4])
def test_digits(replicas):
    main = runpy.run_path(str(PROJECT / "examples" / "digits.py"))["main"]
    outcome = CliRunner().invoke(
        main, ["--replicas", str(replicas), "--epochs", "30"], catch_exceptions=False
    )
    assert outcome.exit_code == 0
    accuracy = re.search(r"Test accuracy on 360 unseen digits: (\d\.\d+)", outcome.output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert f"cpu:{replicas - 1}" in outcome.output


def test_keras_digits(tmp_path):
    pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")
    main = runpy.run_path(str(PROJECT / "examples" / "keras_digits.py"))["main"]
    outcome = CliRunner().invoke(
        main,
        ["--replicas", "2", "--epochs", "3", "--backup", str(tmp_path / "backup")],
        catch_exceptions=False,
    )
    assert outcome.exit_code == 0
    accuracy = re.search(r"Test accuracy on 360 unseen digits: (\d\.\d+)", outcome.output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.85


def test_flax_digits():
    pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")
    main = runpy.run_path(str(PROJECT / "examples" / "flax_digits.py"))["main"]
    outcome = CliRunner().invoke(main, ["--replicas", "2", "--epochs", "3"], catch_exceptions=False)
    assert outcome.exit_code == 0
    accuracy = re.search(r"Test accuracy on 360 unseen digits: (\d\.\d+)", outcome.output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.7  # 0.98 after all ten epochs


def test_flax_characters():
    pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")
    main = runpy.run_path(str(PROJECT / "examples" / "flax_characters.py"))["main"]
    small = ["--width", "32", "--blocks", "1", "--steps", "50"]
    outcome = CliRunner().invoke(main, ["--replicas", "2", *small], catch_exceptions=False)
    assert outcome.exit_code == 0
    loss = re.search(r"Loss on unseen pages: (\d\.\d+)", outcome.output)
    counting = re.search(r"By counting characters: (\d\.\d+)", outcome.output)
    assert loss is not None
    assert counting is not None
    # The small one does better than who only counts characters; the whole one, than who counts
    # pairs: 1.46 against 2.72.
    assert float(loss[1]) < float(counting[1])


@pytest.mark.slow
def test_sharded_characters():
    main = runpy.run_path(str(PROJECT / "examples" / "sharded_characters.py"))["main"]
    refused = CliRunner().invoke(main, ["--mirrored"])
    assert refused.exit_code == 1
    assert "The mirrored step does not fit into 16 MiB." in refused.output
    outcome = CliRunner().invoke(main, ["--steps", "60"], catch_exceptions=False)
    assert outcome.exit_code == 0
    assert re.search(r"mirrored: \d+\.\d MiB per device, too much", outcome.output)
    assert re.search(r"sharded: \d+\.\d MiB per device, fits", outcome.output)
    loss = re.search(r"Loss of the last ten steps: (\d\.\d+)", outcome.output)
    assert loss is not None
    assert float(loss[1]) < 4  # It begins at 5.8; counting characters gives 3.2.


def test_gradient_accumulation():
    main = runpy.run_path(str(PROJECT / "examples" / "gradient_accumulation.py"))["main"]
    by_cond, by_optax = main()
    equal(by_cond, by_optax, 1e-5)
    assert abs(by_cond).max() > 0.5


def test_planning():
    main = runpy.run_path(str(PROJECT / "examples" / "planning.py"))["main"]
    losses, plan = main()
    assert losses[-1] < losses[0]
    parameters = 784 * 2048 + 2048 * 2048 + 2048 * 10
    assert sum(each.bytes for each in plan.collectives) == 4 * parameters + 4


def test_resuming(capsys):
    main = runpy.run_path(str(PROJECT / "examples" / "resuming.py"))["main"]
    undisturbed, resumed = main()
    equal(resumed, undisturbed, 1e-5)
    equal(undisturbed, [1.0, -2.0, 0.5], 0.1)
    assert "Going on after step 17 on 4 replicas" in capsys.readouterr().out


def test_large_embedding():
    pytest.importorskip("ray", reason="Ray is not installed: pip install replicax[ray]")
    import ray_clusters

    done = subprocess.run(
        [sys.executable, str(PROJECT / "examples" / "large_embedding.py"), "--steps", "300"],
        env=ray_clusters.environment(),
        capture_output=True,
        text=True,
        timeout=ray_clusters.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1000000 rows, in parts of [500000, 500000] on 2 servers" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < 0.1 * losses[0]


def test_loss_scaling():
    main = runpy.run_path(str(PROJECT / "examples" / "loss_scaling.py"))["main"]
    loss, scales = main()
    assert loss < 1e-3
    assert min(scales) < scales[0]  # it has shrunk
    assert scales[-1] > min(scales)  # and grown again


def test_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert re.search(r"loss 0\.0\d+", capsys.readouterr().out)
