"""The protocol's messages in Protocol Buffers: fields with numbers and types, and the classes built from them.

Numbers are the protocol's; a message's own name is on no wire. `*` repeats a type, `{}` maps texts to it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

PACKAGE = "baton.inference"
_FIELDS = {
    "Nothing": "",
    "Live": "live 1 bool",
    "Ready": "ready 1 bool",
    "Model": "name 1 string, version 2 string",
    "Server": "name 1 string, version 2 string, extensions 3 *string",
    "TensorMetadata": "name 1 string, datatype 2 string, shape 3 *int64",
    "ModelMetadata": "name 1 string, versions 2 *string, platform 3 string, inputs 4 *TensorMetadata, outputs 5 *TensorMetadata",
    "Parameter": "bool_param 1 bool, int64_param 2 int64, string_param 3 string, double_param 4 double, uint64_param 5 uint64",
    "Contents": "bool_contents 1 *bool, int_contents 2 *int32, int64_contents 3 *int64, uint_contents 4 *uint32, "
    "uint64_contents 5 *uint64, fp32_contents 6 *float, fp64_contents 7 *double, bytes_contents 8 *bytes",
    "Tensor": "name 1 string, datatype 2 string, shape 3 *int64, parameters 4 {}Parameter, contents 5 Contents",
    "RequestedOutput": "name 1 string, parameters 2 {}Parameter",
    "InferRequest": "model_name 1 string, model_version 2 string, id 3 string, parameters 4 {}Parameter, inputs 5 *Tensor, "
    "outputs 6 *RequestedOutput, raw_input_contents 7 *bytes",
    "InferResponse": "model_name 1 string, model_version 2 string, id 3 string, parameters 4 {}Parameter, outputs 5 *Tensor, "
    "raw_output_contents 6 *bytes",
    "StreamedResponse": "error_message 1 string, infer_response 2 InferResponse",
    "Latest": "num_versions 1 uint32",
    "VersionPolicy": "latest 1 Latest",
    "ConfigInput": "name 1 string, data_type 2 DataType, dims 4 *int64, optional 8 bool",
    "ConfigOutput": "name 1 string, data_type 2 DataType, dims 3 *int64",
    "TransactionPolicy": "decoupled 1 bool",
    "Config": "name 1 string, platform 2 string, version_policy 3 VersionPolicy, max_batch_size 4 int32, input 5 *ConfigInput, "
    "output 6 *ConfigOutput, backend 17 string, model_transaction_policy 19 TransactionPolicy",
    "ModelConfig": "config 1 Config",
    "Duration": "count 1 uint64, ns 2 uint64",
    "InferStatistics": "success 1 Duration, fail 2 Duration, queue 3 Duration, compute_input 4 Duration, "
    "compute_infer 5 Duration, compute_output 6 Duration, cache_hit 7 Duration, cache_miss 8 Duration",
    "ModelStatistics": "name 1 string, version 2 string, last_inference 3 uint64, inference_count 4 uint64, "
    "execution_count 5 uint64, inference_stats 6 InferStatistics, batch_stats 7 *Nothing, memory_usage 8 *Nothing, "
    "response_stats 9 {}Nothing",
    "Statistics": "model_stats 1 *ModelStatistics",
    "IndexRequest": "repository_name 1 string, ready 2 bool",
    "IndexedModel": "name 1 string, version 2 string, state 3 string, reason 4 string",
    "Index": "models 1 *IndexedModel",
}
_CHOICES = {"Parameter": "parameter_choice"}  # messages with a single field
_DATA_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING",
    "BF16",
)  # fmt: skip


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    data_type = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        data_type.value.add(name=f"TYPE_{name}", number=number)
    for message, fields in _FIELDS.items():
        made = file.message_type.add(name=message)
        if message in _CHOICES:
            made.oneof_decl.add(name=_CHOICES[message])
        for field in filter(None, fields.split(", ")):
            name, at, kind = field.split()
            _add_field(made, name, int(at), kind)
    return file


def _add_field(message: DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if message.name in _CHOICES:
        field.oneof_index = 0
    if kind.startswith("{}"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, kind.removeprefix("{}"))
        kind = f"*{message.name}.{entry.name}"
    if kind.startswith("*"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
        kind = kind.removeprefix("*")
    if kind == "DataType":
        field.type, field.type_name = FieldDescriptorProto.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif kind.partition(".")[0] in _FIELDS:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()  # separate from other libraries' pool in this process
    pool.Add(_file())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS}


MESSAGES = _classes()
