"""The expected fields of metadata, in plain Python that follows the rules literally, without code of attncore."""

PAD = -1


def cdiv(a, b):
    return -(-a // b)


def slots_of(table, start, stop, block_size):
    return [table[i // block_size] * block_size + i % block_size for i in range(start, stop)]


def sums(lengths):
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def persistent_step(rows, block_size, threshold=1):
    """Every host field of a persistent step; rows: (blocks, computed before the step, query_len), decodes first."""
    queries = [q for _, _, q in rows]
    lens = [c + q for _, c, q in rows]
    num_decodes = sum(q <= threshold for q in queries)
    return {
        "slot_mapping": [s for b, c, q in rows for s in slots_of(b, c, c + q, block_size)],
        "positions": [p for _, c, q in rows for p in range(c, c + q)],
        "token_to_req_indices": [i for i, q in enumerate(queries) for _ in range(q)],
        "context_lens": [c for _, c, _ in rows],
        "query_lens": queries,
        "logits_indices": [end - 1 for end in sums(queries)[1:]],
        "query_start_loc": sums(queries),
        **lengths([b for b, _, _ in rows], lens, block_size, num_decodes),
        "num_reqs": len(rows),
        "num_tokens": sum(queries),
        "num_decodes": num_decodes,
        "num_decode_tokens": sum(queries[:num_decodes]),
        "num_prefills": len(rows) - num_decodes,
        "num_prefill_tokens": sum(queries[num_decodes:]),
        "max_query_len": max(queries, default=0),
        "max_decode_query_len": max(queries[:num_decodes], default=1),
    }


def tree_fields(rows, trees):
    """``tree_mask`` and ``positions`` of a persistent step; trees: the parents of each row's drafts, None: no tree."""
    masks, positions = [], []
    for (_, computed, query_len), parents in zip(rows, trees, strict=True):
        if parents is None:
            masks += [0] * query_len
            positions += range(computed, computed + query_len)
            continue
        seen = [{0}]  # by token: itself and its ancestors; the root is token 0
        for draft, parent in enumerate(parents):
            seen.append(seen[parent + 1] | {draft + 1})
        positions += [computed + len(tokens) - 1 for tokens in seen]
        unsigned = [sum(2**token for token in tokens) for tokens in seen]
        masks += [mask - 2**64 if mask >= 2**63 else mask for mask in unsigned]
    return {"tree_mask": masks, "positions": positions}


def lengths(tables, lens, block_size, num_decodes):
    """What follows from lengths and blocks alone."""
    return {
        "seq_lens": lens,
        "seq_start_loc": sums(lens),
        "paged_kv_indptr": sums(cdiv(n, block_size) for n in lens),
        "paged_kv_indices": [x for b, n in zip(tables, lens, strict=True) for x in b[: cdiv(n, block_size)]],
        "paged_kv_last_page_len": [(n - 1) % block_size + 1 if n else 0 for n in lens],
        "max_seq_len": max(lens, default=0),
        "max_decode_seq_len": max(lens[:num_decodes], default=0),
        "max_prefill_seq_len": max(lens[num_decodes:], default=0),
    }


def rank_of(i, block_size, world, interleave):
    """The rank that keeps token i, in virtual blocks of block_size * world tokens, and the offset in its block."""
    virtual = i % (block_size * world)
    return (virtual // interleave) % world, virtual // (world * interleave) * interleave + i % interleave


def rank_step(rows, block_size, world, rank, interleave, threshold=1):
    """A step's fields on one rank of a context-parallel group; blocks of ``rows`` are virtual."""

    def kept(count):
        return sum(rank_of(i, block_size, world, interleave)[0] == rank for i in range(count))

    whole = persistent_step(rows, block_size * world, threshold)
    slots = []
    for blocks, computed, query_len in rows:
        for i in range(computed, computed + query_len):
            owner, offset = rank_of(i, block_size, world, interleave)
            slots.append(blocks[i // (block_size * world)] * block_size + offset if owner == rank else PAD)
    lens = [kept(c + q) for _, c, q in rows]
    local = lengths([b for b, _, _ in rows], lens, block_size, whole["num_decodes"])
    return whole | local | {"slot_mapping": slots, "context_lens": [kept(c) for _, c, _ in rows]}


def persistent_encoder(rows, block_size):
    """The encoder fields of a persistent step; rows: (cross blocks, encoder tokens, those that run in this step)."""
    lens, fresh = [n for _, n, _ in rows], [f for _, _, f in rows]
    return {
        "encoder_seq_lens": lens,
        "encoder_query_lens": fresh,
        "encoder_seq_start_loc": sums(lens),
        "encoder_query_start_loc": sums(fresh),
        "cross_slot_mapping": [s for b, _, f in rows for s in slots_of(b, 0, f, block_size)],
        "num_encoder_tokens": sum(lens),
        "max_encoder_seq_len": max(lens, default=0),
    }


PADDED_WITH = {"positions": 0, "context_lens": 0, "query_lens": 0, "logits_indices": 0,
               "paged_kv_last_page_len": 0, "slot_mapping": PAD, "encoder_query_lens": 0, "tree_mask": 0}  # fmt: skip
PER_TOKEN = ("positions", "slot_mapping", "token_to_req_indices", "tree_mask")


def padded(fields, num_reqs, query_len, pad_seq_len, num_tokens=None):
    """The fields of a step padded to ``num_reqs`` rows of ``query_len`` tokens: starts plateau, slots are -1.

    ``num_tokens``: those of all rows together, where these have any lengths."""
    num_tokens = num_reqs * query_len if num_tokens is None else num_tokens
    rows, tokens = num_reqs - fields["num_reqs"], num_tokens - fields["num_tokens"]
    out = dict(fields)
    for name, value in fields.items():
        if name in PADDED_WITH:
            out[name] = value + [PADDED_WITH[name]] * (tokens if name in PER_TOKEN else rows)
        elif name in ("seq_lens", "encoder_seq_lens"):
            out[name] = value + [pad_seq_len] * rows
        elif name in ("query_start_loc", "paged_kv_indptr", "encoder_query_start_loc"):
            out[name] = value + [value[-1]] * rows
        elif name in ("seq_start_loc", "encoder_seq_start_loc"):
            out[name] = value + [value[-1] + pad_seq_len * (i + 1) for i in range(rows)]
    longest = max(fields["max_decode_seq_len"], fields.get("max_prefill_seq_len", 0), pad_seq_len if rows else 0)
    if rows and "max_encoder_seq_len" in fields:
        out["max_encoder_seq_len"] = max(fields["max_encoder_seq_len"], pad_seq_len)
    return out | {
        "token_to_req_indices": fields["token_to_req_indices"] + [num_reqs - 1] * tokens,
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "num_decode_tokens": num_tokens,
        **dict.fromkeys(("num_prefills", "num_prefill_tokens", "max_prefill_seq_len") & fields.keys(), 0),
        "max_query_len": query_len,
        "max_decode_query_len": query_len,
        "max_decode_seq_len": longest,
        "max_seq_len": longest,
    }


def list_step(groups, block_size, layout, window=None, chunked=False, pad=-1, capture=None):
    """Every field of the list builder's step; groups: (is_prompt, hit, [(query_len, context_len, table or None)])."""
    rows = [(is_prompt, hit, *s) for is_prompt, hit, sequences in groups for s in sequences]
    padded, queries = max(pad, 0), [q for _, _, q, _, _ in rows]
    any_hit = layout == "flash" and any(hit for _, hit, *_ in rows)
    tables = [list_table(p, hit or any_hit, q + c, t, block_size, window, chunked) for p, hit, q, c, t in rows]
    width = max(map(len, tables), default=0) if pad < 0 else cdiv(capture, block_size)
    slots = [slot for p, _, q, c, t in rows for slot in list_slots(p, q, c, t, block_size, window)]
    out = {
        "slot_mapping": slots + [PAD] * padded,
        "context_lens": [c for *_, c, _ in rows],
        "query_lens": queries,
        "token_to_req_indices": [i for i, q in enumerate(queries) for _ in range(q)]
        + [len(rows) + i for i in range(padded)],
        "positions": [i for _, _, q, c, _ in rows for i in range(c, c + q)] + [0] * padded,
        "logits_indices": [end - 1 for end in sums(queries)[1:]],
        "query_start_loc": sums(queries),
        "block_tables": [(t + [0] * width)[:width] for t in tables] + [[0] * width] * padded,
        "use_cuda_graph": pad >= 0,
        **list_lengths(rows, block_size, window, padded),
        **list_counts(rows, padded),
    }
    if layout == "flash":
        out["max_decode_query_len"] = max((row[2] for row in rows if not row[0]), default=1)
    if layout == "flashinfer":
        out |= list_pages(rows, block_size, padded)
    return out


def list_slots(is_prompt, query_len, context_len, table, block_size, window):
    """Slots of a row's new tokens; a prompt's tokens that its window has passed get none."""
    start_idx = max(0, query_len - window) if is_prompt and window else 0
    slots = []
    for i in range(context_len, query_len + context_len):
        if table is None or i < start_idx:
            slots.append(PAD)
        else:
            slots.append(table[i // block_size] * block_size + i % block_size)
    return slots


def list_table(is_prompt, hit, seq_len, table, block_size, window, chunked):
    """The blocks of a row that the kernel is given: of a decode under a window, the last ones."""
    if table is None:
        return []
    if hit:
        return list(table)
    if is_prompt:
        return list(table) if chunked else []
    if window:
        keep = cdiv(window, block_size) + (1 if seq_len % block_size else 0)
        return list(table)[: cdiv(seq_len, block_size)][-keep:]
    return list(table)


def list_lengths(rows, block_size, window, padded):
    """The lengths that the kernel is given, under a window a decode's is cut to whole blocks, and their maxima."""
    lens, max_prefill, max_decode = [], 0, 0
    for is_prompt, _, query_len, context_len, _ in rows:
        seq_len = kernel_len = query_len + context_len
        if not is_prompt and window:
            kernel_len = min(seq_len, cdiv(window, block_size) * block_size + seq_len % block_size)
        lens.append(kernel_len)
        if is_prompt:
            max_prefill = max(max_prefill, seq_len)
        else:
            max_decode = max(max_decode, kernel_len)
    lens += [1] * padded
    return {
        "seq_lens": lens,
        "seq_start_loc": sums(lens),
        "max_seq_len": max(max_prefill, max_decode),
        "max_prefill_seq_len": max_prefill,
        "max_decode_seq_len": max_decode,
    }


def list_counts(rows, padded):
    """How many requests and tokens there are, and of which kind; padding counts as tokens of decodes."""
    queries = [row[2] for row in rows]
    prompts = [row[2] for row in rows if row[0]]
    decodes = [row[2] for row in rows if not row[0]]
    return {
        "num_reqs": len(rows) + padded,
        "num_tokens": sum(queries) + padded,
        "num_decodes": len(decodes),
        "num_prefills": len(prompts),
        "num_prefill_tokens": sum(prompts),
        "num_decode_tokens": sum(decodes) + padded,
        "max_query_len": max(queries),
    }


def list_pages(rows, block_size, padded):
    """The fields of layout ``flashinfer``: whole tables, whatever the kernel of another is given."""
    pages, last_page, indices = [], [], []
    for _, _, query_len, context_len, table in rows:
        seq_len = query_len + context_len
        pages.append(0 if table is None else cdiv(seq_len, block_size))
        indices.extend([] if table is None else table[: pages[-1]])
        last_page.append(0 if table is None else (seq_len % block_size or block_size))
    return {
        "paged_kv_indptr": sums(pages + [0] * padded),
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": last_page + [0] * padded,
    }


def encoder_step(groups, encoders, block_size, pad=-1, capture=None):
    """Encoder fields of the list builder's step; groups as for list_step, encoders: (length, cross table or None)."""
    rows = [(is_prompt, *e) for (is_prompt, _, seqs), e in zip(groups, encoders, strict=True) for _ in seqs]
    padded, fresh = max(pad, 0), [length if is_prompt else 0 for is_prompt, length, _ in rows]
    lens = [length for _, length, _ in rows] + [1] * padded
    slots = []
    for is_prompt, length, table in rows:
        if is_prompt:
            slots += [PAD] * length if table is None else slots_of(table, 0, length, block_size)
    tables = [[] if is_prompt or table is None else list(table) for is_prompt, _, table in rows] + [[]] * padded
    width = max(map(len, tables)) if pad < 0 else cdiv(capture, block_size)
    return {
        "encoder_seq_lens": lens,
        "encoder_query_lens": fresh + [0] * padded,
        "encoder_seq_start_loc": sums(lens),
        "encoder_query_start_loc": sums(fresh + [0] * padded),
        "cross_slot_mapping": slots,
        "cross_block_table": [(table + [0] * width)[:width] for table in tables],
        "num_encoder_tokens": sum(lens) - padded,
        "max_encoder_seq_len": max(lens),
    }
