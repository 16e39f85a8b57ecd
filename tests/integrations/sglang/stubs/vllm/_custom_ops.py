"""Rotary embeddings in torch, in place: what SGLang calls where its compiled operator is missing."""


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Turns queries and keys (tokens, heads * head_size) by their positions; halves of a head lie apart (neox)."""
    if not is_neox:
        raise NotImplementedError("pairs that lie side by side; no test has such a model")
    cosine, sine = (part.unsqueeze(1) for part in cos_sin_cache[positions.flatten()].chunk(2, dim=-1))
    size = cosine.shape[-1]
    for heads in (query, key):
        view = heads.view(len(cosine), -1, head_size)
        left, right = view[..., :size].clone(), view[..., size : 2 * size].clone()
        view[..., :size] = left * cosine - right * sine
        view[..., size : 2 * size] = right * cosine + left * sine
