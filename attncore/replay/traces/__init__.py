"""Request traces: ``read_trace`` reads a file in the format of ``azure`` or ``mooncake``; ``synthetic`` draws one.

Both give a Trace of requests (``trace``).
"""
