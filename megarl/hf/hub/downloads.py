"""Downloads that a run would start: their size, and the command that does them beforehand."""

from __future__ import annotations

from megarl.hf.hub.errors import hub_errors
from megarl.hf.hub.files import LEFT_OUT, TIMEOUT
from megarl.hf.hub.models import check_weights, model_patterns
from megarl.hf.hub.names import HubName, Kind
from megarl.hf.hub.splits import files_of_split


def download_size(name: HubName, kind: Kind, *, weights: bool = True) -> int | None:
    """Return the bytes of the files that megarl reads, by the hub's list of files; None if the list does not tell.

    `weights`: of a model, with its weights. Downloads nothing. Raises HubError, also if the hub gives no answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    with hub_errors(name, kind):
        info = HfApi().repo_info(
            name.repo, revision=name.revision, repo_type=kind, files_metadata=True, timeout=TIMEOUT
        )
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in getattr(info, "siblings", None) or []}
        if kind == "dataset":  # the README, which may name the files of a split, is not downloaded
            files, _ = files_of_split(name.path, [*sizes], "")
        else:
            if weights:
                check_weights(name, [*sizes])
            patterns = [*model_patterns(weights)]
            files = [*filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=[*LEFT_OUT])]
    return sum(sizes[file] for file in files) or None
