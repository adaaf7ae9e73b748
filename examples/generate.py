"""Generate text from a model that is sharded at stage 3, in two ways that give the same text."""

import torch

import zerolab

PROMPT = b"def "


def text_of(model: torch.nn.Module) -> str:
    """Forty bytes after the prompt. The generator has a seed, so that every rank draws the same ones."""
    generator = torch.Generator(zerolab.device()).manual_seed(0)
    prompt = torch.tensor([list(PROMPT)], device=zerolab.device())
    tokens = model.generate(prompt, 40, temperature=0.8, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def train(steps: int) -> None:
    """Train a small GPT at stage 3, and let it write."""
    torch.manual_seed(0)
    model = zerolab.models.make("gpt-tiny").to(zerolab.device())
    batches, _ = zerolab.data.training_and_held_out(model.context, batch_size=4, seed=0)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=2e-3)
    for step in range(steps):
        batch = batches.batch(step, optimizer.rank)
        model(*(part.to(zerolab.device()) for part in batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    # Gather once: every rank holds the whole model inside, so this is fast and needs the memory.
    with optimizer.full_params(), torch.no_grad():
        whole = text_of(model)
    # Gather unit by unit in each forward: no rank holds the whole model. All ranks must generate.
    with torch.no_grad():
        by_unit = text_of(model)
    if optimizer.rank == 0:
        print(f"inside full_params(): {whole!r}\nunit by unit:         {by_unit!r}")


if __name__ == "__main__":
    zerolab.launch(train, 2, 30)
