"""A recorded run on the disk, as a training leaves it: tape, metrics, checkpoint, model, data and a user's modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import write_manifest
from megarl.engines.tape import TapeFile
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.load import read_recipe
from megarl.recipe.text import to_yaml
from megarl.rollout.tape import TAPE_FORMAT

SECRET = "do-not-pack-this"


class RecordedRun:
    """A run of six steps that was killed after step 4 and resumed after step 2; its second start failed or ended.

    settings: further settings of the recipe, as on the command line.
    """

    def __init__(self, folder: Path, *, failure: str | None = None, settings: Sequence[str] = ()) -> None:
        self.folder, self.run, self.settings = folder, RunDirectory(folder / "runs" / "mine"), settings
        self.run.tape.mkdir(parents=True)
        self._files()
        self.recipes: list[str] = []
        self._start(0, 0, None, [{"version": version} for version in range(4)], updates=4)
        end = {"version": 6} if failure is None else {"version": 4}
        self._start(1, 2, 0, [{"version": 2}, {"group": 9, "tokens": 5, "checksum": "a"}, end], updates=8)
        last = 6 if failure is None else 4
        lines = [{"step": step, "actor/loss": step / 3} for step in range(last + 1)]
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = "finished" if failure is None else "failed"
        self.run.summary.write_text(json.dumps({"status": status, "error": failure}))

    def _files(self) -> None:
        contents = {
            "model/config.json": "{}",
            "model/tokenizer.json": "{}",
            "model/model.safetensors": "weights" * 100,
            "model/training.bin": "a pickle",
            "model/.env": SECRET,
            "data/train.parquet": "rows" * 500,
            "data/test.jsonl": "{}\n",
            "code/my_rewards.py": "import json\nfrom helpers import tables\n\ndef short(request): return 1.0\n",
            "code/helpers/__init__.py": "from megarl.rewards import scorer\n",
            "code/helpers/tables.py": "from . import names\n",
            "code/helpers/names.py": "",
            "code/unused.py": "",
            "code/losses_of_a_bundle.py": "from megarl.algorithms.losses.registry import policy_loss\n"
            "@policy_loss('of_a_bundle', needs_old_log_probs=False)\ndef loss(inputs, settings): ...\n",
            "functions.py": "import my_rewards\n\ndef long(request): return 0.0\n",
        }
        for name, text in contents.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        checkpoint = self.run.checkpoints / "step_000002"
        (checkpoint / "trainer").mkdir(parents=True)
        (checkpoint / "trainer" / "rank0.safetensors").write_bytes(b"tensors" * 300)
        (checkpoint / "controller.json").write_text('{"source": {"segment": 0}}')
        write_manifest(checkpoint, {})

    def _start(self, number: int, after: int, resumed: int | None, records: list[dict[str, Any]], updates: int) -> None:
        folder = self.folder
        (folder / "empty.yaml").write_text("{}")
        recipe = read_recipe(
            folder / "empty.yaml",
            [
                "name=mine",
                f"runs_dir={folder}/runs",
                f"model.path={folder}/model",
                f"data.train_files=[{folder}/data/train.parquet]",
                f"data.eval_files=[{folder}/data/test.jsonl]",
                "cluster.placement=disaggregated",
                "rollout.max_staleness=2",
                "rollout.engines=2",
                "train.steps=6",
                "train.resume=auto",
                f"reward.functions={{'my_rewards:short': 1.0, '{folder}/functions.py:long': 1.0}}",
                f"cluster.environment.engines={{API_TOKEN: {SECRET}}}",
                f"rollout.engine_args={{hf_token: {SECRET}, max_num_seqs: 8}}",
                "observe.trackers=[wandb]",
                "observe.alerts.url=ALERT_URL",
                "algorithm.modules=[losses_of_a_bundle]",
                "algorithm.loss=of_a_bundle",
                *self.settings,
            ],
        ).recipe
        (self.run.tape / f"recipe-{number}.yaml").write_text(to_yaml(recipe))
        header = {
            "segment": number,
            "format": TAPE_FORMAT,
            "after": after,
            "resumed": resumed,
            "unlogged": False,
            "identity": {"train.seed": 0, "model": {"path": f"{folder}/model", "weights": "abc"}, "critic": None},
        }
        self._write("controller", header, records)
        for engine in range(2):
            events = [{"step": 3 * version, "event": f"update {version}"} for version in range(after, updates + 1)]
            self._write(f"engine{engine}", {"segment": number}, events)

    def _write(self, name: str, header: dict[str, Any], records: list[dict[str, Any]]) -> None:
        file = TapeFile(self.run.tape / f"{name}.jsonl", header)
        file.write(*records)
        file.close()
