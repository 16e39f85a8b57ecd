"""Serves the requests of a trace as an engine would, over metadata of the persistent builder, and verifies the result.

A trace (``traces``) gives requests; ``scheduling`` plans steps of them, over pools of blocks and in virtual time;
``rank_builders`` tells the batches and has the metadata built; ``layers`` run attention or a model over it, with
queries, keys and values that ``token_content`` makes from what each token is; ``checks`` compare the metadata or the
outputs with what they should be; ``results`` count, report and record. ``runner`` is the loop over the steps,
``settings`` the options of a run, ``model_error`` the errors of whole models, ``backend_code`` those of a backend's
code. Imports go in this order, ``runner`` last. Nothing imports torch before layers are made.
"""
