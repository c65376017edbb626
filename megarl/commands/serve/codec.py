"""Convert messages of the Tinker API to the types of a `TrainingSession`, and results back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megarl.batching.datums import AdamParams, Datum, DatumScores
from megarl.commands.serve import wire
from megarl.commands.serve.fields import is_integer, read_fields
from megarl.commands.serve.session import SamplingParams
from megarl.errors import cut_end
from megarl.types import Completion, TokenScores

_DTYPES = {wire.FLOAT32: "<f4", wire.INT64: "<i8"}
_MASKED = -99999.0  # the client's log-prob of an entry that is not there
_LONGEST_LIFETIME = 10_000_000_000  # seconds, about 300 years


@dataclass(frozen=True)
class PassRequest:
    """A forward or forward_backward request."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    options: dict[str, float | str]
    forward_only: bool


def pass_header(body: bytes) -> Any:
    """Return the message of a forward_backward request. Raises ValueError if it is damaged."""
    message = wire.parse("ForwardBackwardRequest", body)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise ValueError(
            "forward_backward has a field that this server does not know: it speaks the protocol of tinker 0.38; leave out what the client "
            "has gained since, or install that version"
        )
    return message


def pass_request(message: Any) -> PassRequest:
    """Return a request with its data. Raises ValueError for data that the served models cannot read."""
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.HasField("text") else value.number
    return PassRequest(
        message.model_id,
        message.seq_id,
        [_datum(datum, f"datum {number}") for number, datum in enumerate(message.data)],
        message.loss_fn,
        options,
        message.forward_only,
    )


def _datum(message: Any, where: str) -> Datum:
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError(f"{where}: model_input has an image or audio chunk; this server reads tokens only")
    tokens = [_values(chunk.encoded_text.tokens, "<i4", f"{where}: model_input") for chunk in message.model_input]
    ids = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64)
    vectors = {name: _vector(tensor, f"{where}: {name}") for name, tensor in message.loss_fn_inputs.items()}
    if not len(ids):
        raise ValueError(f"{where}: model_input is empty")
    if "target_tokens" not in vectors:
        raise ValueError(f"{where}: loss_fn_inputs lacks target_tokens, one id per token of model_input")
    targets = vectors.pop("target_tokens")
    if targets.dtype.kind != "i":
        raise ValueError(f"{where}: target_tokens are {targets.dtype}; they must be int64")
    for name, vector in {"target_tokens": targets, **vectors}.items():
        if len(vector) != len(ids):
            raise ValueError(
                f"{where}: {name} has {len(vector)} entries and model_input {len(ids)} tokens; both must be equal"
            )
    return Datum(ids, targets.astype(np.int64), {name: vector.astype(np.float32) for name, vector in vectors.items()})


def _vector(tensor: Any, where: str) -> np.ndarray:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        shape = list(tensor.shape)
        raise ValueError(f"{where} has shape {shape}; this server takes one value per token, of shape [N]")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{where} has data type {tensor.dtype} of the protocol; use float32 or int64")
    vector = _values(tensor.dense, _DTYPES[tensor.dtype], where)
    if tensor.shape and tensor.shape[0] != len(vector):
        raise ValueError(f"{where} has shape {list(tensor.shape)} and {len(vector)} values; both must be equal")
    return vector


def _values(data: bytes, kind: str, where: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise ValueError(
            f"{where} has {len(data)} bytes, not a multiple of {size}, the size of {np.dtype(kind)} values"
        )
    return np.frombuffer(data, kind)


def pass_output(scores: DatumScores, count: int) -> bytes:
    """Return the ForwardBackwardOutput of `count` data."""
    message = wire.new("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    message.metrics["loss:sum"] = scores.loss
    record = message.loss_fn_outputs.add()
    record.num_datums = count
    vectors = [np.asarray(scores.log_probs[number], "<f4") for number in range(count)]
    field = record.fields["logprobs"]
    field.data, field.dtype = np.concatenate(vectors).tobytes(), wire.FLOAT32
    field.offsets = np.cumsum([0, *(vector.nbytes for vector in vectors)]).astype("<i8").tobytes()
    return bytes(message.SerializeToString())


def adam_params(body: Mapping[str, Any]) -> AdamParams:
    """Return the settings of an optim_step request. Raises ValueError for another optimizer and unknown settings."""
    if "optimizer_params" in body:
        raise ValueError(
            "optim_step has parameters of another optimizer; this server updates with AdamW: send tinker.AdamParams"
        )
    settings = body.get("adam_params")
    if not isinstance(settings, dict):
        raise ValueError("optim_step has no adam_params: send tinker.AdamParams(learning_rate=...)")
    names = [each.name for each in fields(AdamParams)]
    if unknown := sorted(set(settings) - set(names)):
        raise ValueError(f"adam_params has {', '.join(unknown)}; this server reads {', '.join(names)}")
    return AdamParams(**settings)


@dataclass(frozen=True)
class SampleCall:
    """An asample request. likely: number of likely tokens to return for each prompt position; None: no prompt log-probs."""

    session: str
    seq_id: int
    prompt: list[int]
    count: int
    params: SamplingParams
    likely: int | None
    last: int | None  # number of tokens to score, at the prompt's end; None: all


def sample_call(body: Mapping[str, Any], longest: int) -> SampleCall:
    """Return the request. longest: most tokens of prompt and response together. Raises ValueError."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs"):
        if body.get(name):
            raise ValueError(f"sample has {name}, which this server does not have: leave it out")
    if body.get("record_stability_info"):
        raise ValueError(
            "sample has record_stability_info, for the loss stable_reinforce, which this server does not have: leave it out, and choose "
            "another loss, in rl_loop with loss_fn=importance_sampling"
        )
    settings, prompt = read_fields("sampling_params", body["sampling_params"]), _prompt(body["prompt"])
    if len(prompt) >= longest:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and with its response it may have {longest} (data.max_prompt_length + "
            f"rollout.max_response_length of the recipe): send at most {longest - 1}, or serve the recipe with longer limits"
        )
    wants = body.get("prompt_logprobs", False)
    likely = body.get("topk_prompt_logprobs", 0)
    likely = likely if wants or likely else None
    params = SamplingParams(
        max_tokens=settings.get("max_tokens", longest - len(prompt)),
        temperature=float(settings.get("temperature", 1)),
        top_p=float(settings.get("top_p", 1)),
        top_k=settings.get("top_k", -1) or -1,
        seed=settings.get("seed"),
        stop_ids=_stop_ids(settings.get("stop")),
        prompt_top_k=likely,
    )
    last = body.get("prompt_logprobs_last_n")
    if last is not None and not wants:
        raise ValueError(f"prompt_logprobs_last_n is {last} without prompt_logprobs: set both, or leave it out")
    if last is not None and not 1 <= last < len(prompt):
        raise ValueError(
            f"prompt_logprobs_last_n is {last}; it must be from 1 to {len(prompt) - 1}, the prompt's length less 1"
        )
    count = body.get("num_samples", 1)
    return SampleCall(body["sampling_session_id"], body["seq_id"], prompt, count, params, likely, last)


def _prompt(body: Any) -> list[int]:
    tokens: list[int] = []
    for chunk in read_fields("prompt", body)["chunks"]:
        if not isinstance(chunk, dict):
            raise ValueError(f"the prompt has a chunk {cut_end(repr(chunk), 60)}; it must be an object")
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise ValueError(f"the prompt has a chunk of type {chunk.get('type')!r}; this server reads tokens only")
        ids = read_fields("chunk", chunk)["tokens"]
        if not all(is_integer(token) for token in ids):
            raise ValueError("the prompt has tokens that are not integers")
        tokens += ids
    return tokens


def _stop_ids(stop: Any) -> tuple[int, ...] | None:
    if stop is None:
        return None
    if isinstance(stop, list) and all(is_integer(token) for token in stop):
        return tuple(stop)
    raise ValueError(
        f"stop is {stop!r}; this server stops at tokens, not at texts: give token ids, for example of tokenizer.encode, or choose a "
        "renderer that ends turns with a special token"
    )


def lifetime(body: Mapping[str, Any]) -> float | None:
    """Return ttl_seconds of a save; None: for ever. Raises ValueError."""
    value = body.get("ttl_seconds")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST_LIFETIME:
        raise ValueError(
            f"ttl_seconds is {value!r}; it must be a number of seconds above 0 and at most {_LONGEST_LIFETIME}, or be left out"
        )
    return float(value)


def sample_output(call: SampleCall, completions: Sequence[Completion]) -> bytes:
    """Return the SampleResponse. Log-probs that the engine cannot give exactly, with another temperature than 1, are absent."""
    message = wire.new("SampleResponse")
    for completion in completions:
        sequence = message.sequences.add()
        sequence.stop_reason = wire.STOP if completion.finish_reason == "stop" else wire.LENGTH
        sequence.tokens = np.asarray(completion.tokens, "<i4").tobytes()
        if not np.isnan(completion.log_probs).any():
            sequence.logprobs = np.asarray(completion.log_probs, "<f4").tobytes()
    if call.likely is not None:
        scores = completions[0].prompt
        assert scores is not None, "the request asked for them"
        _add_prompt_scores(message, scores, call)
    return bytes(message.SerializeToString())


def _add_prompt_scores(message: Any, scores: TokenScores, call: SampleCall) -> None:
    length = len(scores.log_probs)
    first = 1 if call.last is None else length - call.last  # entries before it are not there
    log_probs = np.asarray(scores.log_probs, "<f4").copy()
    log_probs[:first] = np.nan
    message.prompt_logprobs = log_probs.tobytes()
    if call.likely:
        ids, likely = scores.top_tokens.astype("<i4"), scores.top_log_probs.astype("<f4")
        ids[:first], likely[:first] = 0, _MASKED
        top = message.topk_prompt_logprobs
        top.token_ids, top.logprobs, top.k, top.length = ids.tobytes(), likely.tobytes(), ids.shape[1], length
