"""A block table, and the slots that follow from it, as attncore computes them."""

import attncore
from pictures.svg import Picture

TABLE, COMPUTED, NEW, SIZE = [3, 1, 2], 6, 4, 4


def slots():
    """The slots of the step."""
    batch = attncore.InputBatch(max_num_reqs=1, max_model_len=16, block_size=SIZE)
    batch.add_request("a", TABLE, num_computed_tokens=COMPUTED)
    return attncore.MetadataBuilder(batch, max_num_batched_tokens=8).build({"a": NEW}).slot_mapping.tolist()


def table_and_slots():
    found = slots()
    drawn = Picture(
        640, 400, "A block table and the slot mapping that follows from it",
        f"A request of {COMPUTED + NEW} tokens, of which {COMPUTED} are in the cache and {NEW} are new, has the "
        f"block table {TABLE} with blocks of {SIZE} tokens. Tokens 0 to 3 lie in block 3, 4 to 7 in block 1, 8 and "
        f"9 in block 2. A token's slot is table[i // {SIZE}] * {SIZE} + i % {SIZE}: the new tokens have the slots "
        f"{found}.",
    )  # fmt: skip
    drawn.text(16, 46, "tokens", "bold")
    drawn.text(16, 122, "block table", "bold")
    drawn.text(16, 214, "cache", "bold")
    drawn.text(16, 236, "slots", "muted", size=12)
    for column, block in enumerate(TABLE):
        middle = 194 + column * 164
        for offset in range(SIZE):
            token = column * SIZE + offset
            _cell(drawn, middle - 80 + offset * 40, 24, 38, token)
        drawn.box(middle - 50, 100, 100, 36, [f"block {block}"], "blue")
        drawn.arrow((middle, 58), (middle, 100))
        drawn.arrow((middle, 136), (_left(block) + 48, 190))
    where = {TABLE[token // SIZE] * SIZE + token % SIZE: token for token in range(COMPUTED + NEW)}
    for block in range(5):
        for offset in range(SIZE):
            slot = block * SIZE + offset
            _cell(drawn, _left(block) + offset * 24, 192, 23, where.get(slot), 12)
            drawn.text(_left(block) + offset * 24 + 11.5, 238, str(slot), "muted", size=11, anchor="middle")
        drawn.text(_left(block) + 48, 257, f"block {block}", "muted", size=12, anchor="middle")
    lines = [f"slot of token i = table[i // {SIZE}] * {SIZE} + i % {SIZE}"]
    lines += [
        f"token {token}: table[{token // SIZE}] * {SIZE} + {token % SIZE} = "
        f"{TABLE[token // SIZE]} * {SIZE} + {token % SIZE} = {slot}"
        for token, slot in zip(range(COMPUTED, COMPUTED + NEW), found, strict=True)
    ]
    for number, line in enumerate(lines):
        drawn.text(16, 286 + number * 20, line, "mono", size=12)
    drawn.rect(430, 282, 16, 14, "fill-grey edge", 2)
    drawn.text(454, 294, "in the cache already", size=12)
    drawn.rect(430, 306, 16, 14, "fill-orange edge", 2)
    drawn.text(454, 318, "new in this step", size=12)
    drawn.text(16, 388, f"slot_mapping = {found}", "mono bold")
    return drawn


def _left(block):
    return 114 + block * 104


def _cell(drawn, x, y, wide, token, size=13):
    """The cell of a token; None: nobody's."""
    known = token is not None and token < COMPUTED + NEW
    drawn.rect(x, y, wide, 32, f"fill-{'orange' if token >= COMPUTED else 'grey'} edge" if known else "paper edge", 2)
    if known:
        drawn.text(x + wide / 2, y + 21, str(token), size=size, anchor="middle", room=wide)
