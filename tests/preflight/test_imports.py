"""Modules that the preparation of a run imports: torch's import would take longer than all of the rest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_on_cpus_is_prepared_without_torch(quickstart_data: Path, tmp_path: Path) -> None:
    settings = [f"model.path={quickstart_data}/model", f"runs_dir={tmp_path}", "cluster.device=auto"]
    settings += [f"data.train_files={quickstart_data}/data/train.parquet"]
    settings += [f"data.eval_files={quickstart_data}/data/test.parquet"]
    script = (
        "import sys, megarl.train\n"
        "from megarl.preflight.run_setup import prepare_run\n"
        "from megarl.preflight.load import load_recipe\n"
        f"setup = prepare_run(load_recipe('recipes/quickstart.yaml', {settings!r}))\n"
        "assert setup.prepared.prompts and setup.platform.name == 'cpu'\n"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
