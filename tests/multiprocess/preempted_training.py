"""Trains under a `PreemptionCheckpointHandler`; one worker is told to end at one step, once.

Called with a directory, and what happens to which worker, such as `SIGTERM:1`, `watcher:0` or
`grace:1`. That it has happened is noted in the directory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from small_training import Training

import replicax as rx

STEPS, AT_STEP = 12, 4


def main(directory: Path, event: str, victim: int) -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id or 0
    note, told = directory / "told", []
    mine = worker == victim and not note.exists()
    training = Training(strategy, compiled=True)
    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        training.checkpoint,
        directory / "checkpoints",
        rx.experimental.TerminationConfig(
            termination_watcher_fn=(lambda: bool(told)) if event == "watcher" else None,
            grace_period=0.5 if event == "grace" else None,
        ),
    )
    print(f"begins at step {handler.total_run_calls}", flush=True)
    for step in range(handler.total_run_calls, STEPS):
        if mine and step == AT_STEP:
            note.touch()
            print(f"told at step {step}", flush=True)
            if event == "watcher":
                told.append(True)
                for thread in threading.enumerate():
                    if thread.name == "replicax-termination":
                        thread.join()
            elif event != "nothing":
                os.kill(os.getpid(), signal.SIGTERM)
        handler.run(training.steps, 1)
        time.sleep(0.2)  # the workers agree meanwhile, on busy cores too
    state = training.state()
    print(f"state {state}", flush=True)


if __name__ == "__main__":
    happens, whom = sys.argv[2].split(":")
    main(Path(sys.argv[1]), happens, int(whom))
