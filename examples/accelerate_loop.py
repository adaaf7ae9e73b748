"""A training loop with Hugging Face's Accelerate and zerolab.ZeroOptimizer, at any stage.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --stage 3 --save runs/accelerate

Accelerate distributes the data, accumulates gradients and gathers metrics. ZeroOptimizer averages gradients
and shards, so do not pass the model to ``accelerator.prepare``: it would wrap it in DistributedDataParallel.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerolab

MICRO_BATCHES, BATCH, MAX_NORM = 2, 4, 0.5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data() -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.square().sum(dim=1, keepdim=True))


def train(stage: int, epochs: int = 2, save: str | None = None) -> dict[str, torch.Tensor]:
    """Train on this rank, and return the whole parameters."""
    zerolab.init_process_group()
    on_cpu = not torch.cuda.is_available()  # without cpu=True Accelerate ignores the other ranks on CPUs
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=MICRO_BATCHES)
    model = make_model().to(accelerator.device)
    zero = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
    if accelerator.num_processes != zero.world_size:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} ranks, not {zero.world_size}")
    schedule = torch.optim.lr_scheduler.StepLR(zero, step_size=1, gamma=0.95)
    loader = DataLoader(make_data(), batch_size=BATCH)
    optimizer, loader = accelerator.prepare(zero, loader)  # not the model

    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    zero.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    schedule.step()
        losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
        accelerator.print(f"epoch {epoch}: loss {losses.mean().item():.4f}")
        if save:
            zerolab.save(zero, save, extra={"epoch": epoch, "schedule": schedule.state_dict()})

    with zero.full_params():
        if save:
            accelerator.save_model(model, f"{save}/model")
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--save")
    given = parser.parse_args()
    train(given.stage, save=given.save)
