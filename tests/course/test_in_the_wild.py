"""Lesson 08: its three checks name each classic mistake, and accept every right style."""

import copy

import pytest
import torch
from support.lessons import solutions_travel_by_value
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zerolab.course.lessons.in_the_wild import check_choices, check_json, check_shard, choices, clusters
from zerolab.course.lessons.in_the_wild.choices import judged
from zerolab.course.lessons.in_the_wild.settings import meaning

solutions_travel_by_value(__name__)


# ---- the first exercise: fully_shard


def blocks_then_root(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)


def right(model, mesh):
    blocks_then_root(model, mesh, reshard_after_forward=False)


def set_afterwards(model, mesh):
    blocks_then_root(model, mesh)
    model.set_reshard_after_forward(False)


def every_call_says_so(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


@pytest.mark.parametrize("shard", [right, set_afterwards, every_call_says_so])
def test_stage_2_passes_however_it_is_written(shard):
    assert check_shard.diagnose(shard) is None


def nothing(model, mesh): ...


def gathered_twice(model, mesh):
    blocks_then_root(model, mesh, reshard_after_forward=True)


def root_twice_too(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def without_root(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)


def root_alone(model, mesh):
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def root_first(model, mesh):
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    without_root(model, mesh)


def first_block_left_out(model, mesh):
    for block in model.blocks[1:]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def never_reduced(model, mesh):
    right(model, mesh)
    model.set_requires_gradient_sync(False)


def whole_at_rest(model, mesh):
    right(model, mesh)
    model.set_reshard_after_backward(False)


def summed(model, mesh):
    right(model, mesh)
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def head_left_out(model, mesh):
    without_root(model, mesh)
    fully_shard(model.head, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def a_list(model, mesh):
    fully_shard(model.blocks, mesh=mesh)


def in_ddp(model, mesh):
    return torch.nn.parallel.DistributedDataParallel(model)


def two_blocks_in_a_unit(model, mesh):
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh, reshard_after_forward=False)
    fully_shard(model.blocks[2], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def a_copy(model, mesh):
    model = copy.deepcopy(model)
    right(model, mesh)
    return model


def every_leaf(model, mesh):
    for module in model.modules():
        if not list(module.children()) and list(module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def only_root_twice(model, mesh):
    without_root(model, mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def one_block_twice(model, mesh):
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=number == 1)
    fully_shard(model, mesh=mesh)


def without_mesh(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=False)


def root_without_mesh(model, mesh):
    without_root(model, mesh)
    fully_shard(model)


def root_ignored(model, mesh):
    without_root(model, mesh)
    outside = {p for name, p in model.named_parameters() if not name.startswith("blocks")}
    fully_shard(model, mesh=mesh, ignored_params=outside)


def in_16_bits(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def wrapped(model, mesh):
    without_root(model, mesh)
    return fully_shard(torch.nn.Sequential(model), mesh=mesh)


def layers_inside_blocks(model, mesh):
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
    right(model, mesh)


def one_layer_inside(model, mesh):
    fully_shard(model.blocks[1].mlp_in, mesh=mesh, reshard_after_forward=False)
    right(model, mesh)


def last_block_not_reduced(model, mesh):
    right(model, mesh)
    model.blocks[2].set_requires_gradient_sync(False, recurse=False)


def both_embeddings_frozen(model, mesh):
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.requires_grad_(False)
    right(model, mesh)


def frozen(model, mesh):
    model.embedding.weight.requires_grad_(False)
    right(model, mesh)


def in_bfloat16(model, mesh):
    model.bfloat16()
    right(model, mesh)


def another_divisor(model, mesh):
    right(model, mesh)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)


def raises(model, mesh):
    raise ValueError("no such block")


@pytest.mark.parametrize(
    ("shard", "diagnosis"),
    [
        (nothing, "not written yet"),
        (layers_inside_blocks, "modules inside of block 0 are units of their own"),
        (one_layer_inside, "a module inside of block 1 is a unit of its own"),
        (last_block_not_reduced, "elements of the gradients are not reduced, so the ranks' copies"),
        (both_embeddings_frozen, "2 parameters, embedding.weight first, have requires_grad=False"),
        (frozen, "embedding.weight has requires_grad=False after your function, so it gets no gradient"),
        (in_bfloat16, "the model's parameters are bfloat16 after your function, and they were float32"),
        (another_divisor, "Cannot use ReduceOp.PREMUL_SUM with the backend of CPUs. set_gradient_divide_fac"),
        (only_root_twice, "the root is gathered twice: freed after forward, and gathered again for backward"),
        (one_block_twice, "1 of the 3 blocks is gathered twice"),
        (without_mesh, "are not sharded over the mesh that your function gets. Without mesh=mesh"),
        (root_without_mesh, "5 parameters, embedding.weight first, are not sharded over the mesh"),
        (gathered_twice, "that is stage 3: after forward each block is freed"),
        (root_twice_too, "that is stage 3, and the root is gathered twice too"),
        (without_root, "5 parameters, embedding.weight first, are not sharded: no rank reduces"),
        (root_alone, "the whole model is one unit"),
        (root_first, "the model was sharded before its blocks"),
        (first_block_left_out, "block 0 is no unit of its own"),
        (never_reduced, "no gradient was reduced"),
        (whole_at_rest, "parameters stay whole after backward"),
        (summed, "the gradients are 2 times the mean"),
        (two_blocks_in_a_unit, "3 gathers for 3 blocks and the root"),
        (a_copy, "fully_shard works in place, so call it on model"),
        (every_leaf, "no block is a unit of its own: the model has 23 other units"),
        (root_ignored, "fully_shard(model) leaves 5 parameters whole, embedding.weight first"),
        (in_16_bits, "messages of 16-bit numbers have half of the bytes"),
        (wrapped, "fully_shard was called on a Sequential around the model, and not on the model"),
        (head_left_out, "1 parameter, head.weight, is not sharded over the mesh"),
        (a_list, "A ModuleList is a list, and has no forward: call fully_shard on each block in it"),
        (raises, "stopped with ValueError: no such block"),
    ],
)
def test_the_first_check_names_the_mistake(shard, diagnosis):
    assert diagnosis in check_shard.diagnose(shard)


def test_a_function_that_does_something_else_is_not_called_unwritten():
    assert check_shard.diagnose(in_ddp).startswith("fully_shard was not called, so nothing is sharded")


# ---- the second: DeepSpeed's JSON

RIGHT = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
STEPS, MICRO = "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {MICRO: 8},
        {"train_batch_size": None, MICRO: 8},
        {STEPS: None, MICRO: 8},
        {"bf16": None, "bfloat16": {"enabled": True}},
        {"zero_optimization": {"stage": 2, "overlap_comm": True}, "gradient_clipping": 1.0},
        {"zero_optimization": {"stage": "2", "reduce_scatter": "true"}},  # which DeepSpeed's models convert
        {"bf16": {"enabled": "on"}, "fp16": {"enabled": 0}},
        {"bf16": {"enabled": 1}, "fp16": {}},
        {"optimiser": {"type": "Adam"}},  # a key that nobody reads changes nothing
    ],
)
def test_right_settings_pass_however_they_are_written(change):
    assert meaning(RIGHT | change) is None


@pytest.mark.parametrize(
    ("change", "diagnosis"),
    [
        ({"stage": 2}, "inside"),
        ({"zero_optimization": {}}, "ZeRO is off"),
        ({"zero_optimization": True}, "the old form, which means stage 1"),
        ({"zero_optimization": False}, "ZeRO is off"),
        (
            {"zero_optimization": 2},
            '"zero_optimization" needs a dictionary, {"stage": 2}, and is 2: DeepSpeed',
        ),
        ({"zero_optimization": [2]}, "and is [2]: DeepSpeed stops there"),
        ({"zero_optimization": {"stage": "auto"}}, "without it the stage is 0. Nothing but the Trainer"),
        ({"zero_optimization": {"stage": 2, "Stage": 2}}, '(did you mean "stage"?): DeepSpeed refuses it'),
        ({"zero_optimization": {"stage": 2, "bf16": {}}}, '"bf16", which stands beside "zero_optimization"'),
        ({"zero_optimization": None}, "and is None: DeepSpeed stops there"),
        ({"zero_optimization": {"stage": 1}}, "stage 1 shards the optimizer state alone"),
        ({"zero_optimization": {"stage": 3}}, "stage 3 shards the parameters too"),
        ({"zero_optimization": {"stage": "two"}}, "is 'two', and has to be 0, 1, 2 or 3: DeepSpeed stops"),
        ({"zero_optimization": {"stage": 4}}, '"stage" is 4, and has to be 0, 1, 2 or 3: DeepSpeed stops'),
        (
            {"zero_optimization": {"stage": [2]}},
            '"stage" is [2], and has to be 0, 1, 2 or 3: DeepSpeed stops',
        ),
        ({"zero_optimization": {"stage": 10**400}}, "has to be 0, 1, 2 or 3: DeepSpeed stops there"),
        ({"zero_optimization": {"stage": True}}, '"stage": True is read as 1, and stage 1 shards the optim'),
        (
            {"amp": {"enabled": True}},
            '"amp" was removed from DeepSpeed, and version 0.19.8 refuses it. In its',
        ),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, '"mics_shard_size" was removed from'),
        ({"bf16": {}, "torch_autocast": {"enabled": True}}, '"torch_autocast" keeps parameters in fp32'),
        ({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, "3Ψ"),
        ({"bf16": {}}, "fp32"),
        ({"bf16": True}, '"bf16" needs'),
        ({"bf16": {}, "bfloat16": {"enabled": True}}, "fp32"),
        ({"bf16": None, "fp16": {"enabled": True}}, "loss scale"),
        ({"fp16": {"enabled": True}}, "both enabled"),
        ({MICRO: 16}, "16 × 2 × 4 GPUs is 128, and train_batch_size is 64"),
        ({"train_batch_size": 8, MICRO: 8}, "8 × 2 × 4 GPUs is 64, and train_batch_size is 8"),
        ({STEPS: 1}, "accumulates 1 micro-batch, and 2 were asked for"),
        ({STEPS: None, MICRO: 16}, "accumulates 1 micro-batch, and"),
        ({"train_batch_size": 128}, "16 × 2 × 4 GPUs is 128, and 64 was asked for"),
        ({STEPS: None}, "accumulates 1 micro-batch of 16 samples, because nothing else is said, and 2 were"),
        ({STEPS: None, "train_batch_size": None, MICRO: 8}, "accumulates 1 micro-batch of 8 samples"),
        (
            {"train_batch_size": None},
            "DeepSpeed stops: it needs train_batch_size or train_micro_batch_size_per",
        ),
        ({STEPS: None, MICRO: 8, "train_batch_size": 60}, "8 × 1 × 4 GPUs is 32, and train_batch_size is 60"),
        ({STEPS: None, MICRO: 8, "train_batch_size": 60}, "It divides without a remainder"),
        (
            {STEPS: None, MICRO: 8, "train_batch_size": 16},
            "train_batch_size is that of all GPUs together, micro-batch × accumulation steps × GPUs, and 16 "
            "is that of one GPU. 8 × 0 × 4 GPUs is 0, and train_batch_size is 16: DeepSpeed refuses that. "
            "It divides without a remainder, and 16 // 8 // 4 is 0 accumulation steps. Asked for is a batch",
        ),
        ({MICRO: 8, "train_batch_size": 16}, "and 16 is that of one GPU. 8 × 2 × 4 GPUs is 64, and train_"),
        ({"train_batch_size": 16}, "and 16 is that of one GPU. 2 × 2 × 4 GPUs is 16, and 64 was asked for"),
        ({MICRO: 16, "train_batch_size": 32}, "and 32 is that of one GPU. 16 × 2 × 4 GPUs is 128, and train"),
        ({"train_batch_size": "auto"}, 'Nothing but the Trainer of transformers fills in "auto"'),
        ({"train_batch_size": True}, "train_batch_size is True: it must be a whole number"),
        ({"bf16": {"enabled": "please"}}, "is 'please', and has to be true or false: DeepSpeed stops there"),
        ({"fp16": None}, '"fp16" needs a dictionary'),
        ({"train_batch_size": "64"}, "train_batch_size is '64'"),
    ],
)
def test_the_second_check_names_the_mistake(change, diagnosis):
    assert diagnosis in meaning(RIGHT | change)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero", "zero_optimization"),
        ("Zero-Optimization", "zero_optimization"),
        ("batch_size", "train_batch_size"),
        ("grad_accum_steps", STEPS),
        ("gradient_accumulation_step", STEPS),
        ("micro_batch_size", MICRO),
        ("bf_16", "bf16"),
    ],
)
def test_a_key_that_nobody_reads_is_named_with_the_one_that_was_meant(wrong, meant):
    value = (RIGHT | {MICRO: 8})[meant]
    without = {key: value for key, value in RIGHT.items() if key != meant and key != "train_batch_size"}
    said = meaning(without | {wrong: value})
    assert said.startswith(f'"{wrong}" is not a key that DeepSpeed reads (did you mean "{meant}"?). ')


@pytest.mark.parametrize("value", [False, "false", 0])
def test_a_setting_that_changes_what_is_sent_changes_what_the_check_says_of_it(value):
    settings = {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": value}}
    result = check_json(lambda: RIGHT | settings)
    assert (
        result
        and "2 micro-batches on each of 4 GPUs for a batch of 64. By default it sends" in result.message
    )
    assert "Your settings turn `use_multi_rank_bucket_allreduce` off" in result.message
    assert "What DeepSpeed sends then was not measured here" in result.message


def test_the_default_written_down_changes_nothing():
    settings = {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": True}}
    assert check_json(lambda: RIGHT | settings).message == check_json(lambda: RIGHT).message


@pytest.mark.parametrize("change", [{MICRO: 32}, {MICRO: 8, "train_batch_size": 8}])
def test_other_wrong_batches_are_not_taken_for_that_of_one_gpu(change):
    assert "that of one GPU" not in meaning(RIGHT | change)


def test_a_key_of_a_section_at_the_top_is_sent_there():
    said = meaning({"overlap_comm": True} | RIGHT | {STEPS: 1})
    assert said.startswith('"overlap_comm" is not a key that DeepSpeed reads: it belongs inside "zero_opt')


def test_empty_settings_are_a_stub():
    assert meaning({}).startswith("not written yet")


# ---- the third: a choice for each cluster

CHOICES = {
    "Colab": (0, "mixed_fp16", False),
    "Kaggle": (1, "mixed_fp16", False),
    "PCIe box": (3, "mixed", True),
    "NVLink box": (2, "mixed", False),
    "Ethernet": (2, "mixed", True),
    "1,024 GPUs": (3, "mixed", True),
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"Colab": (3, "mixed_fp16", False)},
        {"Kaggle": (2, "mixed_fp16", False)},
        {"Ethernet": (1, "mixed", True)},
    ],
)
def test_equally_good_choices_pass(change):
    assert judged(CHOICES | change) is None


@pytest.mark.parametrize(
    ("name", "choice", "diagnosis"),
    [
        ("Colab", None, "not written yet"),
        ("Colab", 2, "the choice is 2: return three things in this order, (stage, precision, checkpointing)"),
        ("Colab", (4, "mixed_fp16", False), "the stage is 4: return a whole number from 0 to 3"),
        ("Colab", (True, "mixed_fp16", False), "the stage is True: return a whole number from 0 to 3"),
        ("Colab", (0, "bf16", False), "one of mixed, mixed_fp16, fp32"),
        ("Colab", (0, "mixed", False), "a T4 has no bf16 units"),
        ("Colab", (0, "mixed_fp16", True), "it fits without checkpointing"),
        ("Colab", (0, "fp32", False), "fp32 leaves the 16-bit matrix units idle"),
        ("Kaggle", (0, "mixed_fp16", False), "17.0 GB of 16, of which 95% can be used. Checkpointing would"),
        ("Kaggle", (0, "mixed_fp16", True), "a higher stage makes room for training without checkpointing"),
        ("Kaggle", (3, "mixed_fp16", False), "stage 3 moves 3Ψ, and a lower stage fits"),
        ("PCIe box", (2, "mixed", True), "does not fit: 29.1 GB of 24"),
        ("NVLink box", (1, "mixed", False), "Checkpointing would make it fit"),
        ("NVLink box", (3, "mixed", False), "stage 3 moves 3Ψ, and a lower stage fits"),
        ("Ethernet", (3, "mixed", False), "16% slower than the best choice that fits: stage 3 moves 3Ψ"),
        ("1,024 GPUs", (2, "mixed", True), "A higher stage shards more"),
        ("1,024 GPUs", (3, "mixed", False), "The plan says 60.7 GB, but the rehearsal adds 20.7 GB"),
    ],
)
def test_the_third_check_names_the_mistake(name, choice, diagnosis):
    assert diagnosis in judged(CHOICES | {name: choice})


def test_one_choice_that_is_not_written_is_named():
    assert judged(CHOICES | {"Ethernet": None}) == "Ethernet: not written yet. 5 of the 6 choices are there"
    assert judged(dict.fromkeys(CHOICES)) == "not written yet: the function returned None"


def test_a_dictionary_of_all_choices_is_no_choice():
    assert "return the choice of the cluster that it is called with" in judged(
        dict.fromkeys(CHOICES, CHOICES)
    )


def by_rehearsal(name):
    """The best choice for the PCIe box, found with the lesson's own functions, as a list."""
    cluster = clusters.CLUSTERS["PCIe box"]
    fitting = [stage for stage in range(4) if clusters.fits(cluster, stage, "mixed", True)]
    return list(CHOICES[name]) if name != "PCIe box" else [min(fitting), "mixed", True]


def test_a_function_may_rehearse_and_return_lists():
    assert check_choices.diagnose(by_rehearsal) is None


def hang(*_):
    while True:
        pass


@pytest.mark.parametrize("check", [check_json, check_choices])
@pytest.mark.parametrize("answer, said", [(hang, "endless loop"), (lambda *_: 1 / 0, "ZeroDivisionError")])
def test_an_answer_that_hangs_or_raises_is_described(monkeypatch, check, answer, said):
    monkeypatch.setattr(choices, "SECONDS", 8.0)
    assert said in check.diagnose(answer)


def test_settings_that_are_no_dictionary():
    assert "is a list: return a dictionary" in check_json.diagnose(lambda: [2])
    assert check_json.diagnose(lambda: print()) == "the function returned None: return a dictionary"
    assert "got a value of type dict" in check_json.diagnose(RIGHT)
