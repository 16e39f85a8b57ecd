"""How a step reaches a device: arenas in host memory, and the two transports that send them.

``arena`` lays a step out in ``memory``; ``transport`` chooses ``by_graph`` or ``by_copy``, which send the arena and
bring the block ``tables`` on the device up to date; ``corrections`` makes the lengths of overlapped steps exact there;
``triton_kernels`` are the device kernels of all of them. ``captured_sizes`` records the sizes that graphs were captured
for.
"""
