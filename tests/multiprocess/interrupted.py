"""A worker is interrupted in a step that the other one completes, and wants to go on."""

from __future__ import annotations

import os
import signal
import threading
import time

import replicax as rx


def main() -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id
    with strategy.scope():
        count = rx.Variable(0.0, aggregation="SUM")

    @rx.function
    def step():
        strategy.run(lambda: count.assign_add(1.0))

    step()
    if worker == 1:
        time.sleep(2)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        step()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        step()
    except rx.errors.WorkerLost as error:
        print(f"refused: {error}", flush=True)
        raise


if __name__ == "__main__":
    main()
