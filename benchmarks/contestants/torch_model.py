"""PyTorch: a model people know and Adam, under `DistributedDataParallel` over gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import _operations_torch
import numpy as np
import torch
import torch.distributed as dist
from _models import EPSILON, MODELS, Model, model_problem_of
from _problem import ModelCell
from _workers import Worker, serve_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ddp import join


def build(cell: ModelCell, worker: Worker) -> Callable[[], float]:
    """Return the training step of one replica, which waits for the others."""
    join(worker)
    model, problem = MODELS[cell.model], model_problem_of(cell)
    network = DistributedDataParallel(Network(model, problem.params))
    optimizer = torch.optim.Adam(network.parameters(), lr=cell.learning_rate, eps=EPSILON)
    rows = _operations_torch.inputs_of(problem.rows[worker.index])
    labels = torch.from_numpy(problem.labels[worker.index]).long()

    def train() -> float:
        optimizer.zero_grad()
        # DDP averages the gradients over the replicas, and the losses are averaged below.
        loss = _operations_torch.cross_entropy(network(rows), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / cell.replicas

    return train


class Network(nn.Module):
    def __init__(self, model: Model, params: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._model = model
        self._params = nn.ParameterDict(
            {
                name: nn.Parameter(_operations_torch.parameter_of(name, array))
                for name, array in params.items()
            }
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._model.logits(_operations_torch, self._params, rows)


if __name__ == "__main__":
    serve_workers(build, {"torch": torch.__version__})
