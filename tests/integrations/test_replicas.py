"""examples/replicas.py over two processes of examples/serve.py: what one engine says; one that dies is dropped."""

import errno
import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.models import decoder  # noqa: E402
from integrations.test_engine_streams import byte_tokenizer  # noqa: E402
from replicas import Balancer, asked  # noqa: E402
from replicas import Handler as BalancedHandler  # noqa: E402
from serve import EngineThread, Handler, listening  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40, 20, 9, 2)]
NEW = 12


@contextmanager
def process(program, *words):
    """A process of an example, and where it listens."""
    started = subprocess.Popen(
        [sys.executable, str(EXAMPLES / program), *words, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = started.stdout.readline()
        assert line.startswith("listening on "), line
        yield started, line.split()[-1]
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def post(address, **fields):
    status, answer = asked(address, "POST", "/generate", json.dumps(fields).encode())
    return status, json.loads(answer)


def health(address):
    return json.loads(asked(address, "GET", "/health")[1])


def all_outputs(front, new):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: post(front, prompt=prompt, max_new_tokens=new), PROMPTS))
    assert [status for status, _ in answers] == [200] * len(PROMPTS), answers
    return [answer["output"] for _, answer in answers]


def test_two_replicas_say_what_one_engine_says_and_one_that_dies_is_dropped(tmp_path):
    model = decoder("llama")
    model.save_pretrained(tmp_path)
    engine = Engine(model)
    expected = engine.complete(PROMPTS, NEW)
    longer = engine.complete(PROMPTS, 5 * NEW)
    with ExitStack() as stack:
        (first, one), (second, other) = (stack.enter_context(process("serve.py", str(tmp_path))) for _ in range(2))
        _, front = stack.enter_context(process("replicas.py", one, other))
        assert all_outputs(front, NEW) == expected
        assert health(front) == {"replicas": {one: 0, other: 0}, "dropped": []}
        assert health(one)["finished"] + health(other)["finished"] == len(PROMPTS)
        assert min(health(one)["finished"], health(other)["finished"]) > 0
        threading.Timer(0.05, first.kill).start()  # while it has requests, or before them
        assert all_outputs(front, 5 * NEW) == longer
        first.wait()
        assert all_outputs(front, NEW) == expected
        assert health(front) == {"replicas": {other: 0}, "dropped": [one]}
        second.kill()
        second.wait()
        assert post(front, prompt=[3], max_new_tokens=1) == (
            503,
            {"error": "no replica answers; start one, and ask again"},
        )


def test_a_crowd_waits_in_the_kernel_until_it_is_accepted():
    """Connections of a crowd are made before the server has accepted one, and answered once it does."""
    server = listening("127.0.0.1", 0, BalancedHandler, balancer=Balancer(["127.0.0.1:1"]))
    with ExitStack() as stack:
        stack.callback(server.server_close)
        crowd = [stack.enter_context(socket.create_connection(server.server_address, timeout=5)) for _ in range(64)]
        for client in crowd:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        assert [client.recv(15) for client in crowd] == [b"HTTP/1.1 200 OK"] * len(crowd)


def test_an_interrupt_ends_a_replica_that_has_requests(tmp_path):
    """Its engine is inside of torch then, in a thread that Python does not wait for."""
    decoder("llama").save_pretrained(tmp_path)
    with process("serve.py", str(tmp_path)) as (started, address), ThreadPoolExecutor(16) as pool:
        for number in range(16):
            pool.submit(post, address, prompt=[number + 3] * 40, max_new_tokens=80)
        end = time.monotonic() + 60
        while not health(address)["running"]:
            assert time.monotonic() < end, "no request ran"
            time.sleep(0.001)
        started.send_signal(signal.SIGINT)
        assert started.wait(20) == 130


def test_a_balancer_without_files_to_open_drops_no_replica(monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("replicas.asked", fails)
    balancer = Balancer(["127.0.0.1:8001"])
    status, answer = balancer.send("/generate", b"")
    assert status == 503
    assert answer["error"].startswith("too many requests at once")
    assert balancer.health() == {"replicas": {"127.0.0.1:8001": 0}, "dropped": []}


@pytest.fixture
def served():
    """A replica in this process, with a tokenizer: its address, and the engine."""
    engine = Engine(decoder("llama", vocab_size=257), tokenizer=byte_tokenizer())
    server = listening("127.0.0.1", 0, Handler, engine=EngineThread(engine))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield "{}:{}".format(*server.server_address), engine
    server.shutdown()
    server.server_close()


def test_text_is_answered_with_text(served):
    address, engine = served
    expected = Engine(engine.model, tokenizer=engine.tokenizer).complete(["Once"], 9)
    assert post(address, prompt="Once", max_new_tokens=9) == (200, {"output": expected[0]})
    assert health(address) == {"running": 0, "finished": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": [], "max_new_tokens": 1}, "prompt: length 0"),
        ({"prompt": [999], "max_new_tokens": 1}, "prompt: token 999 is outside 0..256"),
        ({"prompt": [3]}, 'body: give {"prompt": ..., "max_new_tokens": ...}'),
        ({"prompt": [3], "max_new_tokens": "two"}, "max_new_tokens: 'two'"),
        ({"prompt": [3], "max_new_tokens": 1, "stop": 0}, "stop: 'int' object is not iterable; give a list of token"),
        ({"prompt": [3], "max_new_tokens": 1, "colour": 1}, "colour: no such field; there are temperature and stop"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(served, fields, said):
    status, answer = post(served[0], **fields)
    assert status == 400
    assert answer["error"].startswith(said)
    assert post(served[0], prompt=[3], max_new_tokens=1)[0] == 200  # and it serves on


def test_what_is_no_request_is_told_what_is_wrong(served):
    address = served[0]
    for body in (b"no", b"[]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000):
        assert asked(address, "POST", "/generate", body)[0] == 400
    assert asked(address, "POST", "/other", b"{}")[0] == 404
    assert asked(address, "GET", "/other")[0] == 404
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.putrequest("POST", "/generate")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"bytes at most" in answer.read()
    connection.close()


POST = b"POST /generate HTTP/1.1\r\n"
BODIES = {
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}",
    "chunked, with a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a length of many digits": POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a body that nobody reads": b"GET /health HTTP/1.1\r\nContent-Length: 50\r\n\r\n",
}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_whose_end_is_not_known_is_no_second_request(served, kind, balanced):
    with ExitStack() as ends:
        host, _, port = served[0].rpartition(":")
        address = host, int(port)
        if balanced:
            server = listening("127.0.0.1", 0, BalancedHandler, balancer=Balancer([served[0]]))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ends.callback(server.server_close)
            ends.callback(server.shutdown)
            address = server.server_address
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(BODIES[kind] + b"GET /hidden HTTP/1.1\r\nConnection: close\r\n\r\n")
            said = b""
            with suppress(ConnectionResetError):  # what follows is not read
                while piece := client.recv(1 << 16):
                    said += piece
    assert said.count(b"HTTP/1.1 ") == 1
    assert said.startswith(b"HTTP/1.1 200 " if kind.startswith("a body") else b"HTTP/1.1 400 ")


def test_a_request_that_fails_alone_is_told_so(served, monkeypatch):
    address, engine = served
    inner = engine._forward

    def forward(metadata):
        if 77 in metadata.input_ids.tolist():
            raise RuntimeError("the model failed")
        return inner(metadata)

    monkeypatch.setattr(engine, "_forward", forward)
    with ThreadPoolExecutor(2) as pool:
        bad, good = pool.map(lambda token: post(address, prompt=[token], max_new_tokens=4), (77, 3))
    assert bad == (500, {"error": "the request's step failed: the model failed"})
    assert good[0] == 200


@pytest.mark.parametrize("leaves", ["closes", "resets"])
def test_a_client_that_leaves_has_its_request_forgotten(served, monkeypatch, leaves):
    """Its blocks are free again, long before its last token."""
    address, engine = served
    inner, began, goes_on = engine._forward, threading.Event(), threading.Event()

    def forward(metadata):
        began.set()
        assert goes_on.wait(20)
        return inner(metadata)

    monkeypatch.setattr(engine, "_forward", forward)
    monkeypatch.setattr("serve.PATIENCE", 0.01)
    gone, looks = threading.Event(), Handler._gone

    def look(handler):
        if found := looks(handler):
            gone.set()
        return found

    monkeypatch.setattr(Handler, "_gone", look)
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": [3, 4], "max_new_tokens": engine.max_model_len - 2}).encode()
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert began.wait(20)
        if leaves == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert gone.wait(20)
    time.sleep(0.05)  # the thread that looked says so to the engine's
    goes_on.set()
    while health(address)["running"]:
        time.sleep(0.001)
    assert health(address) == {"running": 0, "finished": 0}
    assert engine.pool.num_free == engine.num_blocks - 1
    assert post(address, prompt=[3], max_new_tokens=2)[0] == 200


def test_a_connection_that_is_reset_before_a_request_says_nothing(served, capfd):
    host, _, port = served[0].rpartition(":")
    for sent in (b"", b"POST /generate HTTP/1.1\r\n", b"GET /hea"):
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert health(served[0])["running"] == 0
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


class Tokenizer:
    """A tokenizer that waits where it reads the text ``slow``, and fails to decode."""

    eos_token_id = None

    def __init__(self):
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def encode(self, text):
        if text == "slow":
            self.asked.set()
            assert self.goes_on.wait(20)
        return [3, 4]

    def decode(self, tokens, **_):
        raise OverflowError("no such token")


def test_a_tokenizer_that_takes_long_or_fails_is_its_requests_alone(served):
    address, engine = served
    engine.tokenizer = Tokenizer()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, address, prompt="slow", max_new_tokens=2)
        assert engine.tokenizer.asked.wait(20)
        status = post(address, prompt=[3], max_new_tokens=2)[0]
        engine.tokenizer.goes_on.set()
        assert status == 200  # while the text was being read
        assert slow.result() == (500, {"error": "no such token"})
    assert post(address, prompt=[3], max_new_tokens=2)[0] == 200


def test_no_path_drops_a_replica(served):
    balancer = Balancer([served[0]])
    server = listening("127.0.0.1", 0, BalancedHandler, balancer=balancer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for path in (b"/\x01", b"/generate\x7f", b"/\xe9", b"http://a/generate", b"*"):
        with socket.create_connection(server.server_address, timeout=20) as client:
            client.sendall(b"POST " + path + b" HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            assert b" 404 " in client.makefile("rb").readline()
    assert balancer.health() == {"replicas": {served[0]: 0}, "dropped": []}
    server.shutdown()
    server.server_close()


def test_a_replica_that_comes_back_takes_part_again(served):
    balancer = Balancer([served[0]])
    balancer._gone.add(served[0])
    assert balancer.send("/generate", b"{}")[0] == 503
    balancer.look_again()
    assert balancer.health() == {"replicas": {served[0]: 0}, "dropped": []}
    assert balancer.send("/generate", b"{}")[0] == 400


def test_the_replica_with_the_fewest_requests_is_asked(monkeypatch):
    balancer, went = Balancer(["a:1", "b:2"]), []
    done = threading.Event()

    def answer(address, method, path, body):
        went.append(address)
        done.wait(20)
        return 200, b""

    monkeypatch.setattr("replicas.asked", answer)
    with ThreadPoolExecutor(4) as pool:
        for count in range(1, 5):
            pool.submit(balancer.send, "/generate", b"")
            while len(went) < count:
                time.sleep(0.001)
        assert balancer.health()["replicas"] == {"a:1": 2, "b:2": 2}
        done.set()
    assert balancer.health()["replicas"] == {"a:1": 0, "b:2": 0}


@pytest.mark.parametrize("address", ["8001", "host:", "host:port", ":80", "host:0", "host:65536", "host:" + "9" * 9])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=f"^replica: {address} found; give HOST:PORT"):
        Balancer([address])
