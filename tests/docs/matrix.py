"""docs/matrix.md, made of `engine.support` and of the tests that are named here.

`python -m tests.docs.matrix` writes what stands between its marks, and the counts in README.md.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter

from kvrelay.engine.support import RULES, Capability, How, Trait, no_to
from tests.cover.settings import served
from tests.docs.modules import between_marks
from tests.structure import ROOT

PAGE, README = ROOT / "docs/matrix.md", ROOT / "README.md"
C, T = Capability, Trait
GROUPS: dict[str, dict[str, frozenset[Trait]]] = {
    "Where a worker computes": {
        "one process": frozenset({T.CPU}),
        "ranks": frozenset({T.CPU, T.RANKS}),
        "on machines": frozenset({T.CPU, T.RANKS, T.MACHINES}),
        "torch": frozenset({T.CPU, T.TORCH}),
        "GPU": frozenset({T.GPU}),
        "GPUs, ranks": frozenset({T.GPU, T.RANKS}),
    },
    "What the model's layers are": {
        "states": frozenset({T.CPU, T.STATES}),
        "on a GPU": frozenset({T.GPU, T.STATES}),
        "windows": frozenset({T.CPU, T.WINDOWS}),
        "in all": frozenset({T.CPU, T.WINDOWS, T.ONLY_WINDOWS}),
        "MLA": frozenset({T.CPU, T.LATENT}),
        "layerwise": frozenset({T.CPU, T.LAYERWISE}),
    },
    "What tokens attend to": {"sparse": frozenset({T.CPU, T.LATENT, T.SPARSE, T.UNEVEN_KV})},
    "How weights and KV are held": {
        "int8, int4": frozenset({T.CPU, T.QUANTIZED}),
        "FP8 KV": frozenset({T.CPU, T.FP8_KV}),
        "uneven KV": frozenset({T.CPU, T.UNEVEN_KV}),
    },
    "What images meet": {
        "other tower": frozenset({T.CPU, T.OTHER_VISION}),
        "drafter": frozenset({T.CPU, T.DRAFTER}),
    },
    "With workers that run vLLM": {
        "vLLM": frozenset({T.VLLM}),
        "its ranks": frozenset({T.VLLM}),
        "its states": frozenset({T.VLLM, T.STATES}),
        "its other KV": frozenset({T.VLLM, T.OTHER_KV}),
    },
    "Where those have less": {
        "no LoRA": frozenset({T.VLLM, T.NO_LORA}),
        "context parallel": frozenset({T.VLLM, T.CONTEXT_PARALLEL}),
        "generating": frozenset({T.VLLM, T.NO_POOLING}),
        "pooling": frozenset({T.VLLM, T.POOLING, T.OTHER_KV}),
    },
    "With several of them": {
        "models": frozenset({T.CPU, T.MODELS}),
        "routers": frozenset({T.CPU, T.ROUTERS}),
        "servers": frozenset({T.CPU, T.SERVERS}),
    },
}
PLACES = {name: traits for group in GROUPS.values() for name, traits in group.items()}
SIGNS = {How.REFUSED: "no", How.WITHOUT: "without", How.PART: "part"}

_ADAPTERS = "engine/model/test_adapters.py::test_an_adapter_gives_the_logits_of_merged_weights"
_MERGED = (
    "engine/model/test_adapters.py"
    "::test_rounded_factors_and_quantized_weights_leave_what_merged_ones_would"
)
_DRAFTS = "local/test_local_drafts.py::test_drafts_change_no_token"
_DRAFTERS = "local/test_local_drafters.py::test_drafters_change_no_token"
_ONE_HAND_OVER = "local/test_local_groups.py::"
_ONE_HAND_OVER += "test_two_pools_answer_as_one_and_damage_on_the_way_is_noticed"
_GROUPS_BACK = "local/test_local_groups.py::"
_GROUPS_BACK += "test_kv_comes_back_from_host_memory_and_from_disk_after_a_restart"
_FP8_BACK = _GROUPS_BACK.replace("local_groups", "local_kv")
_RANKS_BACK = "local/test_local_parallel.py::"
_RANKS_BACK += "test_kv_of_two_ranks_comes_back_from_host_memory_and_from_disk"
_PREFIX = "engine/model/test_drafter.py::test_a_prefix_hit_goes_on_as_if_all_had_been_computed"
_GROUPED = "engine/model/test_drafter.py::test_layers_in_groups_and_latents_have_one_too"
_MTP = "engine/model/test_mtp.py::test_tokens_are_those_without_it"
_EDITED = "engine/model/gpu/test_triton_steps.py::"
_EDITED += "test_rows_whose_logits_are_edited_or_told_are_sampled_as_by_the_host"
_OUTPUTS = "engine/model/gpu/test_triton_steps.py::test_what_a_prompt_gives_is_that_of_torch"
_IMAGES = "engine/model/vision/test_images.py"
_IMAGES += "::test_texts_beside_them_are_as_without_and_decodes_go_on"
_TWO_MACHINES = (
    "e2e/parallel/test_two_machines.py::test_ranks_on_two_hosts_say_what_one_process_says"
)
_VLLM_RANKS = "e2e/test_vllm_ranks.py::"
_VLLM_RANKS += "test_ranks_and_stages_hand_over_die_and_find_kv_of_another_number_of_them"
_BACK = dict.fromkeys(("torch", "states", "windows", "uneven KV"), _GROUPS_BACK)
_BACK |= {"FP8 KV": _FP8_BACK, "ranks": _RANKS_BACK}
_BACK["sparse"] = "local/test_same_tokens.py::"
_BACK["sparse"] += "test_from_host_memory_from_disk_and_after_a_restart"

TESTED: dict[Capability, dict[str, str]] = {
    C.ADAPTERS: {
        **dict.fromkeys(("one process", "torch", "states", "windows", "in all"), _ADAPTERS),
        **dict.fromkeys(("MLA", "sparse"), _ADAPTERS),
        "ranks": "engine/model/test_parallel.py"
        "::test_two_ranks_compute_adapters_as_one_process_does",
        "int8, int4": _MERGED,
        "vLLM": "worker/test_vllm_adapters.py::test_an_adapter_is_in_tokens_and_in_names_of_kv",
    },
    C.NGRAM_DRAFTS: {
        **dict.fromkeys(("one process", "ranks", "states", "sparse"), _DRAFTS),
        "layerwise": "engine/model/test_parallel.py::test_they_are_by_layers_that_run_one_by_one",
        "GPU": "engine/model/gpu/test_triton_steps.py::test_drafts_give_the_tokens_of_torch",
        "on a GPU": "engine/model/gpu/test_triton_recurrent.py::test_drafts_leave_the_states_that"
        "_there_are_without_them_in_any_order_of_rows",
        "GPUs, ranks": "engine/model/gpu/test_triton_ranks.py"
        "::test_steps_that_end_first_and_drafts",
    },
    C.HEAD_DRAFTS: {
        "one process": _DRAFTERS,
        "FP8 KV": _PREFIX,
        **dict.fromkeys(("windows", "MLA", "sparse", "uneven KV"), _GROUPED),
    },
    C.MODEL_DRAFTS: {"one process": _DRAFTERS, "FP8 KV": _PREFIX},
    C.MTP_DRAFTS: {
        **dict.fromkeys(("one process", "MLA", "FP8 KV"), _MTP),
        "states": "local/test_local_drafters.py"
        "::test_the_layer_of_a_hybrid_that_drafts_changes_no_token",
    },
    C.GRAMMARS: {
        "one process": "engine/model/test_grammar.py"
        "::test_an_output_matches_its_schema_however_it_is_computed",
    },
    C.REASONING_BUDGET: {
        "one process": "engine/model/test_grammar.py"
        "::test_reasoning_ends_when_its_budget_is_used_up",
        "vLLM": "worker/test_vllm_sampling.py::test_bans_and_budgets_hold_at_a_worker",
    },
    C.PENALTIES: {
        "one process": "engine/model/test_grammar.py"
        "::test_bans_and_biases_count_among_the_tokens_that_a_grammar_allows",
        "GPU": _EDITED,
        "vLLM": "worker/test_vllm_sampling.py::test_bans_and_budgets_hold_at_a_worker",
    },
    C.LOGPROBS: {
        "one process": "engine/model/test_prompt_outputs.py"
        "::test_log_probabilities_are_those_of_transformers",
        "GPU": _EDITED,
        "vLLM": "worker/test_vllm_worker.py::test_requests_are_answered_with_what_vllm_generates",
    },
    C.GENERATION: {
        **_BACK,
        "one process": "local/test_same_tokens.py::test_one_pool",
        "vLLM": "worker/test_vllm_worker.py::test_requests_are_answered_with_what_vllm_generates",
    },
    C.EMBEDDINGS: {
        "vLLM": "worker/test_vllm_pooling.py::test_vectors_are_those_of_vllm_and_nothing_is_kept",
        "pooling": "worker/test_vllm_pooling.py::test_a_worker_that_dies_is_taken_over_from",
        "one process": "engine/model/test_prompt_outputs.py"
        "::test_embeddings_are_those_of_transformers",
        "GPU": _OUTPUTS,
    },
    C.IMAGES: {
        **dict.fromkeys(("one process", "torch", "states"), _IMAGES),
        "ranks": "engine/model/vision/test_image_ranks.py"
        "::test_ranks_answer_as_one_process_and_as_transformers",
        "vLLM": "worker/test_vllm_images.py"
        "::test_two_images_never_share_a_block_and_one_image_hits",
    },
    C.HAND_OVER: {
        "one process": "local/test_local.py::test_two_pools_answer_as_one",
        "ranks": "local/test_local_parallel.py::test_workers_of_any_sizes_hand_over",
        "on machines": _TWO_MACHINES,
        **dict.fromkeys(("torch", "states", "windows", "uneven KV"), _ONE_HAND_OVER),
        "FP8 KV": _ONE_HAND_OVER.replace("local_groups", "local_kv"),
        "sparse": "local/test_same_tokens.py::test_two_pools",
        "vLLM": "worker/test_vllm_worker.py"
        "::test_prompts_are_computed_by_one_worker_and_decoded_by_another",
        "its ranks": "worker/test_vllm_ranks.py::test_workers_of_any_sizes_hand_over",
        "models": "local/test_local_models.py"
        "::test_of_a_thousand_mixed_requests_none_is_on_a_worker_of_the_other_model",
        "routers": "e2e/test_two_routers.py"
        "::test_both_answer_alike_and_find_what_the_other_has_computed",
        "servers": "e2e/test_two_servers.py"
        "::test_another_server_leads_when_the_leader_is_killed_and_streams_go_on",
    },
    C.HOST_TIER: {
        "one process": "local/test_local_tiers.py::test_evicted_kv_comes_back_from_host_memory",
        **_BACK,
    },
    C.DISK_TIER: {
        "one process": "local/test_local_tiers.py::test_kv_on_disk_outlives_the_process",
        **_BACK,
        "vLLM": "e2e/test_vllm.py::test_a_session_goes_on_from_disk_after_a_restart",
        "its ranks": _VLLM_RANKS,
    },
    C.DISK_CODEC: {
        "one process": "kvtransfer/movers/test_coded_agent.py"
        "::test_blocks_come_back_and_take_the_pages_that_they_need",
        "GPU": "kvtransfer/movers/test_coded_agent.py"
        "::test_a_gpu_gets_them_by_the_staging_area_of_host_memory",
    },
    C.OBJECT_TIER: {
        "one process": "local/test_local_objects.py"
        "::test_a_machine_that_is_new_reads_what_another_one_has_written",
        "ranks": "local/test_local_objects.py"
        "::test_ranks_read_what_ranks_have_written_and_others_compute",
    },
    C.LEFT_KV: {
        "one process": "local/test_local_outlive.py::test_the_next_worker_begins_with_it",
        "ranks": "local/test_local_outlive.py::test_ranks_read_what_ranks_have_left",
    },
    C.APPROXIMATE_KV: {
        "one process": "local/test_local_approximate.py"
        "::test_it_leaves_host_memory_for_fewer_bits_and_comes_back",
    },
    C.QUEST: {
        "one process": "engine/model/cpu/test_quest.py"
        "::test_pages_are_those_whose_bounds_allow_most",
        "windows": "engine/model/cpu/test_quest.py"
        "::test_passes_drafts_and_batches_give_the_tokens_of_single_steps",
        "int8, int4": "engine/model/cpu/test_quest.py"
        "::test_passes_drafts_and_batches_give_the_tokens_of_single_steps",
    },
    C.SESSIONS: {
        "one process": "kvtransfer/tiers/test_tiers_orders.py"
        "::test_parked_blocks_leave_the_device_and_are_written_to_disk_at_once",
        "windows": "worker/test_groups.py"
        "::test_a_session_is_parked_resumed_and_loaded_with_the_windows_of_its_end",
        "vLLM": "e2e/test_vllm.py::test_a_session_goes_on_from_disk_after_a_restart",
        "its ranks": _VLLM_RANKS,
    },
    C.CLASSES: {
        "one process": "engine/test_service_classes.py"
        "::test_a_higher_class_takes_the_memory_of_a_lower_one_which_goes_on_later",
        "vLLM": "worker/test_vllm_classes.py::test_those_that_gave_way_end_with_the_same_tokens",
    },
    C.WEIGHT_UPDATES: {
        "one process": "local/test_local_weights.py"
        "::test_sixteen_streams_go_on_while_the_weights_change",
        "ranks": "local/test_local_weights.py"
        "::test_ranks_change_between_the_same_two_steps_or_not_at_all",
    },
    C.SCALING: {
        "one process": "cluster/scaling/test_autoscaling.py"
        "::test_a_request_wakes_a_cluster_of_no_workers",
        "models": "cluster/control/test_models.py"
        "::test_each_model_scales_by_its_own_requests_to_none_and_back",
    },
    C.MODEL_CHANGES: {
        "models": "cluster/test_model_changes.py::test_one_is_offered_when_its_workers_are_up",
    },
}


# Where a test of its own is named, that says more.
_COVER = "cover/test_cover.py::test_a_row_answers_as_a_plain_worker"
for _capability, _place in served():
    TESTED[_capability].setdefault(_place, _COVER)


def cell(capability: Capability, place: str) -> str:
    if no := no_to(capability, PLACES[place]):
        return f"{SIGNS[no.how]}: {no.word}"
    return "yes" if place in TESTED[capability] else "(yes)"


def counts() -> Counter[str]:
    every = (cell(each, place) for each in Capability for place in PLACES)
    return Counter(each.partition(":")[0] for each in every)


def summary() -> str:
    found = counts()
    return (
        f"Of {found.total()} cells {found['yes']} work and have a test that is named,"
        f" {found['(yes)']} work as far as is known, {found['part']} work in part,"
        f" {found['without']} are served without, and {found['no']} are refused."
    )


def tables() -> str:
    parts = []
    for title, places in GROUPS.items():
        lines = [f"| {title} | {' | '.join(places)} |", f"|---{len(places) * '|---'}|"]
        lines += [
            f"| {each} | {' | '.join(cell(each, place) for place in places)} |"
            for each in Capability
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def reasons() -> str:
    """Each text with the capabilities and the traits that it is said of."""
    said: dict[tuple[str, str, How], dict[str, None]] = {}
    for capability, rules in RULES.items():
        for no in rules:
            where = " and ".join(each for each in Trait if each in no.where)
            said.setdefault((no.text, where, no.how), {})[capability] = None
    lines = [
        f"* {', '.join(names)}; {where} ({SIGNS[how]}): {text}."
        for (text, where, how), names in said.items()
    ]
    return "\n".join(_filled(line) for line in lines)


def tests() -> str:
    lines = []
    for capability, named in TESTED.items():
        of_test: dict[str, list[str]] = {}
        for place, test in named.items():
            of_test.setdefault(test, []).append(place)
        for test, places in of_test.items():
            file, _, name = test.partition("::")
            lines.append(f"* {capability}, {', '.join(places)}: `tests/{file}` `{name}`")
    return "\n".join(map(_filled, lines))


def _filled(line: str, indent: str = "  ") -> str:
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def with_matrix(page: str) -> str:
    page = between_marks(page, "counts", _filled(summary(), ""))
    for name, made in (("matrix", tables), ("reasons", reasons), ("tests", tests)):
        page = between_marks(page, name, made())
    return page


def with_counts(readme: str) -> str:
    """The README says how many of how many."""
    found = counts()
    works = found["yes"] + found["(yes)"]
    return re.sub(r"\d+ of \d+ cells work", f"{works} of {found.total()} cells work", readme)


if __name__ == "__main__":
    PAGE.write_text(with_matrix(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(with_counts(README.read_text(encoding="utf-8")), encoding="utf-8")
