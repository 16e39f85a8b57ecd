"""What the random sequences of batches.py know of a batch beside it: its requests, their blocks, and its bytes."""

import oracles
from core_state import core_state
from hypothesis import strategies as st

MAX_REQS, MAX_LEN, MAX_TOKENS, MAX_ENCODER = 6, 46, 64, 20


class Request:
    def __init__(self, blocks, computed, encoder, encoded):
        self.blocks, self.computed, self.paused = blocks, computed, False
        self.encoder, self.encoded = encoder, encoded


class Model:
    """The part of ``Batches`` that its rules ask; ``start`` of ``Batches`` sets the attributes."""

    def fresh(self, count):
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return blocks

    def some(self, data, ids=None):
        return data.draw(st.sampled_from(sorted(self.requests if ids is None else ids)))

    def width(self, group):
        return oracles.cdiv(MAX_ENCODER if group.cross else MAX_LEN, group.block_size)

    def columns(self, group, blocks):
        """The manager's blocks as the kernel's."""
        size = group.kernel_block_size or group.block_size
        each = group.block_size // size
        return size, [block * each + k for block in blocks for k in range(each)]

    def as_given(self, by_group):
        return by_group[self.groups[0].name] if self.one_group else by_group

    def room(self, request):
        own = [len(request.blocks[group.name]) * group.block_size for group in self.groups if not group.cross]
        return min(*own, MAX_LEN) - request.computed

    def ready(self, request):
        """Whether the request can run: a preempted one also needs its encoder's blocks again."""
        cross = [len(request.blocks[group.name]) * group.block_size for group in self.groups if group.cross]
        return not request.paused and (request.encoded or not cross or cross[0] >= request.encoder)

    def frozen(self):
        return core_state(self.batch), [memory.tobytes() for memory in self.builder._assembly.ring.memory]

    def batch_bytes(self):
        """What a caller can tell of the batch: the cached block of a row is not among it."""
        return core_state(self.batch, blocks_in_use=False)

    def without_null(self, scheduled):
        """Requests whose next tokens would go to a null block (made null by a window) do not run."""
        for name, request in self.requests.items():
            count = scheduled.get(name, 0 if request.paused else 1)
            for group in self.groups:
                if not group.cross and count and not request.paused:
                    first, last = (
                        request.computed // group.block_size,
                        (request.computed + count - 1) // group.block_size,
                    )
                    if 0 in request.blocks[group.name][first : last + 1]:
                        scheduled[name] = 0
        return scheduled
