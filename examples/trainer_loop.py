"""Hugging Face's Trainer with zerolab.ZeroOptimizer, at any stage.

    torchrun --nproc-per-node 2 examples/trainer_loop.py --stage 3 --output runs/trainer

`ZeroTrainer` changes four things of the Trainer: the model is not wrapped in DistributedDataParallel, the
optimizer is a ZeroOptimizer, gradients are clipped by it, and checkpoints hold every rank's shards.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zerolab


class ZeroTrainer(Trainer):
    """The Trainer with model states sharded by ``stage``, in ``precision``. All else goes to Trainer."""

    def __init__(self, *args, stage: int = 3, precision: str = "fp32", **kwargs):
        self.stage, self.precision = stage, precision
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        accelerator, prepare = self.accelerator, self.accelerator.prepare_model
        accelerator.prepare_model = lambda model, *_, **__: prepare(
            model, device_placement=False, evaluation_mode=True
        )  # autocast and torch.compile as the arguments say, and no DistributedDataParallel
        accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: self.zero.clip_grad_norm_(
            max_norm, norm_type
        )

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            plain = super().create_optimizer(model)  # the class, groups and options of the arguments
            self.zero = self.optimizer = zerolab.ZeroOptimizer(
                self.model, type(plain), params=plain.param_groups, stage=self.stage, precision=self.precision
            )
        return self.optimizer

    def save_model(self, output_dir=None, _internal_call=False):
        with self.zero.full_params():
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir):
        zerolab.save(self.zero, Path(output_dir) / "zerolab", extra=self.lr_scheduler.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(zerolab.load(self.zero, Path(checkpoint) / "zerolab"))

    def _load_best_model(self):
        with self.zero.full_params():
            super()._load_best_model()


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def make_data(size: int = 32) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (size, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


def make_trainer(
    stage: int, output: str, kind: type[ZeroTrainer] = ZeroTrainer, precision: str = "fp32", **arguments
) -> ZeroTrainer:
    zerolab.init_process_group()
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        max_grad_norm=0.5,
        optim="adamw_torch",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        logging_steps=1,
        **arguments,
    )
    data = {"train_dataset": make_data(), "eval_dataset": make_data(8)}
    return kind(model=make_model(), args=arguments, **data, stage=stage, precision=precision)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--output", default="runs/trainer")
    given = parser.parse_args()
    trainer = make_trainer(given.stage, given.output, max_steps=4, save_steps=4)
    trainer.train()
