"""Adopted steps: metadata made from the device tensors that an engine has for a step, in place of a batch of ours.

``steps`` has AdoptedSteps; ``settings`` checks its arguments, ``given`` the tensors that the engine gives for a step on
the device, and ``host_given`` those on the host; ``captured_rows`` knows the sizes that graphs were captured for. The
compiled kernel ``AdoptedRows`` fills the host arrays; ``step`` is the metadata over them. ``size`` is
what steps of one number of rows share. ``device_fields`` makes on the device what the engine has not, and
``error_texts`` says why a step is refused.
"""
