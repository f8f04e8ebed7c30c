"""Field names of requests, and what becomes of each, by endpoint. Those of the openai and anthropic
packages are read from them; those of the request models of vLLM, SGLang, Dynamo and llama.cpp are
kept here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import beta_output_config_param
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    response_compact_params,
    response_create_params,
    response_text_config_param,
)
from pydantic import BaseModel

from kvrelay.cluster.api.anthropic.schema import CountRequest, MessagesRequest, OutputConfig
from kvrelay.cluster.api.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from kvrelay.cluster.api.openai.schema import ChatRequest, CompletionRequest
from kvrelay.cluster.api.parameters import (
    CHAT,
    COMPACT,
    COMPLETION,
    EMBEDDING,
    MESSAGES,
    OUTPUT_CONFIG,
    REASONING,
    RERANK,
    RESPONSES,
    SCORE,
    TEXT_OPTIONS,
    TOKENIZE,
    Fields,
)
from kvrelay.cluster.api.responses.schema import (
    CompactRequest,
    Reasoning,
    ResponsesRequest,
    TextOptions,
)
from kvrelay.cluster.api.utility.tokens import DetokenizeRequest, TokenizeRequest

# vLLM 0.32, SGLang 0.5.
_VLLM_SAMPLING = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words add_special_tokens structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection stream_interval thinking_token_budget response_format
    logits_processors guided_json guided_regex guided_choice guided_grammar
    guided_whitespace_pattern
"""
_SGLANG_SAMPLING = """
    top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
    ignore_eos skip_special_tokens lora_path session_params response_format custom_params
    custom_logit_processor bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt priority custom_labels
    return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details
"""
_DYNAMO = "nvext"
_LLAMA_CPP = """
    grammar json_schema n_predict n_probs samplers repeat_penalty repeat_last_n mirostat
    mirostat_tau mirostat_eta typical_p top_n_sigma dynatemp_range dynatemp_exponent dry_multiplier
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability
    xtc_threshold
"""
_VLLM_CHAT = f"""
    {_VLLM_SAMPLING} include_reasoning echo add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    {_DYNAMO} {_LLAMA_CPP}
"""
_SGLANG_CHAT = f"""
    {_SGLANG_SAMPLING} continue_final_message separate_reasoning stream_reasoning
    chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video task
    reasoning_effort
"""
_COMPLETION = f"{_VLLM_SAMPLING} {_SGLANG_SAMPLING} {_DYNAMO} {_LLAMA_CPP} prompt_embeds"
_EMBEDDING = f"""
    {_DYNAMO}
    truncate_prompt_tokens truncation_side request_id priority mm_processor_kwargs cache_salt
    add_special_tokens messages chat_template encoding_format dimensions embed_dtype endianness
    use_activation normalize additional_data padding rid lora_path
"""
_SCORING = """
    model user truncate_prompt_tokens padding truncation_side request_id priority cache_salt
    mm_processor_kwargs use_activation max_tokens_per_query max_tokens_per_doc instruction
    chat_template_kwargs rid lora_path instruct
"""
_SCORE = f"""
    {_SCORING} data_1 data_2 queries documents items text_1 text_2 query label_token_ids
    apply_softmax item_first return_pooled_hidden_states
"""
_RERANK = f"{_SCORING} query documents top_n return_documents"  # Jina's and Cohere's among them
_RESPONSES = """
    top_k logit_bias skip_special_tokens include_stop_str_in_output request_id media_io_kwargs
    mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
    structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params
    ec_transfer_params chat_template_kwargs presence_penalty frequency_penalty min_p rid
    client_metadata
"""
_TOKENIZE = """
    model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    tools
"""
# What `/tokenize` reads of a chat.
_OF_CHATS = "tools add_generation_prompt continue_final_message chat_template_kwargs"
_NONE = Fields({}, {})


@dataclass(frozen=True)
class Endpoint:
    path: str
    model: type[BaseModel]
    fields: Fields
    known: frozenset[str]  # to OpenAI or Anthropic, vLLM and SGLang
    others: frozenset[str] = frozenset()  # that are obeyed besides those of the model

    @property
    def obeyed(self) -> set[str]:
        return {*self.model.model_fields, *self.others} - {*self.fields.harmless}


def _of(types: Iterable[Any]) -> set[str]:
    return {name for kind in types for name in kind.__annotations__}


def _openai(module: Any, *names: str) -> set[str]:
    return _of(getattr(module, name) for name in names)


_BASE, _PLAIN = "CreateParamsBase", "CreateParamsNonStreaming"
_ANTHROPIC = _openai(message_create_params, f"Message{_BASE}", f"Message{_PLAIN}") | _openai(
    beta_create_params, f"Message{_BASE}", f"Message{_PLAIN}", f"ParseMessage{_BASE}"
)
_COUNTED = _openai(message_count_tokens_params, "MessageCountTokensParams") | _openai(
    beta_count_params, "MessageCountTokensParams"
)
ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        ChatRequest,
        CHAT,
        frozenset(
            _openai(chat_create_params, f"Completion{_BASE}", f"Completion{_PLAIN}")
            | {*_VLLM_CHAT.split(), *_SGLANG_CHAT.split()}
        ),
    ),
    Endpoint(
        "/v1/completions",
        CompletionRequest,
        COMPLETION,
        frozenset(
            _openai(completion_create_params, f"Completion{_BASE}", f"Completion{_PLAIN}")
            | {*_COMPLETION.split()}
        ),
    ),
    Endpoint(
        "/v1/embeddings",
        EmbeddingRequest,
        EMBEDDING,
        frozenset(
            _openai(embedding_create_params, "EmbeddingCreateParams") | {*_EMBEDDING.split()}
        ),
    ),
    Endpoint("/v1/score", ScoreRequest, SCORE, frozenset(_SCORE.split())),
    Endpoint("/v1/rerank", RerankRequest, RERANK, frozenset(_RERANK.split())),
    Endpoint(
        "/v1/responses",
        ResponsesRequest,
        RESPONSES,
        frozenset(
            _openai(response_create_params, f"Response{_BASE}", f"Response{_PLAIN}")
            | {*_RESPONSES.split()}
        ),
    ),
    Endpoint(
        "/v1/responses/compact",
        CompactRequest,
        COMPACT,
        frozenset(
            _openai(response_create_params, f"Response{_BASE}", f"Response{_PLAIN}")
            | _openai(response_compact_params, "ResponseCompactParams")
            | {*_RESPONSES.split()}
        ),
    ),
    Endpoint("/v1/messages", MessagesRequest, MESSAGES, frozenset(_ANTHROPIC)),
    Endpoint("/v1/messages/count_tokens", CountRequest, MESSAGES, frozenset(_COUNTED)),
    Endpoint(
        "/tokenize",
        TokenizeRequest,
        TOKENIZE,
        frozenset(_TOKENIZE.split()),
        frozenset(_OF_CHATS.split()),
    ),
    Endpoint("/detokenize", DetokenizeRequest, _NONE, frozenset(("model", "tokens"))),
)
# Objects within a request: the endpoint, the field, and what it may have.
NESTED = (
    ("/v1/responses", "reasoning", Reasoning, REASONING, _of([shared_params.Reasoning])),
    (
        "/v1/responses",
        "text",
        TextOptions,
        TEXT_OPTIONS,
        _openai(response_text_config_param, "ResponseTextConfigParam"),
    ),
    (
        "/v1/messages",
        "output_config",
        OutputConfig,
        OUTPUT_CONFIG,
        _openai(beta_output_config_param, "BetaOutputConfigParam"),
    ),
)
