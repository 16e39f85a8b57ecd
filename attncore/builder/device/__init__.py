"""How a step reaches a device: arenas in host memory, and the two transports that bring them there."""
