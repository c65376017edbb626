"""Dataset classes written for verl, as its users write them; see tests/commands/data/test_verl_dataset.py."""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from verl.utils.dataset.rl_dataset import RLHFDataset


class HintedDataset(RLHFDataset):
    """Columns of another data set become verl's; a hint goes before the question."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [self._convert(number, row) for number, row in enumerate(self.dataframe)]

    def _convert(self, number, row):
        hint = self.config.get("hint", "Think.")
        return {
            "data_source": "me/hinted",
            "prompt": [{"role": "system", "content": hint}, {"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": np.int64(row["answer"])},
            "extra_info": {"index": number, "tools_kwargs": {"guess": {"create_kwargs": {"degrees": number}}}},
        }


class DrawingDataset(Dataset):
    """Rows without a file, with an image in the messages as verl's processors take it."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.sizes = [4, 5]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, item):
        image = Image.new("RGB", (self.sizes[item], 3), "red")
        content = [{"type": "text", "text": "Look: "}, {"type": "image", "image": image}, {"type": "text", "text": "?"}]
        return {
            "raw_prompt": [{"role": "user", "content": content}],
            "data_source": "me/drawings",
            "dummy_tensor": torch.tensor([0]),
        }


class SampledDataset(RLHFDataset):
    """Draws a new question at each access."""

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"] = [{"role": "user", "content": str(random.random())}]
        return row


class GrowingDataset(RLHFDataset):
    """Changes its rows after a batch."""

    def on_batch_end(self, batch):
        self.dataframe.append(batch)


class MappedDataset(RLHFDataset):
    """Uses what only the package datasets has."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.map(lambda row: row)


class StreamDataset(IterableDataset):
    """Rows without numbers."""


class VideoDataset(DrawingDataset):
    """Rows that megarl cannot read."""

    def __getitem__(self, item):
        return {"prompt": "What moves?", "videos": [b"film"]}


class TalkingDataset(DrawingDataset):
    """Rows for a simulated user."""

    def __getitem__(self, item):
        return {"prompt": "Hello", "interaction_kwargs": {"name": "user"}}


class Plain:
    """No dataset."""
