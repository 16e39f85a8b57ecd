"""What a replay compares, each way in a file.

Without attention: ``metadata_check`` compares every field with ``oracle``, a recount in plain Python. With layers:
``attention_check`` compares outputs with dense attention, ``model_check`` logits with the model alone, both for the
requests that ``sampled_check`` chooses. Results go to ``attncore.replay.results.measurements.Verification``.
"""
