"""The versions of vLLM that the bridge was written for."""

from __future__ import annotations

MINORS = ("0.32", "0.33")
"""Whose interfaces were read and run, ascending."""


def version_problem(version: str) -> str | None:
    """Why the bridge does not work with this version of vLLM, as a sentence; None where it does."""
    parts = version.split(".")
    if ".".join(parts[:2]) in MINORS:
        return None
    known = ", ".join(f"{minor}.x" for minor in MINORS)
    return (
        f"attncore: vLLM {version} is installed, and this attncore's bridge was written for {known}; install one of "
        "these, or an attncore whose bridge names your version"
    )


def installed_version() -> str:
    """The version of vLLM that is installed; empty where it cannot be read."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:  # a checkout on the path
        import vllm

        return str(getattr(vllm, "__version__", ""))
