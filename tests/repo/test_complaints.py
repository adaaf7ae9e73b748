"""Promise: what users of the large engines complain of does not happen here; what works is shown by tests.

Each complaint has the tests that hold against it, and some the public thread in which a user of another
engine tells of it. They run where they are; what is checked here is that they are there, so that a complaint
cannot lose its test when files move.
"""

import ast
import re

import pytest
from support import ROOT, guides

COMPLAINTS = {
    "gradients are lost or rescaled under accumulation": (
        "test_accumulation.py::test_micro_batches_add_up_in_the_order_that_is_written_down",
        "test_clipping.py::test_clipping_goes_on_through_micro_batches_and_steps",
        "test_loss_scale.py::test_micro_batches_of_one_scale_add_up",
    ),
    "stages disagree with each other": (
        "test_parity.py::test_the_same_bits",
        "test_parity.py::test_the_same_optimizer_state",
    ),
    "no resume at another world size; padding corrupts resharding": (
        "test_checkpoint.py::test_a_run_goes_on_where_it_stopped",
        "test_checkpoint.py::test_each_rank_writes_its_share_and_nobody_writes_padding",
    ),
    "overlap races, NaN from buffers freed too early": (
        "test_parity.py::test_overlap_changes_the_trace_and_not_the_bits",
        "test_order.py::test_knobs_turn_the_trace_and_not_the_bits",
    ),
    "the clip norm is wrong": (
        "test_clipping.py::test_norm_and_clipped_gradients_are_torchs_on_the_whole_model",
        "test_clipping.py::test_the_norm_is_the_same_at_every_world_size",
    ),
    "tied weights are split, or never updated on the last rank": (
        "test_parity.py::test_the_same_bits",
        "test_models_as_they_come.py::test_weights_tied_through_their_data_are_refused_because_they_would_come_apart",
    ),
    "frozen, unused or absent gradients": (
        "test_models_as_they_come.py::test_bits_of_plain_training",
        "test_memory.py::test_frozen_parameters_cost_their_own_bytes_alone",
    ),
    "control flow that differs by rank hangs stage 3": (
        "test_diverging_ranks.py::test_the_first_difference_is_named",
    ),
    "a reduce-scatter that is an all-reduce": (
        "test_traffic.py::test_the_wire_carries_all_but_a_ranks_own_share",
        "test_traffic.py::test_what_each_operation_moves",
    ),
    "memory is not as predicted": (
        "test_memory.py::test_every_category_is_the_formulas_on_every_rank",
        "test_peaks.py::test_stage_3_holds_the_unit_at_work_and_those_gathered_ahead",
    ),
    "stage-3 parameters look empty": (
        "test_sharded.py::test_a_sharded_model_says_what_it_is",
        "test_full_params.py::test_full_params_gives_whole_parameters_and_keeps_what_is_written",
    ),
    "a save on rank 0 alone hangs": ("test_diverging_ranks.py::test_the_first_difference_is_named",),
    "consolidation runs out of memory": ("test_checkpoint_memory.py::test_no_rank_ever_holds_the_whole",),
    "empty parameter groups are dropped, which breaks schedulers": (
        "test_optimizers.py::test_groups_and_schedules_mean_the_same_on_every_rank",
    ),
    "the optimizer is bound to stale parameters": (
        "test_replaced_tensors.py::test_a_parameter_that_left_the_flat_buffer_is_noticed",
    ),
    "zero-size parameters and chunks": ("test_parity.py::test_the_same_bits",),
    "N = 1": ("test_parity.py::test_the_same_bits", "test_memory.py::test_the_census_leaves_no_byte_out"),
    # What this engine itself did not pass at first.
    "a saved state dict lacks parameters, taken for tied ones (huggingface/transformers#28630)": (
        "test_state_dict_storages.py::test_a_tool_that_leaves_out_tied_weights_saves_every_parameter",
    ),
    "parameters edited while they are gathered (deepspeedai/DeepSpeed#7811)": (
        "test_user_writes.py::test_full_params_that_one_rank_alone_wrote_in_are_refused",
        "test_user_writes.py::test_one_rank_may_write_for_all",
    ),
    "values written to parameters are lost at the next step (deepspeedai/DeepSpeed#2424)": (
        "test_user_writes.py::test_a_forward_that_writes_is_refused_at_stage_3",
        "test_data_writes.py::test_one_write_in_a_forward_is_refused_at_stage_3_by_its_name",
        "test_data_writes.py::test_the_same_values_on_every_rank_are_kept",
    ),
    "replicas drift apart": (
        "test_user_writes.py::test_a_forward_that_writes_other_values_on_each_rank_is_refused",
        "test_data_writes.py::test_values_that_differ_by_rank_are_found_after_as_many_steps_as_units",
        "test_cleared_gradients.py::test_gradients_cleared_on_one_rank_alone_are_refused",
    ),
    "an optimizer's own step counter is wrong, and so are its updates (NVIDIA/Megatron-LM#5974)": (
        "test_own_counters.py::test_the_single_processs_bits_at_every_stage",
        "test_own_counters.py::test_a_count_is_saved_and_goes_on_at_another_size",
    ),
    "an optimizer that is not elementwise is sharded all the same": (
        "test_probe.py::test_what_depends_on_more_than_one_element_is_refused",
    ),
    "clipping through Accelerate finds no gradients (huggingface/finetrainers#405)": (
        "test_reduced_gradient.py::test_every_use_of_a_reduced_gradient_is_an_error_that_says_how",
        "test_frameworks.py::test_what_accelerate_cannot_do_is_refused",
    ),
    "a model that something else synchronizes too": (
        "test_refused_models.py::test_it_is_refused_with_the_way_out",
        "test_frameworks.py::test_the_trainer_itself_is_refused",
    ),
    "buffers of rank 0 alone come back (facebookresearch/fairseq2#1245)": (
        "test_buffers.py::test_every_rank_gets_its_own_buffers_or_rank_0s",
    ),
    "a module's extra state is lost (deepspeedai/DeepSpeed#3510)": (
        "test_extra_state.py::test_every_rank_gets_back_its_own_or_rank_0s",
    ),
    "another checkpoint than the one meant is loaded without a word (deepspeedai/DeepSpeed#8499)": (
        "test_damage.py::test_no_flipped_bit_in_latest_names_another_generation",
        "test_two_runs.py::test_a_run_that_finds_anothers_newer_save_is_told",
    ),
    "a damaged checkpoint is loaded, or part of it": (
        "test_damage.py::test_any_flipped_bit_is_refused_or_changes_nothing",
    ),
    "loading a checkpoint runs code": (
        "test_trust.py::test_no_code_in_an_extra_runs_unless_it_is_asked_for",
        "test_trust.py::test_no_code_in_any_other_file_runs",
    ),
    "all ranks draw the same random numbers": (
        "test_seeds.py::test_no_two_ranks_and_no_two_launches_draw_the_same",
    ),
}


FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def functions_in(file: str) -> set[str]:
    tree = ast.parse(FILES[file].read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_file_name_names_one_test_file():
    assert len(FILES) == len(list((ROOT / "tests").rglob("test_*.py")))


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_a_complaint_has_tests_that_hold_against_it(complaint: str):
    for name in COMPLAINTS[complaint]:
        file, function = name.split("::")
        assert function in functions_in(file), name


def test_every_line_of_the_table_of_what_works_names_a_test_file():
    page = guides.text("docs/what_works.md")
    rows = re.findall(r"^\| (?!what a|---)(.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for what, shown in rows:
        files = re.findall(r"`(test_\w+\.py)`", shown)
        assert files and set(files) <= FILES.keys(), what
        assert shown.split(":")[0] in ("works", "refused", "named"), what
