"""JSON Lines of `attncore build`: a batch or a step per line in, its metadata per line out.

- ``list_builder``: a line is a batch of groups of sequences, built by the list builder.
- ``persistent_builder``: a line is a step of requests with their blocks, built by the persistent builder.
- ``metadata_as_json``: what both write, and how large it may be.
- ``json_fields``: what both read: a record's fields, checked, with errors that begin with the field's path.

Neither builder's module imports the other's.
"""
