"""Stands in for vLLM, of which SGLang takes one operator on a CPU without its own compiled ones."""
