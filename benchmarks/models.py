"""A training step of models people know: a small convnet and a transformer of two layers.

`python benchmarks/models.py` prints this table; it is not part of run.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click
from contestants._problem import ModelCell
from options import (
    QUICK_ROUNDS,
    peer_environments_option,
    quick_option,
    rounds_option,
    sittings_option,
)
from report import (
    WIDTH,
    MeasuredCell,
    describe_machine,
    print_agreement,
    print_targets,
    print_versions,
    ratio_columns,
    spread,
    table_of,
    versions_of,
)
from rich.console import Console
from targets import Target
from training import TENSORFLOW, TORCH, Contestant, measure_cell

MODEL_CELLS = (
    ModelCell("convnet", global_batch=64, replicas=2, epoch_steps=128),
    ModelCell("transformer", global_batch=32, replicas=2, epoch_steps=64),
)
QUICK_EPOCH_STEPS = 16
# Libraries add Adam's epsilon in different places of the formula. In `fit` of the transformer there
# is also the sparse gradient of TensorFlow's embedding, of which README.md has more.
TOLERANCE = 1e-2
FIT_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Form:
    """A way to train a model, and those who train in it.

    The others' times are divided by that of the first contestant.
    """

    title: str
    contestants: Sequence[Contestant]
    steps: Mapping[str, int]  # per turn, by the model
    of_epochs: bool = False  # to the protocol, an epoch is one step
    tolerance: float = TOLERANCE


FORMS = {
    "fit": Form(
        "Training step of Keras' fit, 2 replicas",
        (
            Contestant("replicax_fit"),
            Contestant("plain_fit"),
            Contestant("tensorflow_fit", TENSORFLOW),
        ),
        {"convnet": 1, "transformer": 1},
        of_epochs=True,
        tolerance=FIT_TOLERANCE,
    ),
    "replicas": Form(
        "Training step of a custom loop, 2 replicas",
        (
            Contestant("replicax_model"),
            Contestant("jax_model"),
            Contestant("tensorflow_model", TENSORFLOW),
            Contestant("torch_model", TORCH),
        ),
        {"convnet": 20, "transformer": 8},
    ),
    "workers": Form(
        "Training step of a custom loop, 2 workers",
        (
            Contestant("replicax_model workers"),
            Contestant("jax_model workers"),
            Contestant("tensorflow_model workers", TENSORFLOW),
            Contestant("torch_model", TORCH),
        ),
        {"convnet": 20, "transformer": 8},
    ),
}
AT_LEAST = {("fit", "convnet", "plain_fit"): 0.97}


def measure_form(
    form: Form,
    sittings: int,
    rounds: int,
    peer_environments: Path,
    cells: Sequence[ModelCell] = MODEL_CELLS,
) -> list[MeasuredCell]:
    measured = [
        measure_cell(
            form.contestants,
            cell,
            sittings,
            rounds,
            form.steps[cell.model],
            peer_environments,
            form.tolerance,
        )
        for cell in cells
    ]
    if not form.of_epochs:
        return measured
    return [
        of_cell.each_of(cell.epoch_steps) for of_cell, cell in zip(measured, cells, strict=True)
    ]


def print_form(console: Console, form: Form, measured: Sequence[MeasuredCell]) -> None:
    table = table_of(
        f"{form.title}, {len(measured[0].baseline.seconds_per_step)} interleaved rounds",
        "model",
        "contestant",
        "steps a s,\nmedian",
        "middle half\nof the rounds",
        "s to the\nfirst step",
        "ratio,\nmedian",
        "middle half\nof the rounds",
        words=("model", "contestant"),
    )
    for one in measured:
        labels = iter((one.cell.model, f"batch {one.cell.global_batch}"))
        for measurement in one.measurements:
            rates = [1 / seconds for seconds in measurement.seconds_per_step]
            table.add_row(
                next(labels, ""),
                measurement.contestant.removesuffix(" workers"),
                f"{median(rates):.1f}",
                spread(rates, "{:.1f}".format),
                f"{median(measurement.first_step_seconds):.2f}",
                *ratio_columns(measurement, one.baseline),
            )
        table.add_section()
    console.print(table)
    print_agreement(console, measured)


def model_targets(measured: Mapping[str, Sequence[MeasuredCell]]) -> list[Target]:
    return [
        Target.at_least(f"{form}, {model}, {peer} / replicax", bound, one.ratio_of(peer))
        for (form, model, peer), bound in AT_LEAST.items()
        for one in measured.get(form, ())
        if one.cell.model == model
    ]


@click.command()
@rounds_option
@sittings_option
@quick_option
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice([*FORMS]),
    help="Only this; may be repeated.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice([cell.model for cell in MODEL_CELLS]),
    help="Only this; may be repeated.",
)
@peer_environments_option
def main(
    rounds: int,
    sittings: int,
    quick: bool,
    forms: Sequence[str],
    models: Sequence[str],
    peer_environments: Path,
) -> None:
    """Time the training of models people know."""
    header = describe_machine()
    cells = [cell for cell in MODEL_CELLS if not models or cell.model in models]
    if quick:
        rounds, sittings = QUICK_ROUNDS, 1
        cells = [replace(cell, epoch_steps=QUICK_EPOCH_STEPS) for cell in cells]
    measured = {
        name: measure_form(FORMS[name], sittings, rounds, peer_environments, cells)
        for name in forms or FORMS
    }
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(console, versions_of([one for cells in measured.values() for one in cells]))
    for name, of_form in measured.items():
        print_form(console, FORMS[name], of_form)
    targets = model_targets(measured)
    if targets and not quick:  # two rounds are no evidence
        print_targets(console, targets)


if __name__ == "__main__":
    main()
