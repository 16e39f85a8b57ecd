"""`attncore doctor`: one plugin loaded, asked and created in a child process with a time limit.

- ``diagnose_plugin``: starts the child process and reads its answers; Diagnosis is the result.
- ``child_main``: what the child process runs.
"""
