"""The parts of a MetadataBuilder that the GPU benchmarks time and count. No other benchmark names a private attribute.

What a benchmark needs of these has no public name on purpose: an engine has no use for it.
"""

from attncore.kernels.codes import HEADER_COUNTS

ASSEMBLY = ("refuse_while_capturing", "build", "acquire", "arrange", "plan_and_send", "replay")
SIDE = ("check_ready", "wait", "send", "replay")
SHAPES = ("eager", "find")


def assembly(builder):
    """What takes the builder's steps through their stages, and replays graphs over them."""
    return builder._assembly


def side(builder):
    """What sends the builder's steps to the device, by its transport."""
    return builder._assembly.side


def backends(builder):
    """What calls the plans of the builder's backends."""
    return builder._backends


def take_longer_way(builder):
    """No step of the builder is built and sent in one compiled call any more."""
    builder._sent_step = builder._sent_ahead = None


def methods_of_a_step(builder):
    """(owner, names): the methods that a step passes through, outer ones first; a version may lack some.

    Steps take the longer way from now on, in which these methods are.
    """
    take_longer_way(builder)
    yield builder, ("_answer",)
    yield builder._assembly, ASSEMBLY
    yield builder._assembly.side, SIDE
    yield builder._assembly.shapes, SHAPES
    yield builder._backends, ("plan",)


def graphs_of_the_transport(builder):
    """The small graphs that transport ``graph`` replays for eager steps."""
    return list(getattr(builder._assembly.side, "_small", {}).values())


def bytes_of_an_eager_step(builder):
    """From the start of an arena to the end of the fields of a step that runs no graph."""
    return builder._assembly.eager.tail


def journal_entries(builder, step):
    """The entries of block tables that a step's header announces, all tables together."""
    ring = builder._assembly.side._ring
    header = ring.header(step % ring.depth)
    return int(header[HEADER_COUNTS : HEADER_COUNTS + len(builder._assembly.side.tables)].sum())


def wrap_plan_and_send(builder, wrapper):
    """Have ``wrapper(plan_and_send, *args)`` called in place of the builder's way from a built step to the device."""
    take_longer_way(builder)
    inner = builder._assembly.plan_and_send
    builder._assembly.plan_and_send = lambda *args, **named: wrapper(inner, *args, **named)


def use_plan(builder, plan):
    """Have ``plan`` called in place of the plan of every group's backend."""
    builder._backends.plans = tuple((group, plan) for group, _ in builder._backends.plans)


class Sent:
    """Counts, beside the builder, the bytes that each step sends: by the header, where the device reads it."""

    def __init__(self, builder):
        self.builder, self.side = builder, builder._assembly.side
        self.fields, self.entries, self.surpluses, self.in_surplus = 0, 0, 0, False
        tables = self.side.tables
        take_longer_way(builder)
        self.send, self.surplus, self.apply = self.side.send, self.side.send_surplus, tables.apply
        self.side.send, self.side.send_surplus, tables.apply = self._send, self._send_surplus, self._apply

    def _send(self, step, shape, *rest):
        self.send(step, shape, *rest)
        self.fields = shape.tail
        self.entries += journal_entries(self.builder, step)

    def _send_surplus(self, num_rows):
        self.in_surplus = True
        self.surplus(num_rows)
        self.in_surplus = False
        self.surpluses += 1

    def _apply(self, index, entries):
        self.entries += entries.numel() * self.in_surplus
        self.apply(index, entries)

    def nbytes(self):
        """Of the last step: the arena to the end of its fields, and the journal."""
        nbytes = self.fields + 8 * self.entries
        self.entries = 0
        return nbytes


def wrap_parts(builder, around):
    """Have ``around(call, name)`` called in place of the parts of a build and a replay that a served step times."""
    assembly, backends = builder._assembly, builder._backends
    backends.plans = tuple((group, around(plan, "plan")) for group, plan in backends.plans)
    if assembly._fill is not None:
        assembly._fill = around(assembly._fill, "fields")
        if assembly.in_one_call is not None:
            assembly.in_one_call.fill = assembly._fill
    assembly.replay = around(assembly.replay, "replay")


def wrap_pieces(builder, around):
    """The same for the pieces of a build, which are then no part of "build" any more. Steps take the longer way."""
    take_longer_way(builder)
    for owner, name in (
        (builder._assembly, "acquire"),
        (builder._assembly, "arrange"),
        (builder._assembly.side, "send"),
    ):
        if owner is not None:
            setattr(owner, name, around(getattr(owner, name), name))
