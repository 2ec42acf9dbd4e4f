"""Two workers, of which the second waits for its input for ever; they wait `TIMEOUT` seconds."""

from __future__ import annotations

import threading

import numpy as np

import replicax as rx

TIMEOUT = 3.0


def main() -> None:
    options = rx.experimental.CommunicationOptions(timeout_seconds=TIMEOUT)
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)

    def read_rows():
        yield np.float32([1.0])
        if strategy.cluster_resolver.task_id == 1:
            threading.Event().wait()
        yield np.float32([2.0])

    for _ in strategy.distribute_datasets_from_function(lambda context: read_rows):
        print("step", flush=True)


if __name__ == "__main__":
    main()
