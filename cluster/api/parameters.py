"""Fields of requests that are refused by name, and fields that are harmless, by endpoint; those
of objects within them too.

A field that OpenAI, Anthropic, vLLM, SGLang or llama.cpp know for an endpoint is obeyed, which
means that the model of the body has it and something reads it; or refused, where it would change
the answer and cannot be obeyed; or harmless: left alone, with a reason, because the answer is right
without it. A test holds this for all their fields, and docs/api.md has the table. A field that none
of them knows is ignored: clients and proxies add their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NOTHING: tuple[Any, ...] = (False, [], {}, "")


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` goes into the error. Let through are null and the values in `but`; where there are
    none, all that say nothing."""

    why: str
    but: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    refused: Mapping[str, Refused]
    harmless: Mapping[str, str]  # field -> why the answer is right without it

    def check(self, given: Mapping[str, Any] | None) -> None:
        """given: the fields that the model of a body does not have. Raises ValueError."""
        for name, value in (given or {}).items():
            refused = self.refused.get(name)
            if refused and value not in (None, *(refused.but or _NOTHING)):
                raise ValueError(f"'{name}': {refused.why}")


_LABEL = "a label of the caller's; nothing depends on it"
_OWN_IDS = "answers have own ids; send X-Request-Id"
_TEXT_ONLY = "the model's files say it"
_NOT_MOVED = "KV is moved by this server's own router; leave it out"
_NO_TEMPLATE = "the server's own chat template is used"

_PADDING = Refused("texts are not padded", but=("do_not_pad",))
_OF_LABELS = "scores are cosines; completions have logprob_token_ids"

# llama.cpp's, whose clients send all of them: what says nothing is let through.
_LLAMA_CPP = {
    "dry_multiplier": Refused("use 'repetition_penalty' or 'frequency_penalty'", but=(0,)),
    "dynatemp_range": Refused("a request has one temperature", but=(0,)),
    "mirostat": Refused("use 'top_p' or 'min_p'", but=(0,)),
    "n_predict": Refused("use 'max_tokens'", but=(-1,)),
    "n_probs": Refused("use 'logprobs'", but=(0,)),
    "repeat_penalty": Refused("use 'repetition_penalty', which is about all tokens", but=(1,)),
    "samplers": Refused("the order in which tokens are drawn is fixed"),
    "top_n_sigma": Refused("use 'top_p' or 'min_p'", but=(-1,)),
    "typical_p": Refused("use 'top_p' or 'min_p'", but=(1,)),
    "xtc_probability": Refused("the most likely tokens are not left out", but=(0,)),
}
_OF_REFUSED = {
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        "it counts with dry_multiplier only, which is refused",
    ),
    **dict.fromkeys(
        ("mirostat_eta", "mirostat_tau"), "it counts with mirostat only, which is refused"
    ),
    "dynatemp_exponent": "it counts with dynatemp_range only, which is refused",
    "repeat_last_n": "it counts with repeat_penalty only, which is refused",
    "xtc_threshold": "it counts with xtc_probability only, which is refused",
}

_NAMES = {"user": _LABEL, "request_id": _OWN_IDS, "rid": _OWN_IDS}
_GENERATES = {
    **_NAMES,
    **_OF_REFUSED,
    "metadata": _LABEL,
    "safety_identifier": _LABEL,
    "custom_labels": "labels of SGLang's metrics",
    "session_id": "requests go where their prefix is; prompt_cache_key names a session",
    "data_parallel_rank": "the router chooses the worker",
    "routed_dp_rank": "the router chooses the worker",
    "disagg_prefill_dp_rank": "the router chooses the worker",
    "length_penalty": "it counts in beam search only, which is refused",
    "spaces_between_special_tokens": "special tokens are left out, or told as they are",
    "stream_interval": "how many tokens an event has; the text is the same",
    "return_mm_kwargs": "it counts in render routes only, which take no images",
    "return_token_offsets": "it counts in render routes only, which tell none",
    "routed_experts_prompt_start": "routed experts are not told",
    "routed_experts_start_len": "routed experts are not told",
    "return_cached_tokens_details": "the usage always has cached_tokens_by_source",
    "prompt_cache_options": "prefixes are cached without it",
}
_CANNOT = {
    **_LLAMA_CPP,
    "bootstrap_host": Refused(_NOT_MOVED),
    "bootstrap_port": Refused(_NOT_MOVED),
    "bootstrap_room": Refused(_NOT_MOVED),
    "custom_logit_processor": Refused("code of a request is not run"),
    "custom_params": Refused("they are for a custom_logit_processor, which is not run"),
    "ec_transfer_params": Refused(_NOT_MOVED),
    "extra_key": Refused("use 'cache_salt', which keeps a cache apart"),
    "kv_transfer_params": Refused(_NOT_MOVED),
    "logits_processors": Refused("code of a request is not run"),
    "lora_path": Refused("name a registered adapter as the model"),
    "moderation": Refused("moderation is not supported"),
    "nvext": Refused("Dynamo's extensions are not supported; vLLM's fields are"),
    "repetition_detection": Refused("an output is not ended for its repetitions"),
    "return_hidden_states": Refused("hidden states are not told; see /v1/embeddings"),
    "return_routed_experts": Refused("routed experts are not told"),
    "session_params": Refused("SGLang's sessions are not supported; use 'prompt_cache_key'"),
    "stop_regex": Refused("stop strings are texts; use 'stop'"),
    "use_beam_search": Refused("beam search is not supported"),
    "vllm_xargs": Refused("arguments of vLLM's extensions are not supported"),
    "watermarking": Refused("watermarks are not supported"),
}

CHAT = Fields(
    refused={
        **_CANNOT,
        "audio": Refused("audio is not supported"),
        "chat_template": Refused(_NO_TEMPLATE),
        "documents": Refused("documents are not supported; put them into a message"),
        "function_call": Refused("function calls are not supported; use 'tool_choice'"),
        "functions": Refused("function calls are not supported; use 'tools'"),
        "return_prompt_text": Refused("the prompt's text is not told; /tokenize tells its tokens"),
        "separate_reasoning": Refused("reasoning is always apart from content", but=(True,)),
        "store": Refused("chats are not kept; /v1/responses keeps what it answers"),
        "task": Refused("tasks of DeepSeek's are not supported"),
        "web_search_options": Refused("web search is not supported"),
    },
    harmless={
        **_GENERATES,
        "max_dynamic_patch": _TEXT_ONLY,
        "media_io_kwargs": _TEXT_ONLY,
        "min_dynamic_patch": _TEXT_ONLY,
        "mm_processor_kwargs": _TEXT_ONLY,
        "stream_reasoning": "reasoning is streamed as it comes; the text is the same",
        "use_audio_in_video": _TEXT_ONLY,
        "verbosity": "a hint that the models served here do not know",
    },
)

COMPLETION = Fields(
    refused={
        **_CANNOT,
        "prompt_embeds": Refused("prompts are texts or token ids"),
        "thinking_token_budget": Refused("reasoning is told apart in chats only", but=(-1,)),
    },
    harmless=_GENERATES,
)

EMBEDDING = Fields(
    refused={
        "chat_template": Refused(_NO_TEMPLATE),
        "embed_dtype": Refused("vectors are float32", but=("float32",)),
        "endianness": Refused("vectors are little-endian", but=("native", "little")),
        "lora_path": Refused("name a registered adapter as the model"),
        "messages": Refused("chats are not embedded; use 'input'"),
        "nvext": Refused("Dynamo's extensions are not supported; vLLM's fields are"),
        "normalize": Refused("vectors have length 1", but=(True,)),
        "padding": _PADDING,
        "use_activation": Refused("vectors have length 1", but=(True,)),
    },
    harmless={
        **_NAMES,
        "additional_data": _LABEL,
        "mm_processor_kwargs": _TEXT_ONLY,
    },
)

_SCORING = {
    "chat_template_kwargs": Refused("texts are embedded as they are, without a template"),
    "instruct": Refused("texts are embedded as they are; put it into the query"),
    "instruction": Refused("texts are embedded as they are; put it into the query"),
    "lora_path": Refused("name a registered adapter as the model"),
    "padding": _PADDING,
}
_SCORED = {
    **_NAMES,
    "mm_processor_kwargs": _TEXT_ONLY,
    "use_activation": "a cosine is the same for vectors of any length",
}
SCORE = Fields(
    refused={
        **_SCORING,
        "apply_softmax": Refused(_OF_LABELS),
        "item_first": Refused(_OF_LABELS),
        "label_token_ids": Refused(_OF_LABELS),
        "query": Refused("the name is 'queries', also of one"),
        "return_pooled_hidden_states": Refused("vectors are told by /v1/embeddings"),
    },
    harmless=_SCORED,
)
RERANK = Fields(refused=_SCORING, harmless=_SCORED)

RESPONSES = Fields(
    refused={
        "context_management": Refused("no turn is compacted by itself; see /v1/responses/compact"),
        "ec_transfer_params": Refused(_NOT_MOVED),
        "enable_response_messages": Refused("the messages behind items are not told"),
        "kv_transfer_params": Refused(_NOT_MOVED),
        "moderation": Refused("moderation is not supported"),
        "previous_input_messages": Refused("put them into 'input', as items"),
        "prompt": Refused("prompts are not kept here; use 'instructions' and 'input'"),
        "truncation": Refused("nothing is left out of a prompt; see /compact", ("disabled",)),
        "vllm_xargs": _CANNOT["vllm_xargs"],
    },
    harmless={
        **_NAMES,
        "access_programs": "about access to OpenAI's own models",
        "background_options": "how long OpenAI may take; here it is done at once",
        "client_metadata": _LABEL,
        "image": _TEXT_ONLY,
        "media_io_kwargs": _TEXT_ONLY,
        "mm_processor_kwargs": _TEXT_ONLY,
        "prompt_cache_options": _GENERATES["prompt_cache_options"],
        "safety_identifier": _LABEL,
        "stream_options": "about padding of events; none are padded",
    },
)

_NO_TOOLS = "a summary calls no tools"
_NOT_KEPT = "a summary is not kept"
_TEXT = "a summary is text"
COMPACT = Fields(
    refused={
        **RESPONSES.refused,
        "background": Refused("a summary is written in the foreground"),
        "ignore_eos": Refused("a summary ends where the model ends it"),
        "include_stop_str_in_output": Refused("a summary ends where the model ends it"),
        "stop": Refused("a summary ends where the model ends it"),
        "stream": Refused("a summary is not streamed"),
        "structured_outputs": Refused(_TEXT),
    },
    harmless={
        **RESPONSES.harmless,
        "include": "a summary has its text alone",
        "max_tool_calls": _NO_TOOLS,
        "metadata": _LABEL,
        "parallel_tool_calls": _NO_TOOLS,
        "store": _NOT_KEPT,
        "text": _TEXT,
        "tool_choice": _NO_TOOLS,
        "tools": _NO_TOOLS,
        "top_logprobs": "a summary has its text alone",
    },
)

# Within `reasoning`, `text` and `output_config`.
REASONING = Fields(
    refused={},
    harmless={
        "context": "which earlier reasoning is shown is what the model's template does",
        "generate_summary": "reasoning is told as a whole",
        "mode": "there is one mode",
        "summary": "reasoning is told as a whole",
    },
)
TEXT_OPTIONS = Fields(refused={}, harmless={"verbosity": CHAT.harmless["verbosity"]})
OUTPUT_CONFIG = Fields(
    refused={},
    harmless={"task_budget": "a hint that the models served here do not know"},
)

MESSAGES = Fields(
    refused={
        "compaction": Refused("the server does not compact; ask for a summary in a message"),
        "container": Refused("containers are not supported"),
        "inference_geo": Refused("inference runs where this server is", but=("global",)),
        "mcp_servers": Refused("the server calls no MCP servers; offer their tools in 'tools'"),
        "thread": Refused("threads are not kept; send all messages"),
    },
    harmless={
        "betas": "names of features; what they add is judged by its own field",
        "billing_policy": "nothing is billed",
        "context_management": "what the server may forget; it forgets nothing",
        "diagnostics": "asks why a cache was missed; the answer is the same",
        "fallback_credit_token": "nothing is billed",
        "fallbacks": "for models that decline; none does so here",
        "metadata": _LABEL,
        "speed": "there is one speed",
        "user_profile_id": _LABEL,
        "workspace_id": _LABEL,
    },
)

TOKENIZE = Fields(
    refused={"chat_template": Refused(_NO_TEMPLATE)},
    harmless={"media_io_kwargs": _TEXT_ONLY, "mm_processor_kwargs": _TEXT_ONLY},
)
