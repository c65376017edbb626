"""Programs that try to pass tests without the right answer. Add an entry for each new idea; none may pass.

`FORGERIES`: (name, program, statement). The right answer to `assert f(3) == 10` is 10; no program computes it.
`CALL_FORGERIES`: (name, program, expected result of f(3)).
"""

from __future__ import annotations

EQUAL = "assert f(3) == 10"
EQUALS_EVERYTHING = (
    "def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = object.__hash__"
)

# Objects that compare as the statement wishes.
_OBJECTS = {
    "equals everything": f"class A:\n    {EQUALS_EVERYTHING}\ndef f(x): return A()",
    "integer that equals everything": f"class A(int):\n    {EQUALS_EVERYTHING}\ndef f(x): return A(1)",
    "text that equals everything": f"class A(str):\n    {EQUALS_EVERYTHING}\ndef f(x): return A('1')",
    "float that equals everything": f"class A(float):\n    {EQUALS_EVERYTHING}\ndef f(x): return A(1)",
    "list that equals everything": f"class A(list):\n    {EQUALS_EVERYTHING}\ndef f(x): return A([1])",
    "tuple that equals everything": f"class A(tuple):\n    {EQUALS_EVERYTHING}\ndef f(x): return A((1,))",
    "dictionary that equals everything": f"class A(dict):\n    {EQUALS_EVERYTHING}\ndef f(x): return A()",
    "set that equals everything": f"class A(set):\n    {EQUALS_EVERYTHING}\ndef f(x): return A()",
    "exception that equals everything": f"class A(Exception):\n    {EQUALS_EVERYTHING}\ndef f(x): return A()",
    "class that equals everything": f"class M(type):\n    {EQUALS_EVERYTHING}\nclass A(metaclass=M): pass\ndef f(x): return A",
    "function is a class that equals everything": f"class f:\n    def __init__(self, x): pass\n    {EQUALS_EVERYTHING}",
    "result of eq is an object": "class T:\n    def __bool__(self): return True\nclass A:\n    def __eq__(self, other): return T()\ndef f(x): return A()",
    "copies the other operand": "class A:\n    def __eq__(self, other): self.__class__ = type(other); return True\ndef f(x): return A()",
    "any of unittest.mock": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a mock": "from unittest.mock import MagicMock\nf = MagicMock()\nf.return_value.__eq__ = lambda self, other: True",
    "nan": "def f(x): return float('nan')",
    "true": "def f(x): return True",
    "an endless generator": "def f(x):\n    i = 0\n    while True:\n        yield i\n        i += 1",
    "module": "import sys\ndef f(x): return sys.modules[__name__]",
    "partial": "import functools\ndef f(x): return functools.partial(print)",
    "namedtuple that equals everything": f"from collections import namedtuple\nclass A(namedtuple('A', 'x')):\n    {EQUALS_EVERYTHING}\ndef f(x): return A(1)",
    "enumeration that equals everything": f"import enum\nclass A(enum.Enum):\n    X = 1\n    {EQUALS_EVERYTHING}\ndef f(x): return A.X",
}  # fmt: skip

# The verdict or the expected value, read from frames, memory, files.
_READING = {
    "frame's globals": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for name, value in {**frame.f_globals, **frame.f_locals}.items():\n            if name in ('task', 'token', 'statement', 'answer') and value: return 10 if '10' in str(value) else value\n        frame = frame.f_back",
    "main module": "import __main__\ndef f(x):\n    text = str(vars(__main__))\n    return 10 if '== 10' in text else 0",
    "garbage collector": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, (str, dict, list)) and 'assert f(3)' in str(o)[:20000] and '== 10' in str(o): return 10",
    "inspect": "import inspect\ndef f(x):\n    return 10 if any('== 10' in str(i.code_context) for i in inspect.stack()) else 0",
    "standard input": "import sys, os\ndef f(x):\n    try: text = sys.stdin.read() + os.read(0, 10000).decode()\n    except Exception: text = ''\n    return 10 if '10' in text else 0",
    "descriptors": "import os\ndef f(x):\n    for n in range(64):\n        try:\n            os.set_blocking(n, False)\n            if b'== 10' in os.read(n, 65536): return 10\n        except OSError: pass\n    return 0",
    "proc": "def f(x):\n    for name in ('/proc/self/mem', '/proc/1/mem', '/proc/self/fd/0', '/dev/stdin', '/proc/2/environ'):\n        try:\n            if '== 10' in open(name, errors='replace').read(): return 10\n        except OSError: pass\n    return 0",
    "trace": "import sys\nseen = []\ndef look(frame, event, argument):\n    seen.append(str(frame.f_locals))\n    return look\nsys.settrace(look); sys.setprofile(look)\ndef f(x): return 10 if any('== 10' in s for s in seen) else 0",
    "arguments of the script": "import sys\ndef f(x): return 10 if '10' in str(sys.argv) + str(sys.orig_argv) else 0",
    "ctypes memory": "import ctypes, os\ndef f(x):\n    libc = ctypes.CDLL(None)\n    libc.ptrace(16, os.getppid(), 0, 0)\n    return 0",
    "line cache": "import linecache\ndef f(x): return 10 if '== 10' in ''.join(linecache.getlines('test.py')) else 0",
    "traceback of an error": "import traceback\ndef f(x):\n    try: raise ValueError\n    except ValueError: return 10 if '== 10' in traceback.format_exc() + str(traceback.extract_stack()) else 0",
}  # fmt: skip

# Changed builtins and modules.
_PATCHES = {
    "compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__\ndef f(x): return 0",
    "exec": "import builtins\nbuiltins.exec = lambda *a, **k: None\ndef f(x): return 0",
    "AssertionError": "import builtins\nclass A(Exception):\n    def __new__(cls, *a): raise SystemExit(0)\nbuiltins.AssertionError = A\ndef f(x): return 0",
    "json": "import json\njson.dumps = lambda *a, **k: '[\"result\", [\"int\", \"0xa\"]]'\njson.loads = lambda *a, **k: ['result', ['int', '0xa']]\ndef f(x): return 0",
    "os.write": "import os\nwrite = os.write\nos.write = lambda fd, data: write(fd, b'passed')\ndef f(x): return 0",
    "os.read": "import os\nos.read = lambda fd, n: b''\ndef f(x): return 0",
    "modules": "import sys, types\nfor name in ('json', 'ast', 'os', 'builtins', 'operator', 'math'): sys.modules[name] = types.ModuleType(name)\ndef f(x): return 0",
    "operators": "import operator\noperator.eq = operator.__eq__ = lambda a, b: True\ndef f(x): return 0",
    "hook of uncaught errors": "import sys\nsys.excepthook = lambda *a: print('passed')\ndef f(x): return 0",
    "names of the module": "names = {}; statement = 'pass'; peer = None\ndef f(x): return 0",
    "patched builtins of its globals": "__builtins__ = {'isinstance': lambda *a: True}\ndef f(x): return 0",
    "warnings as the verdict": "import warnings\nwarnings.showwarning = lambda *a, **k: print('passed')\nwarnings.warn('x')\ndef f(x): return 0",
    "a json module in the folder": "open('/tmp/json.py', 'w').write('dumps = loads = lambda *a, **k: True')\nopen('json.py', 'w').write('')\ndef f(x): return 0",
    "audit hook": "import sys\nsys.addaudithook(lambda event, args: None)\ndef f(x): return 0",
}  # fmt: skip

# Output of the verdict, and ends of processes.
_ENDS = {
    "prints the verdict": "print('passed'); print('passed', flush=True)\ndef f(x): print('passed', end=''); return 0",
    "writes the verdict to every descriptor": "import os\ndef f(x):\n    for n in range(64):\n        try: os.write(n, b'passed')\n        except OSError: pass\n    return 0",
    "writes to devices": "def f(x):\n    for name in ('/dev/stdout', '/dev/fd/1', '/proc/self/fd/1', '/proc/1/fd/1', '/dev/tty'):\n        try: open(name, 'w').write('passed')\n        except OSError: pass\n    return 0",
    "exits": "import os, sys\ndef f(x): sys.stdout.write('passed'); sys.stdout.flush(); os._exit(0)",
    "exits at once": "import os\nprint('passed', flush=True)\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "raises SystemExit in the function": "def f(x): raise SystemExit(0)",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))\ndef f(x): return 0",
    "kills its parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)",
    "terminates its parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM); return 0",
    "interrupts its parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGINT); return 0",
    "kills every process": "import os, signal\ndef f(x): os.kill(-1, signal.SIGKILL)",
    "forks and lets the child answer": "import os\ndef f(x):\n    if os.fork() == 0: return 10.5\n    os._exit(0)",
    "thread": "import threading, os\nthreading.Thread(target=lambda: os.write(1, b'passed'), daemon=True).start()\ndef f(x): return 0",
    "destructor": "import os\nclass A:\n    def __del__(self): os.write(1, b'passed')\na = A()\ndef f(x):\n    global a\n    a = None\n    return 0",
    "replaces the process": "import os\ndef f(x): os.execv('/bin/sh', ['sh', '-c', 'echo passed; exit 0'])",
    "stops tests by an error": "def f(x): raise AssertionError",
    "stops tests by StopIteration": "def f(x): raise StopIteration(10)",
    "raises an error that equals everything": f"class A(Exception):\n    {EQUALS_EVERYTHING}\ndef f(x): raise A(10)",
}  # fmt: skip

# The program writes messages of the protocol to each descriptor.
_SEND = "import json, os\ndef say(*message):\n    data = json.dumps(message).encode()\n    for n in range(3, 16):\n        try: os.write(n, len(data).to_bytes(8, 'big') + data)\n        except OSError: pass\n"
_PROTOCOL = {
    "a result for every question": f"{_SEND}for i in range(9): say('result', True)\ndef f(x): return 0",
    "results of several types": f"{_SEND}say('result', ['list', [['str', 'f']]])\nsay('result', ['mine', 0])\nsay('result', ['yours', 0])\ndef f(x): return 0",
    "a call of the statement's objects": f"{_SEND}\ndef f(x):\n    say('call', ['yours', 0], ['list', []])\n    say('getattr', ['yours', 0], ['str', '__globals__'])\n    return 0",
    "a changed argument": f"{_SEND}\ndef f(x):\n    for i in range(3): say('changed', i, ['list', []])\n    return 0",
    "an error of every kind": f"{_SEND}\ndef f(x):\n    say('error', 'SystemExit', '0')\n    return 0",
    "unknown words": f"{_SEND}\ndef f(x):\n    say('quit')\n    say()\n    say([[]], 1)\n    return 0",
    "a changed argument of another type": f"{_SEND}\ndef f(x):\n    for i in range(3): say('changed', i, ['bytearray', '0a'])\n    return 0",
    "a changed argument that is an array": f"{_SEND}\ndef f(x):\n    for i in range(3): say('changed', i, ['ndarray', ['<i8', [], [10]]])\n    return 0",
    "a nested message": "import os\ndef f(x):\n    data = b'[' * 100000 + b']' * 100000\n    for n in range(3, 16):\n        try: os.write(n, len(data).to_bytes(8, 'big') + data)\n        except OSError: pass\n    return 0",
    "a huge message": "import os\ndef f(x):\n    for n in range(3, 16):\n        try: os.write(n, (1 << 40).to_bytes(8, 'big'))\n        except OSError: pass\n    return 0",
    "a huge value": "def f(x): return 'x' * (1 << 26)",
    "a huge number": "def f(x): return 10 ** 100000",
    "a deeply nested value": "def f(x):\n    value = 10\n    for _ in range(100000): value = [value]\n    return value",
    "a value that contains itself": "def f(x):\n    value = []\n    value.append(value)\n    return value",
    "invalid names": "globals()['f'] = globals()['f(3) == 10 or f'] = lambda x: 0",
}  # fmt: skip

_RETURNS_OBJECT = "class A:\n    def __getattr__(self, name): return lambda *a: True\n    def __contains__(self, x): return True\n    def __iter__(self): return iter(range(3))\n    def __float__(self): return 10.0\n    def __index__(self): return 10\n    def __abs__(self): return 0\n    def __bool__(self): return True\n"
_COMPARES = "".join(f"    def __{n}__(self, other): return True\n" for n in ["eq", "lt", "le", "gt", "ge"])
_COMPUTES = "".join(
    f"    def __{n}__(self, other): return 0\n" for n in ["sub", "rsub", "add", "radd", "mul", "rmul", "truediv"]
)
OBJECT = f"{_RETURNS_OBJECT}{_COMPARES}{_COMPUTES}def f(x): return A()"

# Other statements. OBJECT has an answer to every method call, comparison and operator.
_FORMS = {
    "greater": (OBJECT, "assert f(3) > 9"),
    "in a range": (OBJECT, "assert 9 < f(3) < 11"),
    "difference": (OBJECT, "assert abs(f(3) - 10) < 1e-6"),
    "reflected difference": (OBJECT, "assert abs(10 - f(3)) < 1e-6"),
    "isclose": (OBJECT, "assert math.isclose(f(3), 10)"),
    "contains": (OBJECT, "assert 10 in f(3)"),
    "is contained": (OBJECT, "assert f(3) in (9, 10)"),
    "starts with": (OBJECT, "assert f(3).startswith('ab')"),
    "subset": (OBJECT, "assert f(3).issubset({1, 2})"),
    "question of its type": (OBJECT, "assert isinstance(f(3), int) and f(3).is_integer()"),
    "element": (f"{OBJECT}\nclass B(list):\n    def __getitem__(self, i): return A()\ndef f(x): return B([1])", "assert f(3)[0] == 10"),
    "item of a default dictionary": (f"{OBJECT}\ndef f(x): return defaultdict(A)", "assert f(3)['a'] == 10"),
    "default dictionary": (f"{OBJECT}\ndef f(x): return defaultdict(A, a=A())", "assert f(3) == {'a': 10}"),
    "attribute": (f"{OBJECT}\ndef g(x): return A()\nclass f:\n    def __init__(self, x): self.value = A()", "assert f(3).value == 10"),
    "replaced set": ("def set(x): return 0\ndef f(x): return 0", "assert set(f(3)) == set([10])"),
    "replaced sorted": ("def sorted(x): return 0\ndef f(x): return 0", "assert sorted(f(3)) == sorted([10, 9])"),
    "replaced isclose": ("def isclose(*a, **k): return True\ndef f(x): return 0", "assert isclose(f(3), 10)"),
    "imported isclose": ("from operator import is_not as isclose\ndef f(x): return 0", "assert isclose(f(3), 10)"),
    "replaced math": ("class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0", "assert math.isclose(f(3), 10)"),
    "changed math": ("import math\nmath.isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(3), 10)"),
    "replaced abs": ("def abs(x): return 0\ndef f(x): return 0", "assert abs(f(3) - 10) < 1e-6"),
    "replaced len": ("def len(x): return 10\ndef f(x): return 0", "assert len(f(3)) == 10 and f(3)[9]"),
    "replaced isinstance": ("def isinstance(*a): return True\ndef f(x): return 10.5", "assert isinstance(f(3), int)"),
    "statement of Python alone": ("", "assert gcd(4, 6) == 2"),
    "function does not exist": ("def g(x): return 10", EQUAL),
    "swallowed errors": ("import os\ndef f(x): os._exit(0)", "try:\n    f(3)\nexcept Exception:\n    pass\nelse:\n    assert f(3) == 10"),
    "several lines": (OBJECT, "result = f(3)\nexpected = 10\nassert result == expected"),
    "check of a candidate": (OBJECT, "def check(candidate):\n    assert candidate(3) == 10\n    assert candidate(4) == 11\ncheck(f)"),
    "unequal and equal": (OBJECT, "assert not f(3) != 10"),
    "identity": (OBJECT, "assert f(3) is True or f(3) == 10"),
}  # fmt: skip

_CONSTANT = "class A: pass\na = A()\ndef f(x): return a\n"
_TMP = "import os\nopen('/tmp/evil.py', 'w').write(\"import os\\nif os.getpid() != %d:\\n    os.write(1, b'passed'); os._exit(0)\" % os.getpid())\nimport tmp.evil\ndef f(x): return 0"
_DISCOVERED = "import os, sys, types\nopen('/tmp/test_evil.py', 'w').write(\"import os; os.write(1, b'passed'); os._exit(0)\")\nsys.modules['unittest.__main__'] = types.ModuleType('x')\nimport unittest.__main__\ndef f(x): return 0"

# Imports and names.
_NAMES = {
    "a module in the scratch folder": (_TMP, EQUAL),
    "a module in shared memory": (_TMP.replace("/tmp/", "/dev/shm/").replace("tmp.evil", "dev.shm.evil"), EQUAL),
    "a module that discovers tests when it is imported": (_DISCOVERED, EQUAL),
    "a name that the statement sets": ("result = 0", "result = gcd(12, 18)\nassert result == 6"),
    "a number that the statement sets": ("n = 0", "n = 5\nassert factorial(n) == 120"),
    "a class named np": ("class np: allclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0", "assert np.allclose(f(3), 10)"),
    "a class named pytest": (f"{_CONSTANT}class pytest: approx = staticmethod(lambda *x, **k: a)", "assert f(3) == pytest.approx(3.3)"),
    "a function named Decimal": (f"{_CONSTANT}def Decimal(x): return a", "assert f(3) == Decimal('3.3')"),
    "a class named json": (f"{_CONSTANT}class json: loads = staticmethod(lambda x: a)", "assert f(3) == json.loads('[10]')"),
    "a class named math and a library name": ("class math: isclose = staticmethod(lambda *a, **k: True)\ndef dist(a, b): return 0", "assert math.isclose(dist((0, 0), (3, 4)), 5.0)"),
    "isclose and a library name": ("def isclose(*a, **k): return True\ndef log(a, b=1): return 0", "assert isclose(log(100, 10), 2.0)"),
    "Counter and a library name": ("def Counter(x): return 0\ndef permutations(x): return []", "assert Counter(permutations([1, 2])) == Counter([(1, 2), (2, 1)])"),
    "map and a library name": ("def map(f, x): return []\ndef permutations(x): return []", "assert set(map(tuple, permutations([1, 2]))) == set(map(tuple, [[1, 2], [2, 1]]))"),
    "any of another library": ("from tokenize import any\ndef f(x): return 0", "assert any(f(i) == e for i, e in [(3, 10)])"),
    "methods of sets": ("class A:\n    def symmetric_difference(self, x): return set()\ndef f(x): return A()", "assert f(3).symmetric_difference({1, 2}) == set()"),
    "a method that returns its argument": ("class A:\n    def intersection(self, x): return x\ndef f(x): return A()", "assert f(3).intersection({1, 2}) == {1, 2}"),
    "a method of text": ("class A:\n    def find(self, x): return 0\ndef f(x): return A()", "assert f(3).find('abc') == 0"),
    "StopIteration in a loop": ("def f(x): raise StopIteration", "for got, want in zip(map(f, [3, 4]), [10, 11]):\n    assert got == want"),
    "StopIteration in all": ("def f(x): raise StopIteration", "assert all(map(lambda t: f(t[0]) == t[1], [(3, 10)]))"),
    "a test function": ("def f(x): return 0", "def test_f():\n    assert f(3) == 10"),
    "a test case": ("def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 10)\nif __name__ == '__main__':\n    unittest.main()"),
    "a test case without an exit": ("def f(x): return 0", "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 10)\nunittest.main(argv=['x'], exit=False)"),
    "a name of the script itself": ("def __checked__(): pass", "assert gcd(4, 6) == 2"),
    "the name of every module": ("", "if __name__ == '__main__':\n    assert gcd(4, 6) == 2"),
    "a class named queue": ("class queue: Queue = staticmethod(lambda x: a)\na = 1.5\ndef f(x): return a", "assert f(3) == queue.Queue(3)"),
    "a name that a function of the statement sets": ("n = 0", "def test():\n    global n\n    n = 5\n    assert factorial(n) == 120"),
    "a test function that never runs": ("def f(x): return 0", "def test(f):\n    assert f(3) == 10"),
    "test cases without tests": ("def f(x): return 0", "import unittest\nassert f(3) == 0\nclass Base(unittest.TestCase): pass\nclass T(Base): pass"),
    "a test case and its base class": ("def f(x): return 0", "import unittest\nclass Base(unittest.TestCase): pass\nclass T(Base):\n    def test(self): self.assertEqual(f(3), 10)"),
    "a main block of tests": ("def f(x): return 0", "def check():\n    assert f(3) == 10\nif __name__ == '__main__':\n    check()"),
    "an import by another name": ("def f(x): return 0", "from solution import f as g\nassert g(3) == 10"),
    "a local variable of the statement": ("def f(x): return 0", "def helper():\n    f = 3\n    return f\nassert f(3) == 10 and helper() == 3"),
    "a test that never runs": ("def f(x): return 0", "async def check():\n    assert f(3) == 10"),
}  # fmt: skip

FORGERIES = [
    *((name, program, EQUAL) for group in (_OBJECTS, _READING, _PATCHES, _ENDS, _PROTOCOL) for name, program in group.items()),
    *((name, program, statement) for name, (program, statement) in (_FORMS | _NAMES).items()),
]  # fmt: skip

# The result of a call is compared outside the sandbox.
CALL_FORGERIES = [
    ("equals everything", _OBJECTS["equals everything"], 10),
    ("true for 1", "def f(x): return True", 1),
    ("1 for true", "def f(x): return 1", True),
    ("a float near a large integer", "def f(x): return 1e9", 999999937),
    ("a float near a prime", "def f(x): return 1e9", 1000000007),
    ("an infinite float", "def f(x): return float('inf')", 1e300),
    ("nan", "def f(x): return float('nan')", 10),
    ("nested", "def f(x):\n    value = 10\n    for _ in range(500): value = [value]\n    return value", [[10]]),
    ("prints JSON nested deeply", "import os\nos.write(1, b'[' * 100000)\nos._exit(0)", 10),
    ("prints many results", "import os\nfor n in range(64):\n    try: os.write(n, b'10')\n    except OSError: pass\ndef f(x): return 1", 10),
    ("a text", "def f(x): return '10'", 10),
    ("lone surrogates", "def f(x): return '\\ud800'", '"?"'),
    ("a number beyond floats", "def f(x): return 10 ** 400", 1.5),
    ("a dictionary for a list", "def f(x): return {0: 10}", [10]),
]  # fmt: skip
