"""A training program in which something happens to one worker at one step.

Called with the event, the worker, the step, the time-out in seconds and the number of steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import optax

import replicax as rx


def happen(event: str) -> None:
    if event == "raise":
        raise ArithmeticError("a fault of the program")
    if event == "exit":
        os._exit(0)
    if event == "leave":
        sys.exit(3)
    if event == "slow":
        time.sleep(3)
    elif event == "loop":
        while True:
            pass
    elif event != "nothing":
        os.kill(os.getpid(), getattr(signal, event))


def main(event: str, worker: int, at_step: int, timeout_seconds: float, steps: int) -> None:
    options = rx.experimental.CommunicationOptions(timeout_seconds=timeout_seconds)
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        weight = rx.Variable(np.ones(3, np.float32), name="weight")
        optimizer = rx.Optimizer(optax.sgd(0.1))

    @rx.function
    def train_step():
        def replica_step():
            loss, gradient = rx.value_and_grad(lambda: (weight * weight).sum(), weight)()
            optimizer.apply_gradients([(gradient, weight)])
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step), axis=None)

    own = strategy.cluster_resolver.task_id == worker
    for step in range(steps):
        if rx.preemption.requested():
            print(f"stopped before step {step}", flush=True)
            break
        if own and step == at_step:
            print(f"{event} at {time.time()}", flush=True)
            happen(event)
        try:
            train_step()
        except rx.errors.WorkerLost:
            print(f"lost at {time.time()}", flush=True)
            print(f"kept {weight.numpy().tolist()}", flush=True)
            raise
        print(f"step {step}", flush=True)
        time.sleep(0.1)
    print(f"weight {weight.numpy().tolist()}", flush=True)


if __name__ == "__main__":
    event, worker, at_step, timeout_seconds, steps = sys.argv[1:]
    main(event, int(worker), int(at_step), float(timeout_seconds), int(steps))
