"""What a plugin may do to the settings of the process, as source, and these settings."""

import atexit
import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings
from importlib.machinery import FileFinder

USUAL = (FileFinder, type(None))
ASKED = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64, "dtype": "float32"}
CHANGES = {
    "clears the path": "import sys; sys.path.clear()",
    "replaces the path": "import sys; sys.path = []",
    "a list on the path": "import sys; sys.path.append(['x'])",
    "a bad finder": "import sys; sys.meta_path.insert(0, None)",
    "a finder that raises": """
import os
import sys
class Raises:
    def find_spec(*args): raise RuntimeError("mine")
sys.meta_path.insert(0, Raises())""",
    "another folder": "import os; os.chdir('/')",
    "no stderr": "import sys; sys.stderr = None",
    "another stdout": "import io, sys; sys.stdout = io.StringIO()",
    "forks": "import os; os.fork()",
    "a low recursion limit": "import sys; sys.setrecursionlimit(len(__import__('inspect').stack()) + 30)",
    "warnings are errors": "import warnings; warnings.simplefilter('error')",
    "no warnings": "import warnings; warnings.filters = None",
    "another backend": "import os; os.environ['ATTNCORE_BACKEND'] = 'nope'",
    "no bad variables": "import os; del os.environ['ATTNCORE_KERNELS']; os.environ['ATTNCORE_STRICT_PLUGINS'] = 'x'",
    "another environment": "import os; os.environ = {}",
    "a finder of an old signature": """
import sys
class Old:
    def find_spec(self, name): return None
sys.meta_path.insert(0, Old())""",
    "a finder whose distributions have an old signature": """
import sys
class Old:
    def find_spec(self, name, path, target=None): return None
    def find_distributions(self): return ()
sys.meta_path = [*sys.meta_path, Old()]""",
    "a finder that fails half way": """
import sys
class Half:
    def find_spec(self, name, path, target=None): return None
    def find_distributions(self, context):
        yield from ()
        raise SystemExit
sys.meta_path.append(Half())""",
    "a finder that claims everything": """
import importlib.machinery, sys
class All:
    def find_spec(self, name, path=None, target=None): return importlib.machinery.ModuleSpec(name, None)
sys.meta_path.append(All())""",
    "no list of finders": "import sys; sys.meta_path = None",
    "a path hook that raises": """
import sys
def raises(folder): raise RuntimeError("mine")
sys.path_hooks.insert(0, raises)
sys.path_importer_cache.clear()""",
    "a path hook that fails later": """
import sys
class Fails:
    def __init__(self, folder): pass
    def find_spec(self, name, target=None): raise RuntimeError("mine")
sys.path_hooks.insert(0, Fails)
for folder in sys.path: sys.path_importer_cache[folder] = Fails(folder)""",
    "no path hooks": "import sys; sys.path_hooks = sys.path_importer_cache = None",
    "ignores signals": "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]",
    "a timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.02)",
    "traces": "import sys; sys.settrace(lambda *_: None)",
    "traces threads": "import threading; threading.settrace(lambda *_: 1 / 0); threading.setprofile(lambda *_: 1 / 0)",
    "traces all threads": """
import threading
for name in ("settrace", "setprofile"):
    getattr(threading, name + "_all_threads", getattr(threading, name))(lambda *_: None)""",
    "watches functions": """
import sys
if hasattr(sys, "monitoring"):
    sys.monitoring.use_tool_id(4, "acme")
    sys.monitoring.register_callback(4, sys.monitoring.events.CALL, lambda *_: None)
    sys.monitoring.set_events(4, sys.monitoring.events.CALL)""",
    "hooks": """
import sys, threading
sys.excepthook = sys.displayhook = sys.breakpointhook = sys.unraisablehook = threading.excepthook = None""",
    "no stdin": "import sys; sys.stdin = None",
    "short tracebacks": "import sys; sys.tracebacklimit = 0",
    "no files of bytecode": "import sys; sys.dont_write_bytecode = not sys.dont_write_bytecode",
    "short numbers": "import sys; sys.set_int_max_str_digits(640)",
    "large stacks of threads": "import threading; threading.stack_size(1 << 24)",
    "hooks of generators": """
import sys
sys.set_asyncgen_hooks(print, print)
sys.set_coroutine_origin_tracking_depth(3)""",
    "symbols for all": "import os, sys; sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)",
    "another locale": "import locale; locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
    "a time limit of sockets": "import socket; socket.setdefaulttimeout(0.001)",
    "another folder of temporary files": "import tempfile; tempfile.tempdir = '/absent/acme'",
    "another Python": "import sys; sys.executable = None",
    "a file mode": "import os; os.umask(0o777); os.umask(0)",
    "a descriptor of signals": """
import os, signal
signal.set_wakeup_fd(os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK))""",
    "decimals": "import decimal; decimal.getcontext().prec = 2; decimal.setcontext(decimal.Context(prec=3))",
    "fewer descriptors": """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))""",
    "long turns of threads": "import sys; sys.setswitchinterval(100)",
    "another fault handler": """
import faulthandler
faulthandler.disable() if faulthandler.is_enabled() else faulthandler.enable(2)""",
    "another function at the exit": "import atexit; atexit.register = print",
    "a callback of gc": "import gc; gc.callbacks.append(print)",
    "other callbacks of gc": "import gc; gc.callbacks = [print]",
    "no gc": "import gc; gc.disable(); gc.set_threshold(7)",
    "debugs gc": "import gc; gc.set_debug(gc.DEBUG_UNCOLLECTABLE)",
    "no lines of the log": "import logging; logging.disable(); logging.getLogger('asyncio').disabled = True",
    "a configuration of the log": """
import logging, logging.config
logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})""",
    "another root of the log": "import logging; logging.basicConfig(level=1, force=True)",
    "lines of the log that fail": """
import logging
logging.setLoggerClass(type("Mine", (logging.Logger,), {}))
logging.setLogRecordFactory(lambda *_, **__: 1 / 0)""",
    "another way to start processes": "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
    "no modules": """
import sys
for name in [name for name in sys.modules if name.startswith("attncore.builder")]: del sys.modules[name]""",
}


def settings():
    """The settings of the process that a plugin may change for the others."""
    streams = sys.stdout, sys.stderr
    own = {name: value for name, value in os.environ.items() if name.startswith(("ATTNCORE_", "PYTHON"))}
    limits = sys.getrecursionlimit(), [*warnings.filters]
    hooks = [*sys.path_hooks], [type(one) for one in sys.path_importer_cache.values() if type(one) not in USUAL]
    limits += resource.getrlimit(resource.RLIMIT_NOFILE), round(sys.getswitchinterval(), 6), faulthandler.is_enabled()
    functions = os._exit, atexit.register, faulthandler.dump_traceback_later, faulthandler.register
    modules = {name: one for name, one in sys.modules.items() if name.startswith("attncore.builder")}
    places = [*sys.path], [*sys.meta_path], os.getcwd()
    limits += [*gc.callbacks], id(gc.callbacks), gc.isenabled(), gc.get_threshold(), gc.get_debug()
    functions += sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), os.umask
    functions += signal.set_wakeup_fd, sys.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook
    functions += threading.excepthook, sys.get_asyncgen_hooks()
    if hasattr(sys, "monitoring"):
        functions += tuple(map(sys.monitoring.get_tool, range(6)))
    limits += sys.get_int_max_str_digits(), threading.stack_size(), sys.getdlopenflags(), _umask(), _wakeup_fd()
    limits += sys.get_coroutine_origin_tracking_depth(), locale.setlocale(locale.LC_ALL), socket.getdefaulttimeout()
    limits += sys.stdin, getattr(sys, "tracebacklimit", None), sys.dont_write_bytecode, decimal.getcontext().prec
    limits += logging.root.manager.disable, logging.root.level, [*logging.root.handlers], logging.getLoggerClass()
    limits += logging.getLogRecordFactory(), logging.getLogger("asyncio").disabled
    limits += multiprocessing.get_start_method(allow_none=True), tempfile.tempdir, sys.executable
    return os.getpid(), hooks, *places, streams, os.environ, own, limits, functions, modules


def _umask():
    found = os.umask(0o077)
    os.umask(found)
    return found


def _wakeup_fd():
    if threading.current_thread() is not threading.main_thread():
        return None
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found
