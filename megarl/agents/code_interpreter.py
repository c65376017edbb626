"""Python code in the sandbox, as a tool."""

from __future__ import annotations

from typing import Any

from megarl import sandbox
from megarl.agents.tool import TOOLS, ToolUnavailable, describe
from megarl.recipe.sandbox import SandboxConfig

# Runs inside the sandbox and reads the policy's program from standard input. As in a notebook, the value of an expression in
# the last line is printed.
_RUNNER = """
import ast, sys, traceback
source = sys.stdin.read()
names = {"__name__": "__main__"}
try:
    tree = ast.parse(source, "program.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "program.py", "eval"), names)
        if value is not None:
            print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    sys.stdout.flush()
    sys.stderr.write("".join(lines))
    sys.exit(1)
"""

_LIMITS = {
    "cpu": "it used more than {limits.cpu_seconds:g} seconds of CPU time",
    "wall": "it ran for more than {limits.wall_seconds:g} seconds",
    "memory": "it used more than {limits.memory_mb} MiB of memory",
    "files": "it made more than {limits.scratch_files} files",
    "output": "it printed more than {limits.output_kb} KiB",
}


_config = SandboxConfig()  # `prepare` sets the recipe's section


def prepare(settings: dict[str, Any]) -> None:
    """Set the recipe's limits.

    Raises SandboxUnavailable if this machine has no sandbox, and ValueError if a package for programs is not installed.
    """
    global _config
    _config = SandboxConfig(**settings.get("sandbox", {}))
    sandbox.check(_config.packages)


# The docstring is part of the prompt: a change of it changes what models sample.
def code_interpreter(code: str) -> str:
    """Runs Python code and returns what it prints.

    Args:
        code: The code to run.
    """
    limits = _config.limits()
    try:
        result = sandbox.run(_RUNNER, code, limits, _config.packages)
    except (sandbox.SandboxUnavailable, sandbox.SandboxError) as error:
        raise ToolUnavailable(str(error)) from error
    return report(result, limits)


def report(result: sandbox.Result, limits: sandbox.Limits) -> str:
    """Return the program's output, and the reason if it failed or was stopped."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.limit is not None:
        parts.append(f"Error: {_LIMITS[result.limit].format(limits=limits)}, and was stopped")
    elif not result.ok and not result.stderr:
        parts.append(f"Error: it ended with exit status {result.exit_code}")
    return "\n".join(part for part in parts if part) or "(it printed nothing)"


TOOLS.register("code_interpreter")(describe(code_interpreter, prepare=prepare))
