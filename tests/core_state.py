"""All state of a batch, for tests that a call changes nothing."""


def core_state(batch, *, blocks_in_use=True):
    """Lengths, tables, the order of rows; ``blocks_in_use`` False: without cached blocks and synced columns."""
    core = batch._core
    lengths = slice(None) if blocks_in_use else slice(1)
    tables = [(table._lengths[lengths].tobytes(), table.array.tobytes()) for table in core.tables.values()]
    order = core.order
    rows = tuple(order.req_ids), sorted(order.holes), sorted(order.paused), dict(order.row_of)
    counts = (core.state.num_rows, core.state.changes) if blocks_in_use else (core.state.num_rows,)
    return core.lengths.tobytes(), tables, rows, counts
