"""The command `replicax launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import click

from replicax._seconds import require_seconds
from replicax.errors import InvalidArgument
from replicax.launch._gang import Patience
from replicax.launch._launcher import launch


@final
class _Seconds(click.types.FloatParamType):
    """A length of time on the command line."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = super().convert(value, param, ctx)
        try:
            require_seconds("it", seconds)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)
        return seconds


@click.command(
    "launch",
    # Everything after the script belongs to the script, even if it looks like an option of ours.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option("--workers", type=click.IntRange(min=1), required=True, help="How many workers.")
@click.option(
    "--devices-per-worker",
    type=click.IntRange(min=1),
    help="Into how many devices each worker splits its CPU.  [default: as JAX has it]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How many times all workers are started again after one has failed.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep what workers write, in attempt-0/worker-0.log and so on.",
)
@click.option(
    "--compilation-cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep compiled programs in this directory, for the next start.",
)
@click.option(
    "--grace-period",
    type=_Seconds(),
    default=Patience().grace,
    show_default=True,
    help="Seconds from Ctrl-C or SIGTERM until workers are killed; inf for never.",
)
@click.option(
    "--backoff",
    type=_Seconds(),
    default=1.0,
    show_default=True,
    help="Seconds before the first restart; twice as many before each further one, up to 30.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def launch_command(
    context: click.Context,
    workers: int,
    devices_per_worker: int | None,
    max_restarts: int,
    log_dir: Path | None,
    compilation_cache: Path | None,
    grace_period: float,
    backoff: float,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT as a cluster of workers on this machine.

    Each worker learns of the others from TF_CONFIG. When one fails, all are stopped, and the exit
    code is that of the one that failed first.
    """
    # A FIFO is refused, as reading it waits for its writer; a directory may have a `__main__.py`.
    if not is_module and not Path(script).is_file() and not Path(script).is_dir():
        raise click.BadParameter(f"there is no file {script!r}.", param_hint="'SCRIPT'")
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(str(error), param_hint="'--log-dir'") from None
    try:
        code = launch(
            [*(["-m"] if is_module else []), script, *arguments],
            workers=workers,
            devices_per_worker=devices_per_worker,
            max_restarts=max_restarts,
            log_directory=log_dir,
            compilation_cache=compilation_cache,
            patience=Patience(grace=grace_period),
            backoff=backoff,
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error), context) from error
    context.exit(code)
