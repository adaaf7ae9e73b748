"""Lightning Fabric starts the ranks and shares out the data; zerolab shards the training.

It needs the package lightning-fabric. The model is not passed to ``fabric.setup()``, which would wrap it in
DistributedDataParallel: averaging the gradients is zerolab's part.
"""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerolab


def main() -> None:
    """Train a small classifier on two ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(512, 20)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16, shuffle=True))

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(fabric.device)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=2, lr=1e-2)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"{fabric.world_size} ranks, epoch {epoch}  loss {mean.item():.3f}")


if __name__ == "__main__":
    main()
