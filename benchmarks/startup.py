"""CPU seconds, memory and imported packages of the controller's preparation, before it starts a process.

    python -m benchmarks.startup [--rounds 3]

Prepares the quickstart's recipe in new processes: imports `megarl.train`, reads the recipe, loads the tokenizer and the rows, and opens
the run's directory. The second row imports torch first, as the preparation did before it loaded tokenizers without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PREPARE = """
import json, resource, sys, time
{first}
import megarl.train
from megarl.preflight.load import load_recipe
from megarl.preflight.run_setup import prepare_run
imported = time.process_time()
prepare_run(load_recipe("recipes/quickstart.yaml", {settings!r}))
heavy = [name for name in ("torch", "transformers", "ray", "megatron", "vllm") if name in sys.modules]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"imports": imported, "all": time.process_time(), "peak": peak, "heavy": heavy}}))
"""


def prepare(data: Path, runs: Path, first: str) -> dict[str, Any]:
    """Prepare the quickstart in a new process that begins with the statement `first`. Returns its figures."""
    settings = [f"model.path={data}/model", f"runs_dir={runs}", f"data.train_files={data}/data/train.parquet"]
    settings += [f"data.eval_files={data}/data/test.parquet", "cluster.device=cpu"]
    script = PREPARE.format(first=first, settings=settings)
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    from megarl.commands.data.quickstart import prepare_quickstart

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    print(
        "| | imports, CPU s | whole preparation, CPU s | peak memory, MiB | imported packages |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        prepare_quickstart(data, seed=0)
        for name, first in (("as shipped", ""), ("torch first", "import torch")):
            rounds = [prepare(data, data / f"runs{name}{number}", first) for number in range(options.rounds)]
            imports, whole, peak = (
                statistics.median(each[key] for each in rounds) for key in ("imports", "all", "peak")
            )
            print(
                f"| {name} | {imports:.2f} | {whole:.2f} | {peak:.0f} | {', '.join(rounds[0]['heavy'])} |", flush=True
            )


if __name__ == "__main__":
    main()
