"""What a replay gives: numbers of steps and checks (``measurements``), the ``report`` made of them, as JSON and as a
table, and the batches of its steps as a file (``save_steps``)."""
