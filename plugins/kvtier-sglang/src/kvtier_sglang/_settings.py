"""Which of SGLang's settings can change the bytes of a page. Closed: all but a reviewed list."""

from __future__ import annotations

from functools import reduce
from typing import Any

# Where the engine runs, and how its processes find each other and share work.
_PLACES = """
base_gpu_id gpu_id_step numa_node use_ray nccl_port dist_timeout dist_init_addr gated_launch_port nnodes
node_rank dp_size load_balance_method enable_dp_attention_local_control_broadcast enable_p2p_check
pp_max_micro_batch_size pp_async_batch_depth ep_join_rank_offset elastic_ep_initial_size max_ep_size
elastic_ep_backend elastic_ep_scale_timeout mooncake_ib_device watchdog_timeout soft_watchdog_timeout
sleep_on_idle custom_sigquit_handler gc_threshold
"""
# Sampling. Dummy weights have a seed of their own.
_SAMPLING = " random_seed mlx_enable_sampling "
# How pages travel between engines that prefill and decode, and how those share a GPU. Which of them an engine
# is, or may become, counts: one that decodes has pages that another has computed.
_DISAGGREGATION = """
decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_transfer_backend
encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder enable_pdmux
pdmux_config_path sm_group_num disaggregation_enable_kv_checksum
disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
"""
# What is kept where and for how long. The layout of host pages is in the pool's shape. A radix cache of
# others counts: pages may have other keys in it.
_CACHES = """
radix_eviction_policy radix_eviction_policy_config disable_radix_cache enable_session_radix_cache
enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy
hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
unified_cache_external_linker_backend unified_cache_external_linker_config enable_lmcache lmcache_config_file
enable_flexkv flexkv_config_file _radix_eviction_policy_explicitly_set hicache_host_memory_fraction
enable_linker_mla_dedup
"""
# Which requests are computed together, and how many: engines choose by the memory that they find.
_SCHEDULING = """
mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_full_tokens_ratio
_swa_full_tokens_ratio_explicitly_set swa_prefix_tails disable_overlap_schedule num_continuous_decode_steps
scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio
enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
prefill_delayer_max_delay_ms min_free_slots_delay cuda_graph_config cuda_graph_backend_decode
cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill
"""
# How weights come into memory: what they are is in the identity's weights.
_LOADING = """
download_dir startup_weight_load_mode weight_loader_disable_mmap weight_loader_prefetch_checkpoints
weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load delete_ckpt_after_loading
model_checksum remote_instance_weight_loader_seed_instance_ip
remote_instance_weight_loader_seed_instance_service_port
remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port weight_cache_socket
weight_cache_timeout modelopt_checkpoint_save_path modelopt_export_path
"""
# What is logged, traced, counted and returned. Hooks that models are given are not among it.
_WATCHING = """
log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config
expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
debug_cuda_graph spec_trace_dir enable_return_hidden_states enable_return_routed_experts
enable_return_indexer_topk enable_return_aux_hidden_states
"""
# The server, and what becomes of text and of answers: they come and go as tokens, which a page's key names.
_SERVING = """
tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
skip_tokenizer_init host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar
sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
enable_ssl_refresh api_key admin_api_key served_model_name chat_template trust_request_chat_template
hf_chat_template_name completion_template file_storage_path enable_cache_report return_input_ids
return_output_ids reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking
tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions
preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
stream_response_default_include_usage incremental_streaming_output enable_streaming_session
constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
constrained_json_max_whitespace_cnt disable_outlines_disk_cache enable_dynamic_batch_tokenizer
dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
disable_tokenizer_batch_decode enable_response_store grpc_response_timeout_secs enable_http_worker_reuseport
watermark_config watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
watermark_max_probability watermark_default_enabled watermark_enforce_all
"""
REVIEWED = frozenset(
    f"{_PLACES}{_SAMPLING}{_DISAGGREGATION}{_CACHES}{_SCHEDULING}{_LOADING}{_WATCHING}{_SERVING}".split()
)
"""Settings that cannot change the bytes of a page."""


def engine_settings() -> dict[str, Any]:
    """Return the settings as the running engine has resolved them; none where no engine runs."""
    from sglang.srt.runtime_context import get_context, get_server_args

    try:
        given = get_server_args()
    except ValueError:  # none were published
        return {}
    from sglang.srt.arg_groups.arg_utils import namespace_of

    context = get_context()
    found: dict[str, Any] = {}
    for field, group in namespace_of(type(given)).items():
        first, *inner = group.split(".")
        found[field] = getattr(reduce(getattr, inner, context.config_bag(first)), field)
    return found
