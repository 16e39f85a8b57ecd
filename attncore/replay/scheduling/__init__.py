"""Which requests run in a step, in which blocks, and what a step costs in virtual time."""
