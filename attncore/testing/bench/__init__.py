"""``attncore bench``: how long a backend's steps take on this machine, and whether that has changed since saved runs.

A run is several passes, each a process of its own (``one_pass``), because times differ from process to process. In a
pass the backend, the reference and a fixed piece of work, the ``yardstick``, take turns (``turns``), so that a moment
in which the machine is slow is one for all of them. ``run`` starts the passes, ``answer`` reads what they say,
``saved_runs`` keeps it, ``change`` compares a run with those kept, ``machine`` says on which machine.
"""
