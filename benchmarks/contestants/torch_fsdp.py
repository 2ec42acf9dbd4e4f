"""PyTorch: `fully_shard` (FSDP2) over gloo, one process with one thread per replica."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _problem import Cell
from _workers import Worker, serve_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_ddp import join, network_of, training_of


def build(cell: Cell, worker: Worker) -> Callable[[], float]:
    """Return the training step of one replica, which waits for the others."""
    join(worker)
    mesh = init_device_mesh("cpu", (cell.replicas,))
    model = network_of(cell)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return training_of(fully_shard(model, mesh=mesh), cell, worker)


if __name__ == "__main__":
    serve_workers(build, {"torch": torch.__version__})
