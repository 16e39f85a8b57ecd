"""A replica: an engine behind HTTP, by Python's standard library. replicas.py
balances several of them.

python examples/serve.py MODEL --port 8001
curl 127.0.0.1:8001/generate -d '{"prompt": "Once upon", "max_new_tokens": 20}'

POST /generate takes "prompt" (a text, or token ids), "max_new_tokens" and, if
wanted, "temperature" and "stop"; the answer is {"output": ...} once all is
there, or {"error": ...}. GET /health says how many requests there are.
Requests that come at the same time run in the same steps. What was asked by
somebody who has gone is forgotten. There is no other protection than that it
listens on this machine alone (--host).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from command_line import Formatter, add_address, add_model

LONGEST = 1 << 24
"""Bytes of a request's body."""
PATIENCE = 0.5
"""Seconds after which a thread that waits for an answer looks whether who asked is still there."""


class EngineThread:
    """An engine in a thread of its own, the only one that runs its steps. Others ask and wait.

    Prompts are checked, and texts made tokens and tokens texts, by the threads that ask: a long text, or a tokenizer
    that fails, is theirs alone."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.finished = engine, 0
        self.running: dict[Any, Future[Any]] = {}
        self._asked: queue.SimpleQueue[tuple[Future[Any] | None, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def complete(self, gone: Callable[[], bool] = lambda: False, **asked: Any) -> Any:
        """The output of a prompt: token ids, or text. ValueError or TypeError where it can never run.

        ConnectionAbortedError, and its blocks are given back, where ``gone`` says that nobody waits for it."""
        request, answer = self.engine.request(**asked), Future[Any]()
        self._asked.put((answer, request))
        while not wait([answer], PATIENCE).done:
            if gone():
                self._asked.put((None, request))
                raise ConnectionAbortedError("who asked has gone")
        answer.result()
        return request.output if request.decode is None else "".join(request.news())

    def _run(self) -> None:
        try:
            while True:
                self._take()
                for request in self.engine.step():
                    self._answer(request)
        except BaseException:  # the engine cannot go on; a balancer sees that its process is gone
            logging.getLogger(__name__).exception("the engine failed")
            os._exit(1)

    def _take(self) -> None:
        """Queues what was asked meanwhile, and forgets what nobody waits for; waits where nothing runs."""
        while not self.running or not self._asked.empty():
            answer, request = self._asked.get()
            if answer is not None:
                self.engine.waiting.append(request)
                self.running[request] = answer
            elif self.running.pop(request, None) is not None:  # else it has finished meanwhile
                self.engine.cancel(request)

    def _answer(self, request: Any) -> None:
        answer, self.finished = self.running.pop(request), self.finished + 1
        if request.error is not None:
            answer.set_exception(RuntimeError(f"the request's step failed: {request.error}"))
        else:
            answer.set_result(None)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON; says nothing of each request."""

    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # who asked has reset the connection
            super().handle()

    def parse_request(self) -> bool:
        """Closes the connection behind a body that nobody reads: else it would be taken for the next request."""
        parsed = super().parse_request()
        sent = {"content-length", "transfer-encoding"} & {*map(str.lower, self.headers)} if parsed else ()
        if sent and self.command != "POST":
            self.close_connection = True
        return parsed

    def body(self) -> bytes:
        """The request's body; ValueError where its length is not said, or too large."""
        lengths = self.headers.get_all("Content-Length", [""])
        length = lengths[0] if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        if not length.isascii() or not length.isdigit() or int(length[:20]) > LONGEST or len(length) > 20:
            self.close_connection = True  # what follows is no request: where it ends is not known
            raise ValueError(f"Content-Length: {length[:40]!r} found; give the body's length, {LONGEST} bytes at most")
        return self.rfile.read(int(length))

    def elsewhere(self) -> tuple[int, Any]:
        """The answer for a path that is not served."""
        return 404, {"error": f"{self.path[:40]}: not here; POST /generate, GET /health"}

    def say(self, status: int, answer: Any) -> None:
        """Sends JSON: bytes that are it, or what becomes it."""
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        with suppress(ConnectionError):  # who asked has gone
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Handler(JsonHandler):
    """``engine`` is the EngineThread of the class that ``listening`` makes."""

    engine: EngineThread

    def do_POST(self) -> None:
        try:
            body = self.body()
            found = (200, self._completed(body)) if self.path == "/generate" else self.elsewhere()
        except (RecursionError, TypeError, ValueError) as error:
            found = 400, {"error": str(error)}
        except Exception as error:
            found = 500, {"error": str(error)}
        self.say(*found)

    def do_GET(self) -> None:
        counts = {"running": len(self.engine.running), "finished": self.engine.finished}
        self.say(*((200, counts) if self.path == "/health" else self.elsewhere()))

    def _completed(self, body: bytes) -> dict[str, Any]:
        asked = json.loads(body)
        if not isinstance(asked, dict) or not {"prompt", "max_new_tokens"} <= asked.keys():
            raise ValueError('body: give {"prompt": ..., "max_new_tokens": ...}')
        if strange := asked.keys() - {"prompt", "max_new_tokens", "temperature", "stop"}:
            raise ValueError(f"{min(strange)[:40]}: no such field; there are temperature and stop")
        return {"output": self.engine.complete(self._gone, **asked)}

    def _gone(self) -> bool:
        """Whether who asked has closed the connection, or its half of it."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = socket.SOMAXCONN  # of the 5 that Python has, the kernel resets connections of a crowd


def listening(host: str, port: int, handler: type[JsonHandler], **shared: Any) -> Server:
    """A server whose handlers have ``shared`` as attributes; says where it listens. Port 0 is any that is free."""
    server = Server((host, port), type(handler.__name__, (handler,), shared))
    print(f"listening on {server.server_address[0]!s}:{server.server_address[1]}", flush=True)
    return server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add_model(parser)
    add_address(parser, 8001)
    asked = parser.parse_args()
    try:
        import attncore.integrations.transformers  # noqa: F401, I001  (first: it says what is not installed)
        import torch
        from engine import Engine
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kind = {"dtype": torch.bfloat16} if torch.cuda.is_available() else {}
        model = AutoModelForCausalLM.from_pretrained(asked.model, **kind)
        try:
            tokenizer = AutoTokenizer.from_pretrained(asked.model)
        except (OSError, ValueError):
            tokenizer = None  # prompts are token ids then
        engine = Engine(model.to("cuda" if kind else "cpu"), tokenizer=tokenizer)
        server = listening(asked.host, asked.port, Handler, engine=EngineThread(engine))
    except (ImportError, OSError, ValueError) as error:
        print(f"serve.py: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        return 2
    server.serve_forever()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # a closed pipe
            sys.stdout.flush()
        os._exit(130)  # at an ordinary end of Python the engine's thread, inside of torch, would abort the process
