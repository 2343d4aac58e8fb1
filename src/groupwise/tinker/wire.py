"""The protocol-buffer messages of the Tinker SDK: a batch for `forward_backward`, and the results
that the SDK reads in no other form.

`MESSAGES` holds their fields as SDK 0.38 writes and reads them.  `google.protobuf` makes the
messages from it, so that the server needs no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from groupwise.errors import ConfigError
from groupwise.utils.http import Refused

PACKAGE = "groupwise_tinker"
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "SparseCsr": ((1, "values", "bytes"),),
    "Tensor": (
        (1, "dense", "bytes"),
        (2, "sparse_csr", "SparseCsr"),
        (3, "dtype", "int32"),
        (4, "shape", "repeated int64"),
    ),
    "EncodedTextChunk": ((1, "tokens", "bytes"),),
    "ImageChunk": ((2, "format", "string"),),
    "DmelChunk": ((1, "dmel", "bytes"),),
    "Chunk": (
        (1, "encoded_text", "EncodedTextChunk"),
        (2, "image", "ImageChunk"),
        (3, "dmel", "DmelChunk"),
    ),
    "Datum": ((1, "model_input", "repeated Chunk"), (2, "loss_fn_inputs", "map Tensor")),
    "LossConfigValue": ((1, "number", "double"), (2, "text", "string")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "repeated Datum"),
        (4, "loss_fn", "string"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "map LossConfigValue"),
    ),
    "BatchedTensor": (
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "repeated int64"),
    ),
    "ArrayRecord": (
        (1, "type_tag", "string"),
        (2, "fields", "map BatchedTensor"),
        (3, "num_datums", "int64"),
    ),
    "ForwardBackwardOutput": (
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "repeated ArrayRecord"),
        (3, "metrics", "map double"),
    ),
    "SampledSequence": (
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "bytes"),
    ),
    "SampleResponse": (
        (1, "sequences", "repeated SampledSequence"),
        (2, "prompt_logprobs", "bytes"),
    ),
}
"""Number, name and kind of the fields of each message.  Enumerations are written as int32."""
FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of the field `dtype`."""
NUMBERS = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
STOPPED, TRUNCATED = 0, 1
"""Values of the field `stop_reason`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datum:
    """One sequence of a batch, n positions."""

    tokens: np.ndarray
    """int64 (n,): what the model reads."""
    inputs: Mapping[str, np.ndarray]
    """Columns (n,) by the names that the loss has for them."""


class BatchRequest:
    """What `forward_backward` is asked for.  Its data are read apart: a request whose data are
    refused still has its place among the model's requests.
    """

    def __init__(self, message: Any) -> None:
        """message: a `ForwardBackwardRequest`."""
        self._message = message
        self.model_id: str = message.model_id
        self.number: int = message.seq_id
        """Place among the requests of the model, from 1."""
        self.loss: str = message.loss_fn
        self.forward_only: bool = message.forward_only

    @property
    def config(self) -> dict[str, float | str]:
        """The settings of the loss."""
        config: dict[str, float | str] = {}
        for name, value in self._message.loss_fn_config_v2.items():
            config[name] = value.text or value.number
        return config

    def data(self) -> list[Datum]:
        """Read the sequences.  Raises Refused for what is not read."""
        if not self._message.data:
            raise Refused("the request has no data")
        return [_datum(place, datum) for place, datum in enumerate(self._message.data)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnCompletion:
    """A completion, as the SDK is told of it."""

    tokens: np.ndarray
    logp: np.ndarray
    """Log-probability of each token, nats."""
    truncated: bool


def read_batch(body: bytes) -> BatchRequest:
    """Read the body of `forward_backward`.  Raises Refused for bytes that are no such message."""
    from google.protobuf.message import DecodeError

    message = _kinds()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise Refused("the body is no ForwardBackwardRequest of protocol buffers") from None
    return BatchRequest(message)


def _datum(place: int, message: Any) -> Datum:
    parts = []
    for chunk in message.model_input:
        for kind in ("image", "dmel"):
            if chunk.HasField(kind):
                raise Refused(f"data[{place}] holds a chunk of kind {kind!r}: only text is read")
        parts.append(_numbers(f"data[{place}]", chunk.encoded_text.tokens, NUMBERS[INT32]))
    if not parts:
        raise Refused(f"data[{place}] has an empty model_input")
    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        inputs[name] = _column(f"data[{place}].loss_fn_inputs[{name!r}]", tensor)
    return Datum(tokens=np.concatenate(parts).astype(np.int64), inputs=inputs)


def _column(name: str, tensor: Any) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        raise Refused(f"{name} is sparse: only dense tensors are read")
    if len(tensor.shape) > 1:
        raise Refused(f"{name} has the shape {list(tensor.shape)}: one number a position is read")
    if tensor.dtype not in (FLOAT32, INT64):
        raise Refused(f"{name} is of neither float32 nor int64")
    return _numbers(name, tensor.dense, NUMBERS[tensor.dtype])


def _numbers(name: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise Refused(f"{name} has {len(data)} bytes, which are no numbers of {dtype.name}")
    return np.frombuffer(data, dtype)


def batch_output(logp: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Write the result of `forward_backward`.   logp: for each datum (n,), nats."""
    message = _kinds()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    sizes = [column.size for column in logp]
    dtype = NUMBERS[FLOAT32]
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logp))
    field = record.fields["logprobs"]
    field.dtype = FLOAT32
    field.data = np.concatenate(logp).astype(dtype).tobytes()
    offsets = dtype.itemsize * np.cumsum([0, *sizes])
    field.offsets = offsets.astype(NUMBERS[INT64]).tobytes()
    return message.SerializeToString()


def sample_output(drawn: Sequence[DrawnCompletion], prompt_logp: np.ndarray | None) -> bytes:
    """Write the result of `asample`.   prompt_logp: (m,) nats, NaN where there is none."""
    message = _kinds()["SampleResponse"]()
    for completion in drawn:
        message.sequences.add(
            stop_reason=TRUNCATED if completion.truncated else STOPPED,
            tokens=completion.tokens.astype(NUMBERS[INT32]).tobytes(),
            logprobs=completion.logp.astype(NUMBERS[FLOAT32]).tobytes(),
        )
    if prompt_logp is not None:
        message.prompt_logprobs = prompt_logp.astype(NUMBERS[FLOAT32]).tobytes()
    return message.SerializeToString()


# ---- the messages themselves


def demand_protobuf() -> None:
    """Raise ConfigError where protocol buffers cannot be read."""
    try:
        _kinds()
    except ImportError as error:
        raise ConfigError(
            "the Tinker SDK sends protocol buffers, and protobuf is not installed: pip install"
            " protobuf"
        ) from error


@cache
def _kinds() -> dict[str, Any]:
    """The class of each message, in a pool of its own: the SDK may be in the same process."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", syntax="proto3")
    file.package = PACKAGE
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add_field(message, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = {}
    for name in MESSAGES:
        descriptor = pool.FindMessageTypeByName(f"{PACKAGE}.{name}")
        kinds[name] = message_factory.GetMessageClass(descriptor)
    return kinds


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    """Add a field to the description of a message.   kind: with `repeated` or `map` before it."""
    form, _, kind = kind.rpartition(" ")
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if form else field.LABEL_OPTIONAL
    if form == "map":
        # A map is a list of messages with a key and a value.
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", kind)
        kind = f"{message.name}.{entry.name}"
    if kind[0].isupper():
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
