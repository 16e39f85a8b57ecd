"""Faults that a test plants in the bridge: SGLang calls ``plant`` as a plugin of its own, in each of its processes.

ATTNCORE_TEST_FAULT names one: ``window`` (off by one), ``rows`` (those of the table swapped), ``table``
(each page one further) or ``slots`` (each one further).
"""

import os


def plant():
    """Has the bridge do one thing wrong."""
    fault = os.environ.get("ATTNCORE_TEST_FAULT")
    if fault == "window":
        _plant_window()
    elif fault:
        _plant_in_step(fault)


def _plant_window():
    from attncore.integrations.sglang import attention_backend, engine_facts

    right = engine_facts.layer_of

    def layer_of(*given):
        layer = right(*given)
        if layer.sliding_window is not None:
            object.__setattr__(layer, "sliding_window", layer.sliding_window - 1)
        return layer

    attention_backend.layer_of = engine_facts.layer_of = layer_of


def _plant_in_step(fault):
    from attncore.integrations.sglang.step_tensors import StepTensors

    rows, slots = StepTensors.rows, StepTensors.slots

    def wrong_rows(self, *given):
        starts, lengths, table = rows(self, *given)
        if fault == "rows":
            table.copy_(table.flip(0).clone())
        elif fault == "table":
            table += 1
        return starts, lengths, table

    def wrong_slots(self, *given, **more):
        return slots(self, *given, **more) + (fault == "slots")

    StepTensors.rows, StepTensors.slots = wrong_rows, wrong_slots
