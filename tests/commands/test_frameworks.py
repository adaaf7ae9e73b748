"""Promise: the examples with Accelerate and the Trainer leave the bits of plain training, at every stage.

Neither library belongs to the project. These tests are skipped where they are not installed.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch
from support import ROOT
from support.references import Replicas, Tensors
from support.trained import on_two_ranks
from torch import nn

import zerolab

pytest.importorskip("accelerate")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def example(file: str) -> ModuleType:
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def accelerate_loop() -> ModuleType:
    return example("accelerate_loop.py")


@pytest.fixture
def trainer_loop() -> ModuleType:
    pytest.importorskip("transformers")
    return example("trainer_loop.py")


def differing(found: Tensors, expected: nn.Module) -> list[str]:
    return [name for name, p in expected.named_parameters() if not torch.equal(found[name], p)]


# Accelerate.


def expected_of_accelerate(example: ModuleType) -> nn.Module:
    """Two replicas in this process: each batch of the data goes to the next rank."""
    replicas = Replicas(example.make_model, 2, torch.optim.AdamW, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(replicas.optimizer, step_size=1, gamma=0.95)
    batches = list(torch.utils.data.DataLoader(example.make_data(), batch_size=example.BATCH)) * 2
    for step in range(0, len(batches), 2 * example.MICRO_BATCHES):
        for micro in range(example.MICRO_BATCHES):
            for rank, model in enumerate(replicas.models):
                x, y = batches[step + 2 * micro + rank]
                (nn.functional.mse_loss(model(x), y) / example.MICRO_BATCHES).backward()
            replicas.collect()
            replicas.reduce()
        replicas.clip_grad_norm_(example.MAX_NORM)
        replicas.step()
        schedule.step()
        replicas.zero_grad()
    return replicas.whole


@STAGES
def test_accelerate_leaves_the_bits_of_plain_training(stage: int, accelerate_loop, tmp_path: Path):
    from safetensors.torch import load_file

    expected = expected_of_accelerate(accelerate_loop)
    for found in on_two_ranks(partial(accelerate_loop.train, save=str(tmp_path)), stage):
        assert differing(found, expected) == []
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert differing(saved, expected) == [] and len(saved) == 6


def prepared_for(example: ModuleType, stage: int):
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), example.make_model()
    zero = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
    return accelerator, model, zero


def prepare_the_model(example: ModuleType, stage: int, folder: Path) -> None:
    accelerator, model, zero = prepared_for(example, stage)
    model, _ = accelerator.prepare(model, zero)
    model(torch.randn(4, 8)).sum().backward()


def prepare_the_model_first(example: ModuleType, stage: int, folder: Path) -> None:
    from accelerate import Accelerator

    model = Accelerator(cpu=True).prepare(example.make_model())
    zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)


def clip_through_accelerate(example: ModuleType, stage: int, folder: Path) -> None:
    accelerator, model, zero = prepared_for(example, stage)
    accelerator.prepare(zero)
    model(torch.randn(4, 8)).sum().backward()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def save_the_optimizer_through_accelerate(example: ModuleType, stage: int, folder: Path) -> None:
    accelerator, model, zero = prepared_for(example, stage)
    optimizer = accelerator.prepare(zero)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)


def scale_through_accelerate(example: ModuleType, stage: int, folder: Path) -> None:
    """As fp16 does on a GPU."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator, model, zero = prepared_for(example, stage)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(zero, scaler=accelerator.scaler)
    accelerator.backward(model(torch.randn(4, 8)).sum())
    optimizer.step()


def save_what_accelerate_wrapped(example: ModuleType, stage: int, folder: Path) -> None:
    accelerator, _, zero = prepared_for(example, stage)
    zerolab.save(accelerator.prepare(zero), folder)


def read_the_model_outside_full_params(example: ModuleType, stage: int, folder: Path) -> None:
    accelerator, model, _ = prepared_for(example, stage)
    if stage < 3:
        raise RuntimeError("whole below stage 3: use full_params()")
    accelerator.save_model(model, folder)


REFUSED = {
    prepare_the_model: "call the model itself|sharded: .*before the optimizer is built",
    prepare_the_model_first: "the model is a DistributedDataParallel, .*: pass the bare module",
    clip_through_accelerate: r"Clip with optimizer.clip_grad_norm_\(max_norm\)",
    save_the_optimizer_through_accelerate: r"Accelerate's save_state\(\) .* save with zerolab.save\(\)",
    scale_through_accelerate: r'GradScaler .* precision="mixed_fp16" and call optimizer.scale\(loss\)',
    save_what_accelerate_wrapped: "optimizer is a AcceleratedOptimizer: pass the ZeroOptimizer itself",
    read_the_model_outside_full_params: r"use full_params\(\)",
}


@STAGES
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_accelerate_cannot_do_is_refused(case, stage: int, accelerate_loop, tmp_path: Path):
    with pytest.raises(zerolab.WorkerError, match=REFUSED[case]):
        on_two_ranks(case, accelerate_loop, stage, tmp_path)


# The Trainer.


def train(example: ModuleType, stage: int, folder: Path, resume: bool = False, **arguments):
    """On a rank: the parameters, and with what the model was called."""
    calls = []

    class Recording(example.ZeroTrainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, **options):
            calls.append((inputs["input_ids"].clone(), num_items_in_batch))
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **options)

    trainer = example.make_trainer(stage, str(folder), Recording, max_steps=4, **arguments)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    rates = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
    with trainer.zero.full_params():
        values = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return values, calls, rates


def expected_of_trainer(
    example: ModuleType, ranks: list, micro_batches: int, dtype=None, precision: str = "fp32"
) -> nn.Module:
    """Two replicas in this process, called as the ranks' models were, with the Trainer's learning rates."""
    settings = {"lr": 0.01, "weight_decay": 0.0, "precision": precision}
    replicas = Replicas(example.make_model, 2, torch.optim.AdamW, **settings)
    for step, rate in enumerate(ranks[0][2]):
        replicas.optimizer.param_groups[0]["lr"] = rate
        for micro in range(micro_batches):
            for rank, model in enumerate(replicas.models):
                tokens, count = ranks[rank][1][step * micro_batches + micro]
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = model.train()(input_ids=tokens, labels=tokens, num_items_in_batch=count).loss
                (loss * 2).backward()
            replicas.collect()
            replicas.reduce()
        replicas.clip_grad_norm_(0.5)
        replicas.step()
        replicas.zero_grad()
    return replicas.models[0] if precision != "fp32" else replicas.whole


@STAGES
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_trainer_leaves_the_bits_of_plain_training(
    stage: int, micro_batches: int, trainer_loop, tmp_path: Path
):
    settings = {"gradient_accumulation_steps": micro_batches, "save_strategy": "no"}
    ranks = on_two_ranks(partial(train, **settings), trainer_loop, stage, tmp_path)
    expected = expected_of_trainer(trainer_loop, ranks, micro_batches)
    assert [differing(found, expected) for found, *_ in ranks] == [[], []]


@STAGES
def test_the_trainers_autocast_and_checkpointing_do_too(stage: int, trainer_loop, tmp_path: Path):
    settings = {"bf16": True, "gradient_checkpointing": True, "save_strategy": "no"}
    ranks = on_two_ranks(partial(train, **settings), trainer_loop, stage, tmp_path)
    expected = expected_of_trainer(trainer_loop, ranks, 1, torch.bfloat16)
    assert [differing(found, expected) for found, *_ in ranks] == [[], []]


@STAGES
def test_the_trainers_weights_may_be_bf16_with_fp32_masters(stage: int, trainer_loop, tmp_path: Path):
    settings = {"precision": "mixed", "save_strategy": "no"}
    ranks = on_two_ranks(partial(train, **settings), trainer_loop, stage, tmp_path)
    expected = expected_of_trainer(trainer_loop, ranks, 1, precision="mixed")
    assert [differing(found, expected) for found, *_ in ranks] == [[], []]


@STAGES
def test_the_trainer_goes_on_from_its_checkpoint_at_any_stage(stage: int, trainer_loop, tmp_path: Path):
    from transformers import GPT2LMHeadModel

    settings = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "load_best_model_at_end": True}
    whole = on_two_ranks(partial(train, **settings), trainer_loop, stage, tmp_path)
    resumed = on_two_ranks(partial(train, resume=True, **settings), trainer_loop, (stage + 1) % 4, tmp_path)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert [differing(found, saved) for found, *_ in whole + resumed] == [[]] * 4


def stock_trainer(example: ModuleType, stage: int, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = example.make_model()
    zero = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=1)
    data = example.make_data()
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=(zero, None)).train()


@STAGES
def test_the_trainer_itself_is_refused(stage: int, trainer_loop, tmp_path: Path):
    with pytest.raises(zerolab.WorkerError, match=REFUSED[prepare_the_model]):
        on_two_ranks(stock_trainer, trainer_loop, stage, tmp_path)
