"""Processes of torch.distributed on this machine, as torchrun starts them, and what became of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(program, *arguments, count=2, **environ):
    """The exit codes and error outputs of ``count`` processes of ``program``."""
    port = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env=os.environ | port | environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], said


def two_ranks(folder, fault="none", compiler="none", interleave=0):
    """Of two_ranks.py: the exit codes, error outputs and rank 0's findings."""
    result = folder / "result.json"
    program = Path(__file__).with_name("two_ranks.py")
    codes, said = started(program, folder, result, fault, compiler, interleave)
    return codes, said, json.loads(result.read_text()) if result.exists() else None
