"""One address for several replicas (serve.py): each request goes to the one
that has the fewest.

python examples/serve.py MODEL --port 8001 &
python examples/serve.py MODEL --port 8002 &
python examples/replicas.py 127.0.0.1:8001 127.0.0.1:8002 --port 8000
curl 127.0.0.1:8000/generate -d '{"prompt": "Once upon", "max_new_tokens": 20}'

A replica that is gone is dropped, and what it was asked goes to another: no
part of an answer was sent before. It takes part again once its /health answers.
GET /health says which there are, and how many requests each has.
"""

from __future__ import annotations

import argparse
import errno
import http.client
import sys
import threading
import time
from typing import Any

from command_line import Formatter, add_address
from serve import JsonHandler, listening

AGAIN = 1.0
"""Seconds after which a replica that was dropped is asked again."""


class Balancer:
    """Which replicas there are, and how many requests each has. ``addresses`` are HOST:PORT."""

    def __init__(self, addresses: list[str]) -> None:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 1 << 16:
                raise ValueError(f"replica: {address} found; give HOST:PORT")
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(addresses, 0)
        self._gone: set[str] = set()

    def health(self) -> dict[str, Any]:
        """Requests by replica, and those that were dropped."""
        with self._lock:
            there = {one: count for one, count in self._busy.items() if one not in self._gone}
            return {"replicas": there, "dropped": sorted(self._gone)}

    def send(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and answer of a replica; 503 where there is none."""
        while (address := self._take()) is not None:
            try:
                return asked(address, "POST", path, body)
            except (OSError, http.client.HTTPException) as error:
                if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # of this process: no replica is gone
                    return 503, {"error": "too many requests at once for the files that may be open; ask again"}
                with self._lock:
                    self._gone.add(address)
            finally:
                with self._lock:
                    self._busy[address] -= 1
        return 503, {"error": "no replica answers; start one, and ask again"}

    def _take(self) -> str | None:
        with self._lock:
            there = [one for one in self._busy if one not in self._gone]
            if not there:
                return None
            address = min(there, key=self._busy.__getitem__)
            self._busy[address] += 1
            return address

    def look_again(self) -> None:
        """Asks replicas that were dropped, and takes those back that answer."""
        for address in self.health()["dropped"]:
            try:
                there = asked(address, "GET", "/health", timeout=AGAIN)[0] == 200
            except (OSError, http.client.HTTPException):
                continue
            if there:
                with self._lock:
                    self._gone.discard(address)


def asked(address: str, method: str, path: str, body: bytes | None = None, timeout: float | None = None) -> Any:
    """Status and body of an answer. OSError or HTTPException where none comes, or a part of one."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Handler(JsonHandler):
    """``balancer`` is that of the class that ``listening`` makes."""

    balancer: Balancer

    def do_POST(self) -> None:  # noqa: N802
        try:
            body = self.body()
            # No other path goes on: one that http.client refuses would look like a replica that is gone.
            found = self.balancer.send(self.path, body) if self.path == "/generate" else self.elsewhere()
        except ValueError as error:
            found = 400, {"error": str(error)}
        self.say(*found)

    def do_GET(self) -> None:  # noqa: N802
        self.say(*((200, self.balancer.health()) if self.path == "/health" else self.elsewhere()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("replicas", nargs="+", metavar="HOST:PORT", help="where replicas listen")
    add_address(parser, 8000)
    given = parser.parse_args()
    try:
        balancer = Balancer(given.replicas)
        server = listening(given.host, given.port, Handler, balancer=balancer)
    except (OSError, ValueError) as error:
        print(f"replicas.py: {error}", file=sys.stderr)
        return 2

    def look() -> None:
        while True:
            time.sleep(AGAIN)
            balancer.look_again()

    threading.Thread(target=look, daemon=True).start()
    server.serve_forever()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
