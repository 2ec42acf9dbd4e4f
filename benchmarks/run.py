"""The benchmarks of replicax and its peers, side by side: `make bench`.

README.md says what is measured and how to read it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click
from feeding import FED_CELLS, feeding_targets, measure_feeding, print_feeding
from first_step import (
    QUICK_VARIABLES,
    ROUNDS,
    VARIABLES,
    first_step_targets,
    measure_first_steps,
    print_first_steps,
)
from growth import (
    PICTURE,
    QUICK_AXES,
    QUICK_SIZES,
    draw_picture,
    measure_growth,
    print_growth,
)
from keras_fit import FIT_CELLS, fit_targets, measure_fit, print_fit
from many_steps import (
    MANY_STEPS_CELLS,
    many_steps_targets,
    measure_many_steps,
    print_many_steps,
)
from options import (
    QUICK_ROUNDS,
    peer_environments_option,
    quick_option,
    rounds_option,
    sittings_option,
)
from overhead import measure_overhead, overhead_targets, print_overhead
from plot import draw_ratios
from report import (
    WIDTH,
    describe_machine,
    print_picture,
    print_targets,
    print_training,
    print_versions,
    versions_of,
)
from rich.console import Console
from scaling import REPLICAS, measure_scaling, print_scaling
from training import COMPILED_CELLS, measure_compiled, measure_eager, training_targets
from workers import WORKERS_CELLS, measure_workers, print_workers, workers_targets

QUICK_HIDDEN = 32
QUICK_REPLICAS = REPLICAS[:2]


@click.command()
@rounds_option
@sittings_option
@quick_option
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also draws the ratios into this file; needs matplotlib (the extra `bench`).",
)
@peer_environments_option
def main(
    rounds: int, sittings: int, quick: bool, plot: Path | None, peer_environments: Path
) -> None:
    """Time replicax and its peers, side by side."""
    if quick:
        rounds, sittings = QUICK_ROUNDS, 1
    header = describe_machine()
    cells = [cell for cell in COMPILED_CELLS if cell.hidden == QUICK_HIDDEN or not quick]

    eager = measure_eager(sittings, rounds, peer_environments)
    compiled = measure_compiled(sittings, rounds, peer_environments, cells)
    workers = measure_workers(
        sittings, rounds, peer_environments, WORKERS_CELLS[:1] if quick else WORKERS_CELLS
    )
    feeding = measure_feeding(
        sittings, rounds, peer_environments, FED_CELLS[:1] if quick else FED_CELLS
    )
    many_steps = measure_many_steps(
        sittings, rounds, peer_environments, MANY_STEPS_CELLS[:1] if quick else MANY_STEPS_CELLS
    )
    fit = []
    if find_spec("keras") is not None:
        fit = measure_fit(
            sittings, rounds, peer_environments, FIT_CELLS[:1] if quick else FIT_CELLS
        )
    overhead = measure_overhead(sittings * rounds)
    scaling = measure_scaling(sittings * rounds, QUICK_REPLICAS if quick else REPLICAS)

    first_steps = measure_first_steps(
        QUICK_ROUNDS if quick else ROUNDS, QUICK_VARIABLES if quick else VARIABLES
    )

    growth = measure_growth(1, QUICK_AXES, QUICK_SIZES) if quick else measure_growth()

    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(
        console, versions_of([*eager, *compiled, *workers, *feeding.iterated, *many_steps, *fit])
    )
    print_training(console, "Compiled training step", compiled)
    print_training(console, "Eager training step", eager)
    print_workers(console, workers)
    print_feeding(console, feeding)
    print_many_steps(console, many_steps)
    if fit:
        print_fit(console, fit)
    else:
        console.print("Keras is missing: `fit` is left out. It comes with the extra `keras`.")
    print_overhead(console, overhead)
    print_scaling(console, scaling)
    print_first_steps(console, first_steps)
    print_growth(console, growth)
    if not quick:  # two rounds are no evidence
        targets = [
            training_targets(compiled),
            workers_targets(workers),
            feeding_targets(feeding),
            many_steps_targets(many_steps),
            fit_targets(fit),
            overhead_targets(overhead),
            first_step_targets(first_steps),
        ]
        print_targets(console, [target for some in targets for target in some])
    if plot is not None:
        print_picture(console, "The ratios are drawn", plot, draw_ratios(plot, compiled))
    if not quick:
        draw_picture(console, PICTURE, growth)


if __name__ == "__main__":
    main()
