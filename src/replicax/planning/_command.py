"""The command `replicax plan`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import click

_PLATFORMS = "jax_platforms"  # by name, because JAX's stubs do not know it


@click.command("plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("program", metavar="MODULE:PROGRAM")
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    required=True,
    help="Such as v5e:4x4; several are compared.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Rows of a global batch.")
@click.option(
    "--computation-shape",
    metavar="AxB",
    help="The block of chips that forms a replica.  [default: one chip]",
)
@click.option(
    "--fully-sharded",
    is_flag=True,
    help="Divide the state over the replicas, as rx.FullyShardedStrategy does.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the plan as a page, there.",
)
@click.pass_context
def plan_command(
    context: click.Context,
    program: str,
    topologies: tuple[str, ...],
    batch: int | None,
    computation_shape: str | None,
    fully_sharded: bool,
    html: Path | None,
) -> None:
    """Show what a training step needs on TPUs you need not have: memory, communication and time.

    MODULE:PROGRAM names a function in a module, or in a file such as train.py:program, that takes a
    strategy and returns the step function and its arguments. See docs/planning.md.

    The exit code is 1 if the step does not fit on one of the topologies.
    """
    from rich.console import Console

    from replicax.errors import ReplicaxError
    from replicax.planning._plan import Scaling
    from replicax.planning._planner import plan
    from replicax.planning._table import scaling_curve
    from replicax.planning._topologies import prepare
    from replicax.variables import ShardedPlacement

    _stay_on_host()
    console, plans = Console(), []
    try:
        prepare(topologies)
        function, block = _load(program), _sides(computation_shape)
        placement = ShardedPlacement() if fully_sharded else None
        for topology in topologies:
            plans.append(plan(function, topology, block, batch, placement))
            console.print(plans[-1], "", sep="\n")
    except ReplicaxError as error:
        raise click.UsageError(str(error), context) from error
    scaling = Scaling(tuple(plans))
    if len(plans) > 1:
        console.print(scaling_curve(scaling), "", sep="\n")
    if html is not None:
        click.echo(f"Written: {scaling.save_html(html)}")
    context.exit(0 if all(each.fits for each in plans) else 1)


def _stay_on_host() -> None:
    """Leave this machine's accelerators alone: nothing is run, and others may be using them."""
    import jax

    if not getattr(jax.config, _PLATFORMS):
        jax.config.update(_PLATFORMS, "cpu")


def _load(name: str) -> Any:
    """Return the function that "module:function" or "file.py:function" names."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise click.UsageError(
            f"{name!r} does not name a program. Write MODULE:PROGRAM, such as train:program or "
            "examples/planning.py:program."
        )
    is_file = module.endswith(".py")
    # Its imports may be next to it, as with `python file.py` and `python -m module`.
    sys.path.insert(0, str(Path(module).parent if is_file else Path.cwd()))
    found: Any = _from_file(Path(module)) if is_file else _from_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"{module!r} has no {attribute!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise click.UsageError(f"{name!r} is not a function: {found!r}.")
    return found


def _from_module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # The module itself imports something that is missing.
        raise click.UsageError(
            f"There is no module {name!r} here, nor among those that are installed."
        ) from error


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise click.UsageError(f"There is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # `dataclasses`, for one, looks for it there.
    spec.loader.exec_module(module)
    return module


def _sides(block: str | None) -> tuple[int, ...] | None:
    if block is None:
        return None
    if not re.fullmatch(r"\d+(x\d+)*", block):
        raise click.UsageError(f"--computation-shape is one such as 2x2; got {block!r}.")
    return tuple(int(side) for side in block.split("x"))
