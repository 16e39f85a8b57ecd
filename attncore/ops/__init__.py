"""Operations for backends and models: the cache writer with its kernel, the torch operator, the forward context."""
