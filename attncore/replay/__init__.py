"""The main job: requests of a trace through scheduler, paged cache, compiled metadata and attention, verified.

A request travels ``traces`` -> ``scheduler`` (over ``block_pool``, in the time of ``clock``) -> ``runner``, which
builds the metadata of every step and runs a backend's attention on keys and values from ``content``; ``dense_check``
and ``oracle`` verify, ``report`` tells. Nothing here imports torch before a backend has been chosen.
"""
