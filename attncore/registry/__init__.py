"""Choosing a backend: what is asked, what the machine has, what is installed, and which backend fits.

- ``doctor``: a plugin diagnosed in a child process.
- ``choice``: every backend judged against a request on a host, and one of them chosen.
- ``plugins``: installed plugins, found and loaded.
- ``spec``: BackendSpec, what a backend declares.
- ``host``: Host, what a machine has.
- ``request``: AttentionRequest, what a model and an engine ask; ``request_from_config_json`` reads one from a model.
- ``reasons``: Reason, why a backend cannot be used.
- ``device_patterns``, ``package_requirements``: names and patterns of devices, and versions of distributions.
- ``child_process``: a module run in a process of its own, with a time limit.

Each imports only from those after it. A choice goes the other way: request, host and the specs of the plugins meet in
``choice``, which gives a Choice, or Reasons against every backend.
"""
