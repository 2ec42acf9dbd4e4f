"""A linear model by PyTorch's DistributedDataParallel.

torchrun --nproc-per-node 2 examples/from_pytorch/with_ddp.py
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")

random = np.random.default_rng(0)
x = random.normal(size=(100, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32)

model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data, shuffle=False))

for _ in range(3):
    for features, targets in loader:  # 10 rows for each process
        optimizer.zero_grad()
        loss = ((model(features)[:, 0] - targets) ** 2).mean()
        loss.backward()  # gradients are averaged over the processes
        optimizer.step()

if torch.distributed.get_rank() == 0:
    print("weights", model.module.weight[0].tolist())
torch.distributed.destroy_process_group()
