"""The same by Hugging Face Accelerate.

ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/from_pytorch/with_accelerate.py
"""

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()

random = np.random.default_rng(0)
x = random.normal(size=(100, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32)

model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=10)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(3):
    for features, targets in loader:  # 10 rows for each process
        optimizer.zero_grad()
        loss = ((model(features)[:, 0] - targets) ** 2).mean()
        accelerator.backward(loss)  # gradients are averaged over the processes
        optimizer.step()

accelerator.print("weights", accelerator.unwrap_model(model).weight[0].tolist())
accelerator.end_training()
