"""The parameters of what is called of FlashInfer, as its version 0.7.2 names them: those that have
to be given, and the others."""

VERSION = "0.7.2.post1"
PARAMETERS: dict[str, tuple[str, str]] = {
    "BatchPrefillWithPagedKVCacheWrapper": (
        "float_workspace_buffer",
        (
            "kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
            "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args "
            "jit_kwargs variant_owns_mask"
        ),
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        (
            "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
            "num_kv_heads head_dim_qk page_size"
        ),
        (
            "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode "
            "use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta "
            "q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
            "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q "
            "block_tables max_token_per_sequence max_sequence_kv fixed_split_size "
            "disable_split_kv uniform_q_len"
        ),
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": (
        "q paged_kv_cache",
        (
            "q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl "
            "window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax "
            "uses_spcompress"
        ),
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": (
        "float_workspace_buffer",
        (
            "kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf mask_indptr_buf "
            "backend jit_args jit_kwargs variant_owns_mask"
        ),
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk",
        (
            "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode "
            "use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta "
            "q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
            "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr fixed_split_size "
            "disable_split_kv seq_lens seq_lens_q max_token_per_sequence max_sequence_kv v_indptr "
            "o_indptr uniform_q_len"
        ),
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": (
        "q k v",
        (
            "q_scale k_scale v_scale o_scale out lse return_lse lse_base lse_layout enable_pdl "
            "kv_cache_sf"
        ),
    ),
    "trtllm_batch_decode_with_kv_cache": (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len",
        (
            "bmm1_scale bmm2_scale window_left out out_dtype o_sf_scale o_sf_vec_size sinks "
            "kv_layout enable_pdl backend q_len_per_req o_scale mask max_q_len cum_seq_lens_q "
            "skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse "
            "return_lse bmm1_scale_log2 multi_ctas_kv_counter_buffer "
            "enable_block_sparse_attention cp_world cp_rank causal_seqlens_kv_global "
            "bf16q_fp8kv_transform_mode request_order request_order_plan"
        ),
    ),
    "cutlass_fused_moe": (
        (
            "input token_selected_experts token_final_scales fc1_expert_weights "
            "fc2_expert_weights output_dtype quant_scales"
        ),
        (
            "fc1_expert_biases fc2_expert_biases input_sf swiglu_alpha swiglu_beta swiglu_limit "
            "tp_size tp_rank ep_size ep_rank cluster_size cluster_rank output enable_alltoall "
            "use_deepseek_fp8_block_scale use_w4_group_scaling use_mxfp8_act_scaling "
            "min_latency_mode use_packed_weights use_wfp4afp8_humming tune_max_num_tokens "
            "enable_pdl activation_type swizzled_input_sf use_fused_finalize profile_ids "
            "workspace_buffer clamped_relu2_limit situ_beta situ_linear_beta backend"
        ),
    ),
}
