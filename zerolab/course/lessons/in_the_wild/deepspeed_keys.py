"""The keys that DeepSpeed reads, and the one that was meant by another word.

Source: the modules of DeepSpeed's runtime that read its settings, of August 2026 and of version 0.19.8. At
the top DeepSpeed does not read keys that it does not know. In a section it refuses them. It refuses a key of
a feature that it no longer has, too.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OTHERS = """
    fp16 bfloat16 optimizer scheduler gradient_clipping amp torch_autocast data_types
    communication_data_type seq_parallel_communication_data_type prescale_gradients
    gradient_predivide_factor gradient_allreduce_op sparse_gradients managed_gradient_accumulation
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print dump_state disable_allgather
    wall_clock_breakdown memory_breakdown log_level activation_checkpointing comms_logger flops_profiler
    tensorboard wandb csv_monitor comet sparse_attention pipeline progressive_layer_drop
    curriculum_learning data_efficiency checkpoint aio dataloader_drop_last nebula datastates_ckpt
    weight_quantization compression_training quantize_training compile timers tensor_parallel
    expert_parallel elasticity autotuning eigenvalue hybrid_engine graph_harvesting sequence_parallel_size
    use_data_before_expert_parallelism vocabulary_size
"""
TOP = ("zero_optimization", "bf16", *_BATCH, *_OTHERS.split())
_STAGE_3 = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
    use_all_reduce_for_fetch_params allgather_sequential
"""
_ZERO = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
    offload_param offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory
    cpu_offload stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
    round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
    mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory leaf_module compute_grad_norm parameter_alignment
"""
_BF16 = (
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
_FP16 = """
    enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
    min_loss_scale fp16_master_weights_and_grads
"""
SECTIONS: dict[str, tuple[str, ...]] = {
    "zero_optimization": (
        *_ZERO.split(), *_STAGE_3.split(), *(f"stage3_{name}" for name in _STAGE_3.split())
    ),
    "bf16": tuple(_BF16.split()),
    "bfloat16": tuple(_BF16.split()),
    "fp16": tuple(_FP16.split()),
}  # fmt: skip
_REMOVED = """
    nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention
    elasticity graph_harvesting curriculum_learning progressive_layer_drop
"""
_REMOVED_FROM_ZERO = "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"


def unread(config: Mapping[str, Any]) -> list[str]:
    """Say of each key at the top that DeepSpeed does not read what was meant by it."""
    return [f'"{key}" is not a key that DeepSpeed reads{_meant(key)}' for key in config if key not in TOP]


def refused(config: Mapping[str, Any]) -> str | None:
    """Return the first key that has been removed, or that stands in a section and is not one of its keys."""
    zero = config.get("zero_optimization")
    removed = [key for key in config if key in _REMOVED.split()]
    removed += [key for key in zero if key in _REMOVED_FROM_ZERO.split()] if isinstance(zero, dict) else []
    if removed:
        instead = '. In its place are "bf16" and "fp16"' if removed[0] == "amp" else ""
        return f'"{removed[0]}" was removed from DeepSpeed, and version 0.19.8 refuses it{instead}'
    for section, keys in SECTIONS.items():
        own = config.get(section)
        for key in own if isinstance(own, dict) else ():
            if key not in keys:
                place = f', which stands beside "{section}"' if key in TOP else _near(key, keys)
                return f'"{section}" has no key "{key}"{place}: DeepSpeed refuses it'
    return None


def _meant(key: Any) -> str:
    section = next((name for name, keys in SECTIONS.items() if key in keys), None)
    return f': it belongs inside "{section}"' if section else _near(key, TOP)


def _near(key: Any, known: Sequence[str]) -> str:
    best = max(known, key=lambda each: _likeness(str(key), each))
    return f' (did you mean "{best}"?)' if _likeness(str(key), best) > 0.6 else ""


def _likeness(word: str, known: str) -> float:
    """From the letters in common and from the words in common; the earlier of two alike comes first."""
    word = word.lower().replace("-", "_").replace(" ", "_")
    letters = SequenceMatcher(None, word, known).ratio()
    words = set(word.split("_"))
    return max(letters, 0.9 * len(words & set(known.split("_"))) / len(words)) + 0.05 * letters
