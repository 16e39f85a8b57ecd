"""The machine as a value, and how this one is probed: without torch, and without a CUDA context in this process.

- ``host``: Host, what negotiation knows of a machine.
- ``probe``: the facts of this machine, from the four modules below; ``Host.probe`` makes a Host of them.
- ``nvidia``, ``amd``, ``cpu``: what the vendor's driver or the kernel lists; ``accelerator``: one such device.
- ``visible_devices``: the devices that CUDA_VISIBLE_DEVICES and its like leave.

Each imports only from those after it.
"""
