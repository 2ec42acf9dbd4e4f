"""PyTorch: `DistributedDataParallel` over gloo, one process with one thread per replica."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from _problem import CLASSES, FEATURES, Cell, problem_of
from _workers import Worker, serve_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def build(cell: Cell, worker: Worker) -> Callable[[], float]:
    """Return the training step of one replica, which waits for the others."""
    join(worker)
    return training_of(DistributedDataParallel(network_of(cell)), cell, worker)


def training_of(model: nn.Module, cell: Cell, worker: Worker) -> Callable[[], float]:
    problem = problem_of(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=cell.learning_rate)
    rows = torch.from_numpy(problem.rows[worker.index])
    labels = torch.from_numpy(problem.labels[worker.index]).long()

    def train() -> float:
        optimizer.zero_grad()
        # A mean over the replica's rows: PyTorch averages the gradients over the replicas, and the
        # average of these means is the sum over all rows divided by the global batch.
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / cell.replicas

    return train


def join(worker: Worker) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{worker.addresses[0]}",
        rank=worker.index,
        world_size=len(worker.addresses),
    )


def network_of(cell: Cell) -> nn.Module:
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


if __name__ == "__main__":
    serve_workers(build, {"torch": torch.__version__})
