"""Handles call only methods that their processes have, with matching arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rollout import engine_handle
from megarl.rollout.completions import handle as completion_handle
from megarl.rollout.completions.server import CompletionServer
from megarl.rollout.judge.server import JudgeServer
from megarl.rollout.server import RolloutServer
from megarl.rollout.teacher.server import TeacherServer
from megarl.trainer import group
from megarl.trainer.actor import ActorWorker
from megarl.trainer.critic import CriticWorker
from megarl.trainer.datums import group as datum_group
from megarl.trainer.datums.worker import DatumWorker
from megarl.trainer.worker import Worker

PACKAGE = Path(group.__file__).parents[1]
SERVERS = {  # handle -> classes of its processes
    "TrainerGroup": (Worker,),
    "ActorGroup": (ActorWorker,),
    "CriticGroup": (CriticWorker,),
    "DatumGroup": (DatumWorker,),
    "EngineHandle": (RolloutServer,),
    "CompletionHandle": (CompletionServer,),
    "TeacherHandle": (TeacherServer,),
    "JudgeHandle": (JudgeServer,),
}
CALLS = ("_call", "_call_with_data", "_call_with_parts", "_scatter", "_locate_vectors")
# Files that may call by name: the transport, and processes that exist only in an acceptance test or benchmark.
BY_NAME = ("cluster/", "commands/accept/")


def remote_calls() -> Iterator[tuple[str, str, str, int]]:
    """Yield (handle class, process class, method, number of arguments) of each call in the handles."""
    for module in (group, engine_handle, datum_group, completion_handle):
        for handle in (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)):
            for node in ast.walk(handle):
                if not (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS
                ):
                    continue
                method, *arguments = node.args
                assert isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name), ast.unparse(node)
                count = len(arguments)
                if node.func.attr == "_locate_vectors":  # shared arguments, then the samples of each target
                    assert isinstance(arguments[0], ast.Tuple)
                    count = len(arguments[0].elts) + 1
                yield handle.name, method.value.id, method.attr, count


REMOTE_CALLS = list(remote_calls())


@pytest.mark.parametrize(("handle", "process", "method", "count"), REMOTE_CALLS)
def test_arguments_fit_the_signature(handle: str, process: str, method: str, count: int) -> None:
    (server,) = SERVERS[handle]
    called = next(cls for cls in server.__mro__ if cls.__name__ == process)
    function = getattr(server, method)
    assert function.__name__ == method, "the transport sends the name"
    inspect.signature(function).bind(None, *[None] * count)
    assert issubclass(server, called)


def test_every_handle_is_covered() -> None:
    assert {handle for handle, *_ in REMOTE_CALLS} == SERVERS.keys() and len(REMOTE_CALLS) > 40


def test_no_other_file_calls_by_name() -> None:
    """Only the handles call processes by method name."""
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)).startswith(BY_NAME):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                named = (
                    bool(node.args) and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
                )
                transport = node.func.attr in (
                    "call",
                    "call_with_data",
                    "call_with_parts",
                    "scatter",
                    "scatter_with_data",
                )
                assert not (transport and named), f"{path}:{node.lineno}: {ast.unparse(node)}"
