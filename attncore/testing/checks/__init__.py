"""The checks of the conformance kit, a file a topic."""
