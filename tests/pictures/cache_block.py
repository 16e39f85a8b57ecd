"""Where the numbers of a token lie in a cache block."""

from pictures.svg import Picture

HEADS = ("green", "purple")
TOKENS = 4


def cache_block():
    drawn = Picture(
        640, 372, "The layouts NHD and HND of a cache block",
        "A cache has keys and values, each in blocks. A block of four tokens and two heads has eight rows of "
        "head_size numbers. In layout NHD the rows of a token stand together: token 0 head 0, token 0 head 1, "
        "token 1 head 0, and so on. In layout HND those of a head do: head 0 of tokens 0 to 3, then head 1 of "
        "tokens 0 to 3.",
    )  # fmt: skip
    for y, name in ((16, "keys"), (58, "values")):
        drawn.text(20, y + 22, name, "bold")
        for block in range(6):
            drawn.box(90 + block * 88, y, 84, 34, [f"block {block}"], "blue" if block == 3 else "grey", "")
    drawn.line((354, 92), (24, 134), kind="line dashed")
    drawn.line((438, 92), (616, 134), kind="line dashed")
    drawn.text(320, 128, "one block: 4 tokens, 2 heads", "muted", anchor="middle", size=12)
    _rows(
        drawn, 24, "NHD", "[token, head, head_size]", [(token, head) for token in range(TOKENS) for head in (0, 1)], 2
    )
    _rows(
        drawn, 336, "HND", "[head, token, head_size]", [(token, head) for head in (0, 1) for token in range(TOKENS)], 4
    )
    drawn.text(320, 358, "Memory runs along a row, then to the row below. Each cell: head_size numbers.", "muted",
               anchor="middle", size=12)  # fmt: skip
    return drawn


def _rows(drawn, x, name, axes, cells, across):
    drawn.text(x, 160, name, "bold", size=14)
    drawn.text(x + 44, 160, axes, "mono", size=12)
    wide = 280 / across
    for place, (token, head) in enumerate(cells):
        left, top = x + place % across * wide, 172 + place // across * 41
        text = [f"token {token}, head {head}"] if across == 2 else [f"token {token}", f"head {head}"]
        drawn.box(left, top, wide - 3, 38, text, HEADS[head], "", size=12)
