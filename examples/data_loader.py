"""A DataLoader on every rank: DistributedSampler gives each rank its examples, in a new order each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerolab


def train(epochs: int) -> None:
    """Train a small classifier on this rank's share of the data."""
    torch.manual_seed(0)  # every rank builds the same data set
    inputs = torch.randn(512, 20)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(512))
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)  # the ranks must shuffle with one seed
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    device = zerolab.device()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=2, lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        losses, seen = [], []
        for batch, labels, numbers in loader:
            loss = nn.functional.cross_entropy(model(batch.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen += numbers.tolist()
        mean = sum(losses) / len(losses)
        print(f"rank {optimizer.rank}  epoch {epoch}  loss {mean:.3f}  examples {seen[:4]} ...", flush=True)


if __name__ == "__main__":
    zerolab.launch(train, 2, 3)
