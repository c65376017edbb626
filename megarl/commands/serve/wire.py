"""Protocol buffer messages of the Tinker API, as tinker 0.38 sends and reads them.

The field numbers are facts of that protocol. They are compiled here from a table, so that neither a compiler nor generated code
is needed. The server does not read messages that the table has as `bytes`. `codec.pass_header` refuses a field that is not in the table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_PACKAGE = "tinker_public"
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}  # types of fields
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of `dtype`."""
STOP, LENGTH = 0, 1
"""Values of `stop_reason`."""

# Message: fields as "number name type"; `[]` marks a repeated field, `?` an optional one (HasField), `{}` a map from text.
_MESSAGES = {
    "SparseCsr": ["1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"],
    "Tensor": ["1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape int64[]"],
    "EncodedTextChunk": ["1 tokens bytes"],
    "ImageChunk": ["1 data bytes", "2 format string", "3 expected_tokens int32?", "4 override_dimensions bytes"],
    "DmelChunk": ["1 dmel bytes"],
    "Chunk": ["1 encoded_text EncodedTextChunk", "2 image ImageChunk", "3 dmel DmelChunk"],
    "LossConfigValue": ["1 number double?", "2 text string?"],
    "Datum": [
        "1 model_input Chunk[]", "2 loss_fn_inputs Tensor{}", "3 model_input_spans bytes[]", "4 loss_fn_input_spans bytes[]",
    ],
    "ForwardBackwardRequest": [
        "1 model_id string", "2 seq_id int32", "3 data Datum[]", "4 loss_fn string", "5 loss_fn_config double{}",
        "6 forward_only bool", "7 loss_fn_config_v2 LossConfigValue{}",
    ],
    "BatchedTensor": ["1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64[]"],
    "ArrayRecord": ["1 type_tag string", "2 fields BatchedTensor{}", "3 num_datums int64"],
    "ForwardBackwardOutput": ["1 loss_fn_output_type string", "2 loss_fn_outputs ArrayRecord[]", "3 metrics double{}"],
    "TopkLogprobs": ["1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"],
    "SampledSequence": ["1 stop_reason int32", "2 tokens bytes", "3 logprobs bytes?", "4 topk_sampled_logprobs TopkLogprobs"],
    "SampleResponse": ["1 sequences SampledSequence[]", "2 prompt_logprobs bytes?", "3 topk_prompt_logprobs TopkLogprobs"],
}  # fmt: skip


def new(message: str) -> Any:
    """Return an empty message, by its name in the table."""
    return _classes()[message]()


def parse(message: str, data: bytes) -> Any:
    """Return the message in `data`. Raises ValueError if it is damaged."""
    from google.protobuf.message import DecodeError

    try:
        return _classes()[message].FromString(data)
    except DecodeError as error:
        raise ValueError(f"the body is not a {message} of the Tinker API: {error}") from None


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="megarl/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptors = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES)
    return {each.name: message_factory.GetMessageClass(each) for each in descriptors}


def _add_field(message: Any, number: str, name: str, kind: str) -> None:
    plain = kind.removesuffix("[]").removesuffix("?").removesuffix("{}")
    field = message.field.add(name=name, number=int(number), label=_OPTIONAL)
    if kind.endswith("{}"):
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_OPTIONAL, type=_SCALARS["string"])
        _set_type(entry.field.add(name="value", number=2, label=_OPTIONAL), plain)
        field.label, field.type = _REPEATED, _MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, plain)
    if kind.endswith("[]"):
        field.label = _REPEATED
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{kind}"
