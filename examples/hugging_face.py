"""Fine-tune a GPT-2 of Hugging Face, made from its config, at stage 3. It needs the package transformers.

For a model with weights, replace ``GPT2LMHeadModel(config)`` by ``GPT2LMHeadModel.from_pretrained(name)``.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zerolab


def train(steps: int) -> None:
    """Train on Python's own standard library, one byte a token."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    device = zerolab.device()
    model = GPT2LMHeadModel(config).to(device)
    batches, _ = zerolab.data.training_and_held_out(64, batch_size=8, seed=0)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-3)
    for step in range(steps):
        tokens = batches.batch(step, optimizer.rank)[0].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"rank {optimizer.rank}  step {step}  loss {loss.item():.3f}", flush=True)

    with optimizer.full_params(), torch.no_grad():  # on every rank
        prompt = torch.tensor([list(b"def ")], device=device)
        tokens = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    if optimizer.rank == 0:
        print("generated:", bytes(tokens[0].tolist()))


if __name__ == "__main__":
    zerolab.launch(train, 2, 40)
