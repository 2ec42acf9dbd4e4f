"""PyTorch: `DistributedDataParallel` over gloo, a process with one thread for each replica.

run.py starts and asks replica 0, which starts the others and passes every request on to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from _problem import CLASSES, FEATURES, LEARNING_RATE, Cell, problem_of
from _protocol import WARMUP_STEPS, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def build_replica(cell: Cell, replica: int, store: Path) -> Callable[[], float]:
    """The training step of one replica; it waits in every step for the others."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), cell.replicas),
        rank=replica,
        world_size=cell.replicas,
    )
    problem = problem_of(cell)
    model = DistributedDataParallel(_network(cell))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    rows = torch.from_numpy(problem.rows[replica])
    labels = torch.from_numpy(problem.labels[replica]).long()

    def train() -> float:
        optimizer.zero_grad()
        # A mean over the replica's rows: DDP averages the gradients over the replicas, and the
        # average of these means is the sum over all rows divided by the global batch.
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / cell.replicas

    return train


def _network(cell: Cell) -> nn.Module:
    problem = problem_of(cell)
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(
        pairwise([FEATURES, cell.hidden, cell.hidden, CLASSES])
    ):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(problem.weights[index].T))
            layer.bias.copy_(torch.from_numpy(problem.biases[index]))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Others:
    """The processes of the replicas but the first."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, cell: Cell, store: Path) -> None:
        for replica in range(1, cell.replicas):
            request = json.dumps({"cell": asdict(cell), "replica": replica, "store": str(store)})
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, request], stdin=subprocess.PIPE, text=True
                )
            )

    def take_steps(self, steps: int) -> None:
        """Tells them how many steps there will be, and waits until all of them know."""
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        dist.barrier()


def _serve_first() -> None:
    others = _Others()
    # The others end when this process does: their input ends with it.
    with tempfile.TemporaryDirectory() as folder:

        def build(cell: Cell) -> Callable[[], float]:
            store = Path(folder) / "store"
            others.start(cell, store)
            train = build_replica(cell, 0, store)
            others.take_steps(WARMUP_STEPS)
            return train

        serve(build, {"torch": torch.__version__}, before_steps=others.take_steps)
        dist.destroy_process_group()


def _serve_other(request: dict) -> None:
    train = build_replica(Cell(**request["cell"]), request["replica"], Path(request["store"]))
    for line in sys.stdin:
        dist.barrier()
        for _ in range(int(line)):
            train()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve_other(json.loads(sys.argv[1]))
    else:
        _serve_first()
