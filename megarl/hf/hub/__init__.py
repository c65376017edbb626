"""Models and data sets on the Hugging Face hub: names, commits, and files in this machine's cache.

Files are read from the cache of huggingface_hub (HF_HOME), which other programs share, and downloaded if they are missing
there. Only JSON, safetensors, tokenizer files and rows of data sets are downloaded: no code and no pickles. HF_ENDPOINT,
HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual meaning.
"""

from megarl.hf.hub.data import cached_files, data_files, name_of_file, pin_data
from megarl.hf.hub.downloads import FilesToDownload, files_to_download
from megarl.hf.hub.errors import download_command
from megarl.hf.hub.models import (
    cached_model,
    config_folder,
    local_model,
    model_folder,
    name_of_folder,
    pin_model,
    weights_fault,
)
from megarl.hf.hub.names import PREFIX, HubError, HubName, Kind, data_name, model_name
from megarl.hf.hub.splits import CONVERTED

__all__ = [
    "CONVERTED",
    "PREFIX",
    "FilesToDownload",
    "HubError",
    "HubName",
    "Kind",
    "cached_files",
    "cached_model",
    "config_folder",
    "data_files",
    "data_name",
    "download_command",
    "files_to_download",
    "local_model",
    "model_folder",
    "model_name",
    "name_of_file",
    "name_of_folder",
    "pin_data",
    "pin_model",
    "weights_fault",
]
