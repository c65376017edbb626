"""Workers and scenarios for the tests of megarl.cluster; a script: ``python -m tests.support.cluster_workers SCENARIO LOGS``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

from megarl.cluster.key_value_store import join_ranks
from megarl.types import SampleTokens

ROOT = Path(__file__).parents[2]


class Echo:
    """A trainer without torch."""

    def __init__(self, *args):
        self.args, self.rank = args, int(os.environ["RANK"])

    def identify(self):
        return self.rank, os.getpid(), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ.get("ROLE")

    def variable(self, name):
        return os.environ.get(name)

    def echo(self, value):
        return self.rank, value

    def fetch(self, ref, index):
        return ref.get()[index].tokens.tolist()

    def last_token(self, ref, index):
        return int(ref.get()[index].tokens[-1])

    def give(self, *lists):
        """Return a text and each list as vectors, for `scatter_with_data`."""
        return f"from {self.rank}", [[np.array(numbers) for numbers in vectors] for vectors in lists]

    def total(self, refs):
        return sum(float(vector.sum()) for ref in refs for vector in ref.get())

    def raise_on(self, rank, message):
        if self.rank == rank:
            raise ValueError(message)
        time.sleep(0.05)

    def raise_everywhere(self):
        raise ValueError("all")

    def sleep_or_die(self, seconds, dies):
        time.sleep(seconds)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds):
        time.sleep(seconds)


class Reducer(Echo):
    """A trainer with a gloo group."""

    def __init__(self, *args):
        super().__init__(*args)
        import torch

        torch.set_num_threads(1)
        join_ranks("gloo", timedelta(minutes=5))

    def sum(self, value):
        import torch

        total = torch.tensor([float(value)])
        torch.distributed.all_reduce(total)
        return total.item()

    def die_in_collective(self, rank):
        if self.rank == rank:
            print("the last words")
            time.sleep(0.3)  # the others wait in the collective by now
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum(1)

    def sum_of_bytes(self, data):
        return self.sum(sum(data))

    def stop_in_collective(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.sum(1)

    def sleep_in_collective(self, rank):
        if self.rank == rank:
            print("the last words")
            time.sleep(1000)
        return self.sum(1)

    def sum_slowly(self, rank, seconds):
        """Sum after `seconds`, in which `rank` changes its stack while the others wait."""
        end, depth = time.monotonic() + seconds, 0
        while self.rank == rank and time.monotonic() < end:
            depth += 1
            self.sleep_at(depth, 0.2)
        return self.sum(1)

    def sleep_at(self, depth, seconds):
        """Sleep below `depth` further calls, so that no two stacks of a loop over depths are equal."""
        if depth:
            self.sleep_at(depth - 1, seconds)
        else:
            time.sleep(seconds)

    def sleep_in_backward(self, rank):
        """Hang in layer 3 where the backward pass computes its activations again; the other ranks wait for its gradient."""
        import torch
        from torch.utils.checkpoint import checkpoint

        class Layer(torch.nn.Module):
            def __init__(self, slow):
                super().__init__()
                self.layer_number, self.calls, self.slow = 3, 0, slow

            def forward(self, x):
                self.calls += 1
                if self.slow and self.calls == 2:
                    time.sleep(1000)
                return x * 2

        x = torch.ones(2, requires_grad=True)
        checkpoint(Layer(self.rank == rank), x, use_reentrant=True).sum().backward()
        torch.distributed.all_reduce(x.grad)

    def raise_in_collective(self, rank):
        if self.rank == rank:
            raise ValueError("this rank has had enough")
        return self.sum(1)


class Engine:
    """A service with a child process in a new session, like an engine with workers."""

    def __init__(self, scale):
        if scale < 0:
            raise ValueError("scale is negative")
        self.scale = scale
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.waiting, self.most_waiting = 0, 0

    def scaled(self, value):
        return self.scale * value

    def child_pid(self):
        return os.getpid(), self.child.pid

    def variable(self, name):
        return os.environ.get(name)

    async def slow(self, value):
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await asyncio.sleep(0.2)
        self.waiting -= 1
        return value

    def concurrency(self):
        return self.most_waiting

    async def generate(self, length):
        await asyncio.sleep(0)
        vectors = [SampleTokens(np.arange(length) + i, np.ones(length, bool), np.zeros(length)) for i in range(2)]
        return {"lengths": [length, length]}, vectors

    async def several(self, parts):
        """Return one list of vectors fewer than there are places, of 1, 2, ... tokens."""
        vectors = [(await self.generate(length))[1] for length in range(1, parts)]
        return [len(each) for each in vectors], vectors

    async def fail_parts(self, parts):
        raise KeyError(f"no {parts} parts")

    async def fail(self):
        raise KeyError("no such prompt")

    def die(self):
        print("the engine's last words")
        os.kill(os.getpid(), signal.SIGKILL)

    async def die_later(self, seconds):
        asyncio.get_running_loop().call_later(seconds, self.die)

    def shutdown(self):
        print("closed in order")


def alive(pid):
    """Return True if a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid):
    """Process ids of all descendants of a process."""
    parents = dict(
        map(int, line.split()) for line in subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()
    )
    family = [pid]
    for ancestor in family:
        family += [child for child, parent in parents.items() if parent == ancestor]
    return family[1:]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# --- scenarios, run as a script: the test checks the output lines that begin with FACT ----------------


def torchrun(scenario, logs):
    """Run a scenario under torchrun: print facts of an intact group, then fail."""
    from megarl.cluster import ClusterError, sigstop_watch
    from megarl.cluster.devices import LocalDevices
    from megarl.cluster.torchrun import cluster as torchrun
    from megarl.cluster.torchrun import rank as torchrun_rank

    if not torchrun_rank.is_controller():
        torchrun_rank.serve(logs)
        return
    devices = LocalDevices("TEST_VISIBLE_DEVICES", [2])
    sigstop_watch.LOOK_SECONDS = 0.3  # detection within 3 s instead of 20 s
    with torchrun.TorchrunCluster(2, logs, devices, trainer_env={"ROLE": "trainer"}, stall=0.0) as cluster:
        group = cluster.start_trainers("tests.support.cluster_workers:Reducer", 2, ())
        role = {"ROLE": "engine"}
        engine = cluster.start_service(
            "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=role
        )
        print("FACT", group.call("identify"), flush=True)
        print("FACT", group.call("sum", 2), group.scatter("echo", [("a",), ("b",)]), flush=True)
        results = group.scatter_with_data("give", [([[1]], [[2, 3]]), ([], [[4]])], parts=2)
        print("FACT", [word for word, _ in results], group.call("total", [refs[1] for _, refs in results]), flush=True)
        print(
            "FACT",
            group.scatter_with_data("give", [None, ([[5]],)], parts=1)[0],
            group.scatter("echo", [("both",)] * 2),
        )
        print("FACT", [engine.call("variable", name).result() for name in ("ROLE", "TEST_VISIBLE_DEVICES", "RANK")])
        print("FACT pids", *engine.call("child_pid").result(), os.getpid(), flush=True)
        cluster.stall = 4.0 if scenario.startswith("sleep_in_") else 0.0  # the first calls may take longer
        began = time.monotonic()
        try:
            if scenario == "engine_dies":
                engine.call("die_later", 0.3).result()
                group.call("sleep", 100)
            elif scenario.startswith("trainer_dies"):  # while it is idle
                os.kill(group.call("identify")[1][1], signal.SIGKILL)
                while scenario == "trainer_dies_polled":
                    cluster.check()
                    time.sleep(0.02)
                time.sleep(1000)
            elif scenario == "stopped_before_a_large_call":  # which the stopped process does not read
                os.kill(group.call("identify")[1][1], signal.SIGSTOP)
                group.call("sum_of_bytes", bytes(1 << 24))
            elif scenario == "idle":
                group.call("sleep", 1000)
            elif scenario != "good":
                group.call(scenario, 1)
        except ClusterError as error:
            print("FACT failed", round(time.monotonic() - began, 1), type(error).__name__, error, flush=True)
            sys.exit(3)
        group.shutdown()
    print("FACT done", flush=True)


def ray(_scenario, logs):
    """A private Ray cluster that waits to be interrupted or killed."""
    from megarl.cluster import connect
    from megarl.platform import select
    from megarl.recipe.schema import Recipe

    recipe = Recipe(name="run", runs_dir=str(logs))
    with connect(recipe, select("cpu")) as cluster:
        engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env={})
        group = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
        print("FACT pids", *engine.call("child_pid").result(), group.call("identify")[0][1], flush=True)
        group.call("sleep", 1000)


if __name__ == "__main__":
    (ray if sys.argv[1] == "ray" else torchrun)(sys.argv[1], Path(sys.argv[2]))
