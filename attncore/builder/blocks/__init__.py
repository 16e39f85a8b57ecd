"""Building blocks for engines that do more with a step: host arithmetic on metadata and its arrays."""
