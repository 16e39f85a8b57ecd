"""What a backend declares: its spec.

- ``facts``: a spec's facts as JSON types and in words.
- ``fitting_fields``: the fields of a request that a spec accepts.
- ``backend_spec``: BackendSpec, every fact of a backend, and the contract's version.
- ``check_fields``: the checks and conversions of a spec's fields.
- ``variant``: Variant, one generation of a library inside a spec; ``option``: Option, which a backend takes.
- ``sizes``: the sets of head and block sizes that a spec accepts, MultipleOf among them.
- ``plain_values``: a plugin's objects read into exact Python values.

Each imports only from those after it.
"""
