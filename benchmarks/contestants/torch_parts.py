"""The parts of a training step of PyTorch's DDP, one at a time.

workers.py starts it with the name of a part, e.g. `torch_parts.py compute`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_ddp
from _problem import Cell, problem_of
from _workers import Worker, nothing_to_compare, serve_workers
from torch import nn


def compute(cell: Cell, worker: Worker) -> Callable[[], Any]:
    """Make a step of each worker alone, at the same time: all of a step but the communication."""
    torch.set_num_threads(1)
    problem = problem_of(cell)
    model = torch_ddp.network_of(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=cell.learning_rate)
    rows = torch.from_numpy(problem.rows[worker.index])
    labels = torch.from_numpy(problem.labels[worker.index]).long()

    def train() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


def all_reduce(cell: Cell, worker: Worker) -> Callable[[], Any]:
    """Make a step that only sums over the workers: the gradients, in one piece, and the loss."""
    torch_ddp.join(worker)
    parameters = torch_ddp.network_of(cell).parameters()
    gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
    loss = torch.zeros(())

    def step() -> None:
        dist.all_reduce(gradients)
        dist.all_reduce(loss)

    return step


PARTS = {"step": torch_ddp.build, "compute": compute, "all-reduce": all_reduce}

if __name__ == "__main__":
    serve_workers(PARTS[sys.argv[1]], {"torch": torch.__version__}, fetch=nothing_to_compare)
