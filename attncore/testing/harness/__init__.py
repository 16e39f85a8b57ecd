"""What the checks stand on: the backend under test, pytest's side of the kit, drawn batches and the support table.

``fixtures`` make a ``subject``, which makes backends; ``covers`` gives a test its row; ``declared_samples`` has samples
of what a spec declares, ``draw_batches`` draws lengths and batches. ``errors`` say how a check ends; ``pytest_plugin``
collects the results into the ``support_table``. ``run_suite`` runs all of it without a test file.
"""
