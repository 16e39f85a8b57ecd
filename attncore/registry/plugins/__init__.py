"""Installed plugins: found by their entry points, and loaded so that none stops another.

- ``option_argument``: ``--option NAME=VALUE`` of the commands, read as a spec declares it.
- ``load``: the specs of all plugins, cached for the process.
- ``plugin_code``: what is around all code of a plugin that runs here: one thread at a time, streams, settings.
- ``left_as_found``: the settings of the process, restored after code of a plugin; ``torch_settings``: those of torch.
- ``replaced_functions``: functions of Python that are ours while it runs.
- ``discover``: the entry points that may load, read from metadata.
- ``known_backends``: the names that belong to distributions known to attncore.
- ``plugin_record``: PluginRecord, what is known of one plugin.
- ``hookspecs``: the hooks that a plugin implements.

Each imports only from those after it.
"""
