"""vLLM's settings that cannot change the bytes of a chunk, each with the reason. Reviewed with vLLM 0.31 to
0.33.

A setting that is not listed here is part of the cache's identity (``_canonical``), so a field that a newer
vLLM adds counts at once. An entry must hold for every value of the setting: the bytes of a block may differ
by rounding, as they do on another GPU or beside other requests, and in no other way.

Entries name vLLM's classes, so the model and the draft model share them. If a field holds a configuration,
its entry covers all of it, including fields that a newer vLLM adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final


def _by_name(groups: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    return {name: reason for reason, names in groups for name in names.split()}


SETTINGS: Final = _by_name(
    (
        (
            "decides which tokens are computed together and when",
            """VllmConfig.scheduler_config SpeculativeConfig.num_speculative_tokens_per_batch_size
            ParallelConfig.enable_dbo ParallelConfig.ubatch_size ParallelConfig.dbo_decode_token_threshold
            ParallelConfig.dbo_prefill_token_threshold ParallelConfig.dp_sync_interval
            ParallelConfig.disable_nccl_for_dp_synchronization""",
        ),
        (
            "metrics, logs, events, profiles and the engine's life",
            """VllmConfig.observability_config VllmConfig.logging_config VllmConfig.profiler_config
            VllmConfig.kv_events_config VllmConfig.aux_output_config VllmConfig.shutdown_timeout
            VllmConfig.watchdog_config VllmConfig.instance_id VllmConfig.weight_transfer_config
            ParallelConfig.enable_fault_tolerance ParallelConfig.fault_tolerance_config
            ModelConfig.enable_trace_replay""",
        ),
        (
            "decides which token is drawn, not what its KV is",
            """VllmConfig.structured_outputs_config VllmConfig.reasoning_config VllmConfig.watermark_config
            ModelConfig.max_logprobs ModelConfig.logprobs_mode ModelConfig.return_sampling_mask
            ModelConfig.use_fp64_gumbel ModelConfig.logits_processors ModelConfig.pooler_config
            ParallelConfig.enable_batch_sharded_sampling""",
        ),
        (
            "decides which drafts are proposed and accepted; the KV of a token is the model's",
            """SpeculativeConfig.rejection_sample_method SpeculativeConfig.synthetic_acceptance_rates
            SpeculativeConfig.synthetic_acceptance_length SpeculativeConfig.enable_adaptive_verification
            SpeculativeConfig.draft_sample_method SpeculativeConfig.prompt_lookup_max
            SpeculativeConfig.prompt_lookup_min SpeculativeConfig.suffix_decoding_max_tree_depth
            SpeculativeConfig.suffix_decoding_max_cached_requests
            SpeculativeConfig.suffix_decoding_max_spec_factor
            SpeculativeConfig.suffix_decoding_min_token_prob
            SpeculativeConfig.use_local_argmax_reduction""",
        ),
        (
            "tokenizer and API: a chunk's key names the tokens themselves",
            """ModelConfig.tokenizer ModelConfig.tokenizer_mode ModelConfig.tokenizer_revision
            ModelConfig.skip_tokenizer_init ModelConfig.served_model_name ModelConfig.hf_token
            ModelConfig.io_processor_plugin ModelConfig.renderer_num_workers
            ModelConfig.allowed_local_media_path ModelConfig.allowed_media_domains
            MultiModalConfig.interleave_mm_strings""",
        ),
        (
            "a part of the identity of its own: weights, kv_cache, parallel, hash, device",
            """ModelConfig.model ModelConfig.model_weights ModelConfig.revision
            ModelConfig.seed SpeculativeConfig.revision VllmConfig.device_config CacheConfig.block_size
            CacheConfig.cache_dtype CacheConfig.kv_cache_layout CacheConfig.prefix_match_unit
            CacheConfig.hash_block_size CacheConfig.sliding_window CacheConfig.prefix_caching_hash_algo
            CacheConfig.kv_cache_dtype_skip_layers CacheConfig.mamba_block_size
            CacheConfig.mamba_page_size_padded CacheConfig.skip_page_size_padded
            CacheConfig.effective_attention_block_size""",
        ),
        (
            "made of other settings, which count",
            """ModelConfig.hf_text_config ModelConfig.hf_config_path ModelConfig.enforce_eager
            ModelConfig.is_submodel_config ModelConfig.spec_target_max_model_len
            ModelConfig.word_embeddings_untied_by_checkpoint ModelConfig.allow_deprecated_quantization
            CacheConfig.user_specified_block_size CacheConfig.user_specified_mamba_block_size
            CacheConfig._block_size_resolved CacheConfig.is_attention_free
            CacheConfig.cache_hit_alignment_tokens SpeculativeConfig.target_model_config
            SpeculativeConfig.target_parallel_config SpeculativeConfig.enforce_eager
            SpeculativeConfig.max_model_len VllmConfig.optimization_level""",
        ),
        (
            "made of quantization, quantization_config, hf_config and the model's files, which count; "
            "a worker changes it in place while it loads the weights",
            "VllmConfig.quant_config",
        ),
        (
            "how much memory there is, and what else is kept in it",
            """CacheConfig.gpu_memory_utilization CacheConfig.kv_cache_memory_bytes
            CacheConfig.num_gpu_blocks CacheConfig.num_gpu_blocks_override CacheConfig.num_cpu_blocks
            CacheConfig.kv_cache_size_tokens CacheConfig.kv_cache_max_concurrency
            CacheConfig.enable_prefix_caching CacheConfig.prefix_cache_retention_interval
            CacheConfig.kv_offloading_size CacheConfig.kv_offloading_backend
            CacheConfig.simple_cpu_offload_num_blocks VllmConfig.offload_config
            ModelConfig.enable_sleep_mode ModelConfig.sleep_preserve_parameter_names
            ModelConfig.sleep_mode_backend ModelConfig.sleep_mode_offload_cudagraph
            ModelConfig.enable_nccl_comm_suspend ModelConfig.enable_cumem_allocator
            LoRAConfig.max_loras LoRAConfig.max_cpu_loras LoRAConfig.specialize_active_lora
            MultiModalConfig.limit_per_prompt MultiModalConfig.mm_processor_cache_gb
            MultiModalConfig.mm_processor_cache_type MultiModalConfig.mm_hasher_algorithm
            MultiModalConfig.mm_shm_cache_max_object_size_mb MultiModalConfig.skip_mm_profiling
            MultiModalConfig.mm_tensor_ipc MultiModalConfig.mm_ipc_gpu_memory_gb
            AttentionConfig.flash_attn_max_num_splits_for_cuda_graph
            AttentionConfig.tq_max_kv_splits_for_cuda_graph
            AttentionConfig.sparse_mla_prefill_workspace_factor""",
        ),
        (
            "how weights are read, not which",
            """LoadConfig.download_dir LoadConfig.safetensors_load_strategy
            LoadConfig.safetensors_prefetch_num_threads LoadConfig.safetensors_prefetch_block_size
            LoadConfig.device LoadConfig.use_tqdm_on_load LoadConfig.pt_load_map_location
            ParallelConfig.max_parallel_loading_workers ParallelConfig.enable_ep_weight_filter""",
        ),
        (
            "sizes are in 'parallel', or undone by the canonical layout; the rest is who computes what where",
            """ParallelConfig.pipeline_parallel_size ParallelConfig.tensor_parallel_size
            ParallelConfig.prefill_context_parallel_size ParallelConfig.decode_context_parallel_size
            ParallelConfig.world_size ParallelConfig.rank ParallelConfig.nnodes ParallelConfig.node_rank
            ParallelConfig.master_addr ParallelConfig.master_port ParallelConfig.data_parallel_size
            ParallelConfig.data_parallel_size_local ParallelConfig.data_parallel_rank
            ParallelConfig.data_parallel_rank_local ParallelConfig.data_parallel_index
            ParallelConfig.data_parallel_master_ip ParallelConfig.data_parallel_master_port
            ParallelConfig.data_parallel_rpc_port ParallelConfig.data_parallel_backend
            ParallelConfig.data_parallel_external_lb ParallelConfig.data_parallel_hybrid_lb
            ParallelConfig._data_parallel_master_port_list ParallelConfig._coord_store_port
            ParallelConfig._api_process_count ParallelConfig._api_process_rank
            ParallelConfig._allow_auto_resolve_cp_interleave_size
            ParallelConfig.is_moe_model ParallelConfig.enable_eplb ParallelConfig.eplb_config
            ParallelConfig.expert_placement_strategy ParallelConfig.enable_elastic_ep
            ParallelConfig.elastic_ep_max_dp_size ParallelConfig.disable_custom_all_reduce
            ParallelConfig.enable_shm_tensor_arena ParallelConfig.ray_workers_use_nsight
            ParallelConfig.ray_runtime_env ParallelConfig.placement_group
            ParallelConfig.distributed_executor_backend ParallelConfig.worker_cls
            ParallelConfig.sd_worker_cls ParallelConfig.numa_bind ParallelConfig.numa_bind_nodes
            ParallelConfig.numa_bind_cpus ParallelConfig.assigned_physical_gpu_ids
            ParallelConfig.distributed_timeout_seconds ParallelConfig.cpu_distributed_timeout_seconds
            SpeculativeConfig.draft_tensor_parallel_size SpeculativeConfig.tensor_parallel_size
            MultiModalConfig.mm_encoder_tp_mode
            PassConfig.enable_sp PassConfig.fuse_gemm_comms PassConfig.sp_min_token_num
            PassConfig.fuse_allreduce_rms PassConfig.fi_allreduce_fusion_max_size_mb""",
        ),
        (
            "when kernels are compiled, captured and tuned, and for which batches",
            """CompilationConfig.debug_dump_path CompilationConfig.cache_dir
            CompilationConfig.local_cache_dir CompilationConfig.compile_cache_save_format
            CompilationConfig.splitting_ops CompilationConfig.ir_enable_torch_wrap
            CompilationConfig.cudagraph_mm_encoder CompilationConfig.encoder_cudagraph_token_budgets
            CompilationConfig.encoder_cudagraph_max_vision_items_per_batch
            CompilationConfig.encoder_cudagraph_max_frames_per_batch
            CompilationConfig.cudagraph_decoder_replay CompilationConfig.decoder_replay_trim_threshold
            CompilationConfig.decoder_replay_cudagraph_capture_sizes CompilationConfig.compile_sizes
            CompilationConfig.compile_ranges_endpoints CompilationConfig.cudagraph_mode
            CompilationConfig.cudagraph_num_of_warmups CompilationConfig.cudagraph_capture_sizes
            CompilationConfig.cudagraph_copy_inputs CompilationConfig.cudagraph_specialize_lora
            CompilationConfig.max_cudagraph_capture_size CompilationConfig.use_inductor_graph_partition
            CompilationConfig.dynamic_shapes_config CompilationConfig.fast_moe_cold_start
            CompilationConfig.enabled_custom_ops CompilationConfig.disabled_custom_ops
            CompilationConfig.traced_files CompilationConfig.compilation_time
            CompilationConfig.encoder_compilation_time CompilationConfig.static_forward_context
            CompilationConfig.static_all_moe_layers
            CompilationConfig.inductor_compile_config.size_asserts
            CompilationConfig.inductor_compile_config.nan_asserts
            CompilationConfig.inductor_compile_config.alignment_asserts
            KernelConfig.enable_flashinfer_autotune KernelConfig.enable_rocm_segmented_attn_autotune
            KernelConfig.enable_cutedsl_warmup KernelConfig.enable_jit_warmup""",
        ),
        (
            "made of pass_config, which counts; set where the model is compiled",
            """CompilationConfig.inductor_compile_config.post_grad_custom_post_pass
            CompilationConfig.inductor_compile_config.pre_grad_custom_pass
            CompilationConfig.inductor_compile_config.joint_custom_pre_pass""",
        ),
        (
            "how vLLM finds kvtier and other engines; the length of a chunk is in 'kv_cache'",
            """KVTransferConfig.kv_connector KVTransferConfig.engine_id KVTransferConfig.kv_role
            KVTransferConfig.kv_buffer_device KVTransferConfig.kv_buffer_size KVTransferConfig.kv_port
            KVTransferConfig.kv_ip KVTransferConfig.kv_rank KVTransferConfig.kv_parallel_size
            KVTransferConfig.kv_connector_extra_config KVTransferConfig.kv_connector_module_path
            KVTransferConfig.kv_load_failure_policy""",
        ),
        (
            "of a Hugging Face configuration: where it comes from; the model's dtype counts as resolved",
            "PretrainedConfig._name_or_path PretrainedConfig.transformers_version "
            "PretrainedConfig.torch_dtype PretrainedConfig.dtype",
        ),
        (
            "how far apart blocks are on the device",
            "KVCacheSpec.block_stride_alignment",
        ),
    )
)
"""Fields, each with the reason why it cannot change the bytes of a chunk."""

LENGTH_SETTINGS: Final = {
    "ModelConfig.max_model_len": "bounds requests",
    "ModelConfig.generation_config": "defaults of sampling",
    "ModelConfig.override_generation_config": "defaults of sampling",
}
"""Fields that are excluded but for the models that compute with them: see ``computes_with_length``."""

LENGTH_INDEPENDENT_ROPES: Final = frozenset(
    {
        *("default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "proportional"),
        *("mrope", "mllama4"),
    }
)
"""Kinds of rotary embedding whose angles do not depend on ``max_model_len``.

``longrope`` picks its factors by it, ``dynamic`` and others scale by a length; what is not listed counts.
"""

LENGTH_DEPENDENT_MODELS: Final = (
    *(
        "Llama4*",
        "EagleLlama4*",
    ),  # attention's temperature, from max_model_len and generation config
    *("Gemma4*", "DiffusionGemma*"),  # read the generation config
    *("Inkling*", "Dots3Note*", "Step5*", "MuseSpark*"),  # hand max_model_len to kernels and processors
    *("Transformers*", "Terratorch*"),  # code that is not vLLM's
)
"""Architectures, as patterns, that compute with ``max_model_len`` or with the generation config."""

ENVIRONMENT: Final = _by_name(
    (
        (
            "logs, metrics, traces and debugging",
            """VLLM_CONFIGURE_LOGGING VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
            VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR VLLM_LOG_STATS_INTERVAL VLLM_TRACE_FUNCTION
            VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_LOG_BATCHSIZE_INTERVAL
            VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GC_DEBUG
            VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO
            VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH VLLM_COMPUTE_NANS_IN_LOGITS
            VLLM_RAISE_ON_LOGIT_NANS VLLM_GPU_SYNC_CHECK VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS
            VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CI_USE_S3 VLLM_MOONCAKE_STORE_TIER_LOG
            VLLM_REQUEST_BODY_LOG_LEVEL VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES""",
        ),
        (
            "where files and caches lie, and how the package was built",
            """VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
            VLLM_XLA_CACHE_PATH VLLM_RPC_BASE_PATH VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH
            VLLM_NCCL_INCLUDE_PATH VLLM_LORA_RESOLVER_CACHE_DIR VLLM_MODEL_REDIRECT_PATH
            VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
            VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT
            VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_DISABLE_COMPILE_CACHE
            VLLM_FORCE_AOT_LOAD VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
            VLLM_V1_USE_OUTLINES_CACHE VLLM_ENABLE_STARTUP_PLAN""",
        ),
        (
            "addresses, processes and their limits",
            """VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_API_KEY VLLM_HTTP_TIMEOUT_KEEP_ALIVE
            VLLM_ENGINE_READY_TIMEOUT_S VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
            VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL
            VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_SERVER_DEV_MODE VLLM_ENABLE_V1_MULTIPROCESSING
            VLLM_WORKER_MULTIPROC_METHOD VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH
            VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB
            VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
            VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ALLOW_RUNTIME_LORA_UPDATING
            VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS
            VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
            VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE
            VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS
            VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
            VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
            VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
            VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM
            VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
            VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS
            VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST
            VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_LOAD_RECV_THREADS
            VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
            VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS
            VLLM_SKIP_P2P_CHECK VLLM_SNAPSHOT_TIMEOUT_S VLLM_MORIIO_TRANSFER_TIMEOUT_S
            VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS""",
        ),
        (
            "a name that vLLM draws anew for each engine",
            "VLLM_DIST_IDENT",
        ),
        (
            "what requests may ask for, and how answers are read",
            """VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE
            VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES
            VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB
            VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MEDIA_URL_ALLOW_REDIRECTS
            VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
            VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS
            VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_XGRAMMAR_CACHE_MB
            VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
            VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API
            VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
            VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE
            VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
            VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL
            VLLM_ALLOW_LONG_MAX_MODEL_LEN""",
        ),
        (
            "memory, processors and warming up",
            """VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV
            VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
            VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY
            VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_ENABLE_CUDAGRAPH_GC
            VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
            VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DEEP_GEMM_WARMUP VLLM_FASTSAFETENSORS_QUEUE_SIZE
            VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_LORA_DISABLE_PDL
            VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD
            VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN""",
        ),
        (
            "read into a setting, which counts or is listed above",
            "VLLM_KV_CACHE_LAYOUT VLLM_PP_LAYER_PARTITION VLLM_DCP_Q_REPLICATE",
        ),
    )
)
"""Environment variables of vLLM that cannot change the bytes of a chunk, each with the reason."""

LIBRARY_VARIABLES: Final = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "ONEDNN_DEFAULT_FPMATH_MODE"),
)
"""Variables of the libraries below vLLM that change how numbers are computed.

The one list that is open: nobody can name every variable of every library.
"""
