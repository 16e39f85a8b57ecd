"""Operations for backends and models: the cache writer with its kernel, and the torch operator."""
