"""Save on two ranks at stage 2, and go on with three ranks at stage 3."""

import tempfile

import torch

import zerolab


def train(folder: str, stage: int, steps: int, resume: bool) -> None:
    """Train a small GPT for so many steps, from the start or from the checkpoint, and save it."""
    torch.manual_seed(0)
    model = zerolab.models.make("gpt-tiny").to(zerolab.device())
    batches, _ = zerolab.data.training_and_held_out(model.context, batch_size=4, seed=0)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=2e-3)
    done = zerolab.load(optimizer, folder)["step"] if resume else 0
    report(optimizer, done, "loaded" if resume else "new")
    for step in range(done, done + steps):
        batch = batches.batch(step, optimizer.rank)
        model(*(part.to(zerolab.device()) for part in batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zerolab.save(optimizer, folder, extra={"step": done + steps})
    report(optimizer, done + steps, "saved")


def report(optimizer: zerolab.ZeroOptimizer, step: int, what: str) -> None:
    """Print the sum of all parameters. Every rank calls this, because full_params() gathers from all."""
    with optimizer.full_params():
        total = sum(parameter.double().sum().item() for parameter in optimizer.model.parameters())
    if optimizer.rank == 0:
        print(f"{what} at step {step}, {optimizer.world_size} ranks: parameters add up to {total:.12f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        zerolab.launch(train, 2, folder, stage=2, steps=5, resume=False)
        zerolab.launch(train, 3, folder, stage=3, steps=5, resume=True)
