"""attncore inside other people's models: each module is an extra of its own and imports its library."""
