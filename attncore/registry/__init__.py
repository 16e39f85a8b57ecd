"""Finding backends, and choosing one: specs, the safe loader, the host as a value, negotiation with reasons."""
