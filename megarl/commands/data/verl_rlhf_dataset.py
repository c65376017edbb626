"""verl's RLHFDataset, from which its users derive dataset classes, for machines without verl.

Names and arguments follow verl/utils/dataset/rl_dataset.py (volcengine/verl at b178a3cd). It reads rows only: megarl
renders prompts, filters long ones and reads images when it reads the written file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import Dataset

from megarl.agents import verl_stand_in
from megarl.data.rows import rows_with_all_columns


def provide() -> None:
    """Let this process import RLHFDataset and what `verl_stand_in` has, if verl is not installed."""
    verl_stand_in.provide(
        {"verl.utils.dataset": (RLHFDataset,), "verl.utils.dataset.rl_dataset": (RLHFDataset,)},
    )


class RowList(list[dict[str, Any]]):
    """Rows of a class that does not read them with the package datasets."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"dataframe.{name}: without verl `dataframe` is a list of rows, unless the class loads its own"
        )


class RLHFDataset(Dataset[dict[str, Any]]):
    """Rows of parquet files in the attribute `dataframe`."""

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key = config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: the files are local."""

    def _read_files_and_tokenize(self) -> None:
        self.dataframe: Any = RowList(row for file in self.data_files for row in rows_with_all_columns(Path(file)))
        if 0 < self.max_samples < len(self.dataframe):
            self.dataframe = RowList(self.dataframe[: self.max_samples])
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return all rows: `data.overlong_prompts` of the recipe decides."""
        return dataframe

    def _build_messages(self, example: dict[str, Any]) -> Any:
        """Return the messages. Placeholders of images stay text, and the column of images stays in the row."""
        return example[self.prompt_key]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        row["extra_info"] = row.get("extra_info") or {}
        row["index"] = row["extra_info"].get("index", 0)
        for name in ("tools_kwargs", "interaction_kwargs"):
            row[name] = row["extra_info"].get(name, {})
        return row
