"""Draws the loss curves of the ports over those that were recorded with TensorFlow.

    python examples/ports/plot.py

In an environment with replicax[keras,demo,bench]. It runs the three programs, and writes
docs/pictures/ports_custom_training_loop.svg and so on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot

matplotlib.use("agg")
# The same file for the same curves; and text as text, which can be read aloud and searched.
matplotlib.rcParams.update({"svg.hashsalt": "replicax", "svg.fonttype": "none", "font.size": 10})

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
TOLERANCE = 1e-4  # as in tests/test_ports.py
THERE, OURS = "#f2a65a", "#1b3a6b"
PORTS = {
    "custom_training_loop": ("step", "A custom training loop, on two replicas", [sys.executable]),
    "keras_workers": (
        "epoch",
        "Training by fit of Keras, on two workers",
        [sys.executable, "-m", "replicax", "launch", "--workers", "2"],
    ),
    "input": ("step", "Four epochs of distributed input, on two replicas", [sys.executable]),
}


def measure(name: str, command: list[str]) -> dict[str, Any]:
    """Run a program, and return the curves that it writes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "losses.json"
        arguments = ["--losses", str(file)]
        if name == "input":
            arguments += ["--replicas", "2"]
        else:
            arguments += ["--directory", directory]
        subprocess.run([*command, str(HERE / f"{name}.py"), *arguments], check=True)
        return json.loads(file.read_text())


def draw(name: str, unit: str, title: str, recorded: dict, measured: dict) -> None:
    """Write the picture: both curves above, and how far they are apart below."""
    there, ours = np.array(recorded["loss"]), np.array(measured["loss"])
    steps = np.arange(1, len(there) + 1)
    figure, (curves, apart) = pyplot.subplots(
        2,
        1,
        figsize=(7.2, 4.6),
        height_ratios=(3, 1),
        sharex=True,
        layout="constrained",
        facecolor="white",
    )
    curves.plot(steps, there, color=THERE, linewidth=5, label=f"recorded: {recorded['made_by']}")
    curves.plot(steps, ours, color=OURS, linewidth=1.3, label=f"measured: {measured['made_by']}")
    curves.set_ylabel("training loss")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False)
    curves.set_title(title, fontsize=11, loc="left")
    # Where both are equal to the last digit there is nothing to show on a logarithmic scale.
    difference = np.abs(ours - there) / there
    shown = difference > 0
    apart.semilogy(steps[shown], difference[shown], ".", color=OURS, markersize=4)
    apart.axhline(TOLERANCE, color="#b03a3a", linewidth=1, linestyle="--")
    apart.annotate(
        "tolerance of the tests; steps without a dot are equal in all digits",
        (steps[0], TOLERANCE),
        xytext=(0, -11),
        textcoords="offset points",
        color="#b03a3a",
        fontsize=8,
    )
    apart.set_ylim(1e-8, 5e-4)
    apart.set_yticks([1e-8, 1e-6, 1e-4])
    apart.minorticks_off()
    apart.set_ylabel("relative\ndifference")
    apart.set_xlabel(unit)
    for axes in (curves, apart):
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(PICTURES / f"ports_{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    print(f"{name}: at most {difference.max():.1e} apart")


if __name__ == "__main__":
    for name, (unit, title, command) in PORTS.items():
        recorded = json.loads((HERE / "recorded" / f"{name}.json").read_text())
        draw(name, unit, title, recorded, measure(name, command))
