"""Write docs/doctor.md from the checks and the version sets: ``python -m docs.generate.doctor``."""

from __future__ import annotations

from pathlib import Path

from megarl.commands.doctor.catalogue import CHECKS
from megarl.commands.doctor.versions import MINIMUM_VERSIONS, SETS
from megarl.platform.version_sets import VersionSet

PAGE = Path(__file__).resolve().parents[1] / "doctor.md"

_HEAD = """# Check a machine, or look at a live run

```bash
python -m megarl doctor                                    # this machine
python -m megarl doctor recipes/quickstart.yaml            # and the recipe's model, data, scorers and devices
python -m megarl doctor recipes/quickstart.yaml --json     # for scripts: a list of {check, status, text, remedy, host, rank}
bash launch/multinode.sh -- python -m megarl doctor recipes/quickstart.yaml     # on every node of a cluster
python -m megarl doctor runs/mine                          # a live run: what each process does now, who waits for whom
```

## Before a run

Each finding is one line: the status, the check, the observation and, after `->`, the remedy. The status is `ok`, `warning`
(the run may work) or `FAIL` (the run cannot work). The exit status is 0 if no check failed, 1 if one failed, and 2 if the
recipe does not load. The command changes, starts and installs nothing, and deletes its probe files. It takes 10 to 30
seconds, mostly for the imports. With a recipe it also reads the data, which may take longer; the run then reads the data
from the cache.

A check that raises or exceeds its time limit (for example because a file system hangs) fails, and the other checks still
run. A check that does not apply to the machine prints no line. The checks of a kind of device run if the machine has such
devices or their software, or if the recipe's `cluster.device` names them.

If `RAY_ADDRESS` or `cluster.ray_address` names a Ray cluster, the checks run on every node, in the environment that the
run's processes would have there. Nodes with failures come first, and for each node only warnings and failures are shown
(`--json` has everything). `--no-nodes` checks only this machine; `--nodes` uses the Ray cluster that runs on it. The
recipe's checks run only on the machine where the command starts, as in a run's controller.

## A live run

```
$ python -m megarl doctor runs/mine
controller on node0 (pid 4101)
  thread MainThread:
    /opt/megarl/megarl/trainer/group.py:240 update
    /opt/megarl/megarl/step.py:120 update_actor
    ...
trainer processes (2): update_actor, for 48 s
  waiting for others:
    rank 0: all_to_all_single in the expert model parallel group (ranks 0-1), backward
      megatron/core/tensor_parallel/mappings.py:444 forward
      ...
  others wait for:
    trainer rank 1 on node0 (pid 4212): 1 collective behind in the expert model parallel group
      /opt/mine/my_loss.py:21 my_loss
      /opt/megarl/megarl/algorithms/objective.py:94 objective
      ...
service engine0 on node0 (pid 4180)
  thread megarl-engine0:
    /opt/megarl/megarl/engines/loop.py:223 _next_command
    ...
```

The command takes the directory of a run and prints the innermost Python frames of its processes, without stopping or slowing
them: in each process a thread answers, also while other threads are in a collective, a file system or a device call. Start it
on the machine, in the container and as the user of the controller (`run.lock` has its host). `--json` prints the same as data.

- **Waiting for others:** the function, the process group under Megatron's name for it, and the layer, if a module with
  `layer_number` is on the stack.
- **Others wait for:** ranks that have started fewer collectives than others of the same group. On devices, collectives start
  without waiting, so the count shows this and not the stack. A difference of a few collectives is normal while a run makes
  progress: look twice.
- **No answer:** native code holds Python's lock (GIL), or the process is stopped. If `py-spy` is installed there
  (`pip install py-spy`) and may trace processes (in Docker: `--cap-add SYS_PTRACE`), its stack comes from py-spy.
- **not finished:** collectives in torch's flight recorders for gloo and NCCL, which torch 2.13 has on. HCCL's needs
  `TORCH_HCCL_TRACE_BUFFER_SIZE=2000` in `cluster.environment`. Counts and recorders were tested with gloo, not on GPUs or NPUs.

The sockets are in `/tmp/megarl-stacks-UID`, which only the user can open. [faults.md](faults.md#calls-that-hang)
describes when a hung call ends.

`python -m docs.generate.doctor` writes this page from `megarl/commands/doctor/`.

## Checks
"""

_SETS = """
## Version sets

The packages of a machine are compared with one of the sets for its platform: the set that the most installed packages
belong to. Different versions are a warning: they may work, but are untested. megarl's tests run with the CPU set. The other
sets follow the version tables of the packages and were not tested here. They are defined in `megarl/platform/*_kind.py`.
"""
_TABLE_HEAD = "| check | condition |\n|---|---|"
# Checks that recipe.py and nodes.py add for a recipe or a cluster: name -> description.
RECIPE_AND_NODE_CHECKS = {
    "recipe: settings": "the engine, its arguments and the recipe's Python functions exist",
    "recipe: model": "config.json, weights, tokenizer and layout pass the checks of `train`, for critic and teacher too",
    "recipe: data": "every row can be read and tokenized (the result stays in the cache for the run)",
    "recipe: rewards": "the scorers can be prepared and the judge can be reached",
    "recipe: devices": "trainers, critic and engines fit on the visible devices",
    "recipe: weights": "the installed vLLM supports the recipe's weight sync; the finding names the route and the reason",
    "recipe: environment": "the shell has no other values of variables that the recipe sets or needs",
    "recipe: run": "the run directory is free, or `train.resume` allows the run in it to continue",
    "node": "each node of the Ray cluster answers; its clock and versions agree with the other nodes",
}


def document() -> str:
    """Return the text of the page."""
    checks = [f"| `{check.name}` | {check.description} |" for check in CHECKS]
    more = [f"| `{name}` | {description} |" for name, description in RECIPE_AND_NODE_CHECKS.items()]
    minimum = [f"- {least.package} before {least.version}: {least.problem}" for least in MINIMUM_VERSIONS]
    parts = [_HEAD, _TABLE_HEAD, *checks]
    parts += ["\nFor a recipe or a cluster:\n", _TABLE_HEAD, *more]
    parts += [_SETS, _table(), "\nVersions that are too old in any set:\n", *minimum]
    return "\n".join(parts) + "\n"


def _table() -> str:
    names = list(dict.fromkeys(name for versions in SETS for name in versions.packages))
    system = list(dict.fromkeys(name for versions in SETS for name in versions.system))
    rows = [
        ["", *(versions.name for versions in SETS)],
        ["---"] * (len(SETS) + 1),
        ["Python", *(", ".join(versions.python) for versions in SETS)],
        *([name, *(versions.system.get(name, "") for versions in SETS)] for name in system),
        *([name, *(_pin(versions, name) for versions in SETS)] for name in names),
        ["installation", *map(_installation, SETS)],
        ["remark", *(versions.remark for versions in SETS)],
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _installation(versions: VersionSet) -> str:
    return f"`{versions.install}`" if versions.install.startswith(("bash ", "pip ")) else versions.install


def _pin(versions: VersionSet, name: str) -> str:
    if name not in versions.packages:
        return ""
    return versions.packages[name].removeprefix("==") or "any"


if __name__ == "__main__":
    PAGE.write_text(document())
