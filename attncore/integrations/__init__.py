"""attncore in models of other libraries: each integration imports its library and is an extra of its own."""
