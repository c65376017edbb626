"""Fields of the Tinker API's JSON requests, as tinker 0.38 sends them. A field that is not here is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from megarl.errors import cut_end

_MOST = 1 << 63  # magnitude of an integer, which then also is a float
_KINDS: dict[str, type] = {
    "text": str,
    "flag": bool,
    "object": dict,
    "list": list,
    "any": object,
}
_WORDS = {
    "text": "a text",
    "integer": "an integer of 64 bits",
    "number": "a number",
    "flag": "true or false",
    "object": "an object",
    "list": "a list",
}

# Fields as "name kind"; `!` marks a required one. Values of kind "any" are checked where they are read.
_CALL = ["type text", "model_id text!", "seq_id integer!", "path text", "ttl_seconds any", "user_metadata object"]
_NEW = ["type text", "session_id text!", "user_metadata object", "optimizer_config object"]
_TABLE = {
    "client/config": ["sdk_version text"],
    "client/dynamic_config": ["sdk_version text"],
    "create_session": ["type text", "tags list", "user_metadata object", "sdk_version text", "project_id text", "display_name text"],
    "session_heartbeat": ["type text", "session_id text!"],
    "create_model": [*_NEW, "model_seq_id integer!", "base_model text!", "lora_config object"],
    "lora_config": ["rank integer!", "seed integer", "train_unembed flag", "train_mlp flag", "train_attn flag"],
    "get_info": ["type text", "model_id text!"],
    "optim_step": [*_CALL[:3], "adam_params any", "optimizer_params any"],
    "save_weights": [*_CALL, "path text!", "overwrite flag"],
    "save_weights_for_sampler": [*_CALL, "kind text", "sampling_session_seq_id integer"],
    "load_weights": [
        *(field.rstrip("!") for field in (*_NEW, *_CALL[1:3])), "model_seq_id integer", "base_model text", "path text!",
        "optimizer flag!", "weights_access_token text",
    ],
    "create_sampling_session": [
        "type text", "session_id text!", "sampling_session_seq_id integer", "base_model text", "model_path text",
    ],
    "asample": [
        "type text", "sampling_session_id text!", "seq_id integer!", "num_samples integer", "prompt object!",
        "sampling_params object!", "prompt_logprobs flag", "topk_prompt_logprobs integer", "prompt_logprobs_last_n integer",
        "topk_sample_logprobs any", "target_prompt_logprobs any", "prompt_alt_tokens_k any", "record_stability_info any",
    ],
    "prompt": ["chunks list!"],
    "chunk": ["type text", "tokens list!"],
    "sampling_params": [
        "max_tokens integer", "seed integer", "stop any", "temperature number", "top_k integer", "top_p number",
    ],
    "retrieve_future": ["request_id text!", "allow_metadata_only flag"],
}  # fmt: skip
_FIELDS = {name: {field.split()[0]: field.split()[1] for field in fields} for name, fields in _TABLE.items()}


def read_fields(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, or of a part of one, without null ones.

    Raises ValueError for a field that this server does not know, one of a wrong type, and one that is missing.
    """
    values, kinds = {key: value for key, value in body.items() if value is not None}, _FIELDS[name]
    if unknown := sorted(set(values) - set(kinds)):
        raise ValueError(
            f"{name} has {', '.join(unknown)}, which this server does not know: it reads {', '.join(kinds)}. Leave the others out, or install "
            "tinker 0.38, which this server is for"
        )
    for key, kind in kinds.items():
        if key in values:
            _check(f"{name}: {key}", values[key], kind.rstrip("!"))
        elif kind.endswith("!"):
            raise ValueError(f"{name} has no {key}; it must be {_WORDS[kind.rstrip('!')]}")
    return values


def _check(where: str, value: Any, kind: str) -> None:
    if kind in ("integer", "number"):
        fits = is_integer(value) or (kind == "number" and isinstance(value, float))
    else:
        fits = isinstance(value, _KINDS[kind])
    if not fits:
        raise ValueError(f"{where} is {cut_end(repr(value), 60)}; it must be {_WORDS[kind]}")


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a value of JSON is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST
