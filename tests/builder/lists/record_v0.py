"""Records what the first generation's own code answers, as plain numbers, for test_v0_answers.py.

    python tests/builder/lists/record_v0.py FOLDER

FOLDER holds the unpacked wheel of vllm==0.8.5; what importing its backends needs is in requirements/peers.txt. What is
asked is written beside the answers, so that the tests need neither. The operator ``advance_step_flashattn`` is compiled
for CUDA: a loop of ours stands in for it (``advance_in_python``), and all around it is theirs.
"""

import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
ANSWERS = HERE / "v0_answers.json"
sys.path.insert(0, str(HERE.parents[2] / "benchmarks" / "peers"))

# (name, settings, groups): a group is (is_prompt, hit, [(query_len, context_len, table or None)]).
LONG = [5, 9, 2, 7, 11, 3, 8, 4]
DECODES = [(False, False, [(1, 4, [4, 6])]), (False, False, [(1, 8, [9, 2, 7])]), (False, False, [(1, 3, [5])])]
MIXED = [(True, False, [(6, 0, [1, 2])]), (True, False, [(5, 4, [3, 10, 12])]), (False, False, [(1, 9, [5, 9, 2])])]
HITS = [(True, True, [(5, 4, [3, 10, 12])]), (True, False, [(6, 0, [1, 2])]), (False, False, [(1, 9, [5, 9, 2])])]
CASES = [
    ("prompts", {}, [(True, False, [(5, 0, [4, 6])]), (True, False, [(8, 0, [1, 2])])]),
    ("decodes", {}, DECODES),
    ("several sequences", {}, [(False, False, [(1, 6, [7, 8]), (1, 7, [7, 9])]), *DECODES]),
    ("prompts and decodes", {}, [MIXED[0], MIXED[2]]),
    ("chunks", {"chunked": True}, MIXED),
    ("prefix-cache hit", {}, [HITS[0], HITS[2]]),
    ("a hit beside a prompt without one", {}, HITS),
    ("a hit with chunks", {"chunked": True}, HITS),
    ("profiling run", {}, [(True, False, [(6, 0, None)]), (True, False, [(3, 0, None)])]),
    ("padded", {"pad": 1, "capture": 16}, DECODES),
    ("graph without padding", {"pad": 0, "capture": 16}, DECODES),
    ("window, prompt", {"window": 8}, [(True, False, [(10, 0, [0, 1, 3])])]),
    ("window, chunk", {"window": 4, "chunked": True}, [(True, False, [(7, 5, [3, 1, 2])])]),
    ("window, decodes", {"window": 8}, [(False, False, [(1, 13, [1, 2, 3, 4])]), (False, False, [(1, 4, [6, 7])])]),
    ("window, decode at a block's end", {"window": 8}, [(False, False, [(1, 15, [1, 2, 3, 4])])]),
    ("window, padded", {"window": 8, "pad": 2, "capture": 16}, [(False, False, [(1, 13, [1, 2, 3, 4])])]),
]
SLOTS = [  # is_profile_run, seq_len, context_len, start_idx, block_size, table
    (False, 10, 6, 0, 4, [3, 1, 2]),
    (False, 10, 0, 2, 4, [0, 1, 0]),
    (False, 30, 20, 2, 4, LONG),
    (False, 30, 0, 22, 4, LONG),
    (False, 7, 6, 0, 4, [3, 1]),
    (True, 6, 0, 0, 4, None),
    (False, 400, 3, 30, 16, list(range(100, 125))),
]
LAYOUTS = ("common", "flash", "flashinfer")
TYPES = ("decoder", "encoder", "encoder_decoder")


def plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


def builder_classes():
    from vllm.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.attention.backends.flashinfer import FlashInferMetadataBuilder
    from vllm.attention.backends.rocm_flash_attn import ROCmFlashAttentionMetadataBuilder

    return dict(
        zip(
            LAYOUTS,
            (ROCmFlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, FlashInferMetadataBuilder),
            strict=True,
        )
    )


def runner_of(settings, num_reqs):
    """What their builders ask of the runner."""
    import numpy as np
    import torch

    width = -(-settings.get("capture", 16) // settings["block_size"])
    config = SimpleNamespace(
        get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2, get_head_size=lambda: 64, dtype=torch.float16
    )
    return SimpleNamespace(
        device=torch.device("cpu"), pin_memory=False, kv_cache_dtype="auto", model_config=config, parallel_config=None,
        vllm_config=None, graph_block_tables=np.zeros((num_reqs, width), np.int32),
    )  # fmt: skip


def inter_data(groups, settings):
    """Their input of a step, windows applied by their own runner."""
    from vllm.worker.model_runner import ModelInputForGPUBuilder

    block_size, window = settings["block_size"], settings.get("window")
    blocks = None if window is None else -(-window // block_size)
    sliding = SimpleNamespace(
        sliding_window=window, block_size=block_size, sliding_window_blocks=blocks,
        block_aligned_sliding_window=None if blocks is None else blocks * block_size,
    )  # fmt: skip
    made, seq_id = [], 0
    for is_prompt, hit, sequences in groups:
        ids = list(range(seq_id, seq_id + len(sequences)))
        seq_id += len(sequences)
        profiled = sequences[0][2] is None
        cached = sequences[0][2][: sequences[0][1] // block_size] if hit else []
        group = ModelInputForGPUBuilder.InterDataForSeqGroup(
            request_id=str(ids[0]), seq_ids=ids, is_prompt=is_prompt, computed_block_nums=cached,
            block_tables=None if profiled else dict(zip(ids, (row[2] for row in sequences), strict=True)),
        )  # fmt: skip
        group.prefix_cache_hit = hit
        group.query_lens, group.context_lens = ([row[at] for row in sequences] for at in (0, 1))
        group.input_tokens = [[0] * row[0] for row in sequences]
        group.orig_seq_lens = [row[0] + row[1] for row in sequences]
        group.seq_lens = list(group.orig_seq_lens)
        for at in range(len(sequences)):
            ModelInputForGPUBuilder._compute_for_sliding_window(sliding, group, at, None)
        made.append(group)
    return made


def build(layout, settings, groups):
    """Their metadata of the step."""
    settings = {"block_size": 4} | settings
    data, pad = inter_data(groups, settings), settings.get("pad", -1)
    seq_lens = [length for group in data for length in group.seq_lens] + [1] * max(pad, 0)
    query_lens = [length for group in data for length in group.query_lens]
    builder = builder_classes()[layout](
        SimpleNamespace(
            runner=runner_of(settings, len(seq_lens)), sliding_window=settings.get("window"),
            block_size=settings["block_size"], chunked_prefill_enabled=settings.get("chunked", False),
            inter_data_list=data,
        )
    )  # fmt: skip
    if layout == "flashinfer":  # of the layers of a model, which there is none of
        builder.global_hyperparameters, builder.window_left = True, settings.get("window", 0) - 1
        builder.logits_soft_cap = builder.sm_scale = None
    builder.prepare()
    return builder.build(seq_lens, query_lens, pad, sum(query_lens) + max(pad, 0))


def fields_of(metadata):
    """Every field that is a number, or numbers."""
    named = {field.name: plain(getattr(metadata, field.name)) for field in fields(metadata)}
    kept = (bool, int, list)
    return {name: value for name, value in named.items() if isinstance(value, kept) and not name.startswith("_")}


def advance_in_python(*, num_seqs, num_queries, block_size, input_tokens, sampled_token_ids, input_positions, seq_lens,
                      slot_mapping, block_tables):  # fmt: skip
    for row in range(num_seqs):
        if row >= num_queries:
            input_tokens[row] = input_positions[row] = 0
            slot_mapping[row] = -1
            continue
        position = int(seq_lens[row])
        seq_lens[row] += 1
        input_tokens[row], input_positions[row] = int(sampled_token_ids[row]), position
        slot_mapping[row] = int(block_tables[row, position // block_size]) * block_size + position % block_size


def advanced():
    """Steps that theirs moved on: of decodes, padded, and with prompts that turn into decodes."""
    import torch
    from vllm import _custom_ops

    _custom_ops.advance_step_flashattn = advance_in_python
    room = [(False, False, [(1, 3, [4, 6])]), (False, False, [(1, 8, [9, 2, 7])])]
    prompts = [(True, False, [(6, 0, [1, 2])]), (True, False, [(4, 4, [3, 10, 12])]), (False, False, [(1, 9, LONG)])]
    cases = [
        ("common", {}, room, 3, False), ("flash", {}, room, 3, False),
        ("flash", {"pad": 2, "capture": 16}, room, 3, False), ("flash", {"chunked": True}, prompts, 2, True),
    ]  # fmt: skip
    for layout, settings, groups, steps, turns in cases:
        metadata = build(layout, settings, groups)
        num_queries, num_seqs, after = len(metadata.query_start_loc) - 1, len(metadata.seq_lens), []
        asked = SimpleNamespace(
            input_tokens=torch.zeros(num_seqs, dtype=torch.long), input_positions=torch.zeros(num_seqs).long()
        )
        for step in range(steps):
            sampled = torch.arange(num_queries) + 10 * (step + 1)
            metadata.advance_step(asked, sampled, 4, num_seqs, num_queries, turns and not step)
            names = "seq_lens_tensor", "slot_mapping", "num_prefills", "num_prefill_tokens", "num_decode_tokens", \
                "max_query_len", "max_prefill_seq_len", "max_decode_seq_len"  # fmt: skip
            seen = {name: plain(getattr(metadata, name)) for name in names}
            after.append(seen | {name: value.tolist() for name, value in vars(asked).items()})
        yield {"layout": layout, "settings": settings, "groups": groups, "turns": turns, "after": after}


def encoder_answers():
    """Which fields attention of a type reads, and what counts as complete."""
    import torch
    from vllm.attention.backends import utils
    from vllm.attention.backends.flash_attn import FlashAttentionMetadata

    whole = build("flash", {}, DECODES)
    lens = [6, 2, 5]
    encoder = {"encoder_seq_lens": lens, "encoder_seq_lens_tensor": torch.tensor(lens), "max_encoder_seq_len": 6}
    cross = {"cross_slot_mapping": torch.zeros(0), "cross_block_tables": torch.zeros(3, 2), "num_encoder_tokens": 13}
    steps = {"no encoder": {}, "encoder": encoder, "cross": encoder | cross}
    own = {field.name: getattr(whole, field.name) for field in fields(whole) if not field.name.startswith("_")}
    made = {name: FlashAttentionMetadata(**(own | more)) for name, more in steps.items()}
    parameters = inspect.signature(utils.get_seq_len_block_table_args).parameters
    read = {}
    for attn_type in TYPES:
        for is_prompt in (False, True):
            marked = SimpleNamespace(**{field.name: field.name for field in fields(whole)})
            read[f"{attn_type} {is_prompt}"] = utils.get_seq_len_block_table_args(marked, is_prompt, attn_type)
    return {
        "parameters": list(parameters),
        "read": read,
        "set": {
            name: [one.is_all_encoder_attn_metadata_set, one.is_all_cross_attn_metadata_set]
            for name, one in made.items()
        },
        "tokens": {each: utils.get_num_prefill_decode_query_kv_tokens(made["cross"], each) for each in TYPES},
    }


def graph_answers():
    """What a graph is captured over, and the names of the buffers that it reads."""
    from vllm.attention.backends.flash_attn import FlashAttentionMetadata
    from vllm.attention.backends.utils import CommonAttentionState

    runner = runner_of({"block_size": 4}, 4)
    runner.max_seq_len_to_capture = 16
    runner.attn_backend = SimpleNamespace(
        make_metadata=lambda **given: FlashAttentionMetadata(**given), get_name=lambda: "FLASH_ATTN"
    )
    state = CommonAttentionState(runner)
    with state.graph_capture(4):
        captured = state.graph_capture_get_metadata_for_batch(2)
        names = {str(encoder): list(state.get_graph_input_buffers(captured, encoder)) for encoder in (False, True)}
    return {"captured": fields_of(captured), "input_buffers": names}


def slot_answers():
    from vllm.attention.backends.utils import compute_slot_mapping

    for profiled, seq_len, context_len, start_idx, block_size, table in SLOTS:
        slots = []
        compute_slot_mapping(profiled, slots, 7, seq_len, context_len, start_idx, block_size, {7: table})
        asked = [profiled, seq_len, context_len, start_idx, block_size, table]
        yield {"asked": asked, "slots": [int(slot) for slot in slots]}


def stride_orders():
    from vllm.attention.backends import flashinfer

    for layout in ("NHD", "HND"):
        flashinfer.FLASHINFER_KV_CACHE_LAYOUT = layout
        backend = flashinfer.FlashInferBackend
        yield layout, [list(backend.get_kv_cache_shape(9, 4, 2, 8)), list(backend.get_kv_cache_stride_order())]


def main(folder):
    import stubs

    stubs.install()
    stubs.open_package(folder, whole=False)
    found = {
        "of": "vllm 0.8.5",
        "steps": [
            {"name": name, "layout": layout, "settings": settings, "groups": groups,
             "fields": fields_of(build(layout, settings, groups))}
            for name, settings, groups in CASES for layout in LAYOUTS
        ],
        "advanced": list(advanced()),
        "encoder": encoder_answers(),
        "graphs": graph_answers(),
        "slots": list(slot_answers()),
        "kv_cache": dict(stride_orders()),
    }  # fmt: skip
    ANSWERS.write_text(json.dumps(found, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
    print(f"{ANSWERS}: {len(found['steps'])} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
