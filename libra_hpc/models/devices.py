"""Devices as plain data: what one accelerator computes, stores and sends, and how much KV cache it has room for.

`devices.toml` has the built-in ones and their sources. A user's file of the same form adds devices, or replaces those
of the same name; omitted fields take the defaults of `Device`. One compute die of an MI250X (two per card; half the
data sheet's peak):

    ["mi250x"]
    memory_bytes = 68.7e9
    peak_flops = 191.5e12
    hbm_bytes_s = 1.6e12
    intra_bytes_s = 100e9
    inter_bytes_s = 12.5e9
    devices_per_node = 8
"""

from __future__ import annotations

import tomllib
from functools import cache
from math import inf
from pathlib import Path

import msgspec

from libra_hpc.errors import error_text, invalid

from .shapes import ModelShape

BUILTIN = Path(__file__).with_name("devices.toml")
SHARES = (
    "flops_efficiency",
    "hbm_efficiency",
    "link_efficiency",
    "product_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "stream_efficiency",
)
NOT_NEGATIVE = ("kernel_s", "allreduce_s", "host_s", "host_sequence_s", "workspace_bytes")
WORDS = ("name", "aliases", "tables", "fp8_units", "async_steps")
"""Fields that are no numbers; those in none of the three are above 0."""

STEP_TOKENS = 8192
"""Most tokens of one engine step on a GPU, decoded and prefilled: vLLM's default for offline work on an A100."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator and its place in a node, in bytes, bytes/s, FLOP/s, seconds."""

    name: str
    memory_bytes: float
    peak_flops: float
    """Dense bf16 peak."""
    hbm_bytes_s: float
    """Peak bandwidth of device memory."""
    intra_bytes_s: float
    """To the node's other devices, one direction (half of the data sheets' NVLink bandwidth)."""
    inter_bytes_s: float
    """To other nodes, per device, one direction."""
    devices_per_node: int
    host_bytes_s: float = 25e9
    """From and to host memory, one direction: what a copy reaches over PCIe 4.0 x16."""
    aliases: tuple[str, ...] = ()
    tables: str = ""
    """System of the operator tables with this device's compute and memory; empty: none."""
    fp8_units: bool = True
    """Whether it computes in FP8: NVIDIA's from compute capability 8.9 on. Without, few kernels read such caches."""
    flops_efficiency: float = 0.7
    """Share of the peak that large matrix products reach."""
    hbm_efficiency: float = 0.8
    """Share of the memory bandwidth that streaming kernels reach."""
    product_efficiency: float = 0.61
    """Share of the peak that the matrix products of a training step reach. This and the next three: of one H100."""
    attention_forward_efficiency: float = 0.354
    """The same of causal attention, forward."""
    attention_backward_efficiency: float = 0.293
    stream_efficiency: float = 0.78
    """Share of the memory bandwidth that the elementwise operations of a training step reach."""
    kernel_s: float = 3e-6
    """Fixed device time of one kernel in a captured graph."""
    link_efficiency: float = 0.5
    """Share of the link bandwidth that an all-reduce of activations reaches."""
    allreduce_s: float = 6e-6
    """Latency of the smallest all-reduce inside a node."""
    host_s: float = 1.9e-3
    """Host work per engine step: scheduling, input, output. The device waits for it, unless steps are asynchronous.
    Measured with vLLM 0.32 on an H200 (docs/data/h200.toml).
    """
    host_sequence_s: float = 26e-6
    """Host work per running sequence, including sampling with log-probabilities; measured likewise, at a vocabulary
    of 152 k.
    """
    async_steps: bool = False
    """Whether the host works while the device computes (`rollout.async_steps`), so that the slower of both counts."""
    workspace_bytes: float = 3e9
    """Memory that is neither weights nor KV cache: activations of the largest step, graphs, communication buffers."""
    activation_factor: float = 1.0
    """Memory of a layer in a 16-bit type over what fused kernels retain (`memory.activation_bytes_per_token`)."""

    def asynchronous(self) -> Device:
        """This device with engines of asynchronous steps."""
        return msgspec.structs.replace(self, async_steps=True)


CPU = Device(
    name="cpu",
    memory_bytes=0.0,
    peak_flops=0.0,
    hbm_bytes_s=0.0,
    intra_bytes_s=0.0,
    inter_bytes_s=0.0,
    devices_per_node=1,
    workspace_bytes=0.4e9,
    activation_factor=1.4,
)
"""A process without a GPU, of which memory alone counts: its libraries, and norms and gates that store float32 copies
of 16-bit values (docs/log)."""
_device = msgspec.json.Decoder(Device)
"""Makes the type whole, for `msgspec.convert`."""


def device(name: str, path: str | Path | None = None) -> Device:
    """The device of a name or alias, in any case; the user file ``path`` goes first.

    Raises `UserError` for an unknown name, or a file that cannot be read as devices.
    """
    known = {**devices(), **(_read(Path(path)) if path is not None else {})}
    names = {alias: entry for entry in known.values() for alias in entry.aliases} | known
    found = names.get(name.lower())
    if found is None:
        raise invalid("device", name, "unknown device", sorted(known))
    return found


@cache
def devices() -> dict[str, Device]:
    return _read(BUILTIN)


def _read(path: Path) -> dict[str, Device]:
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise invalid("device file", str(path), error_text(error), "a TOML file with one table per device") from error
    return {name.lower(): _entry(path, name.lower(), fields) for name, fields in raw.items()}


def _entry(path: Path, name: str, fields: object) -> Device:
    if not isinstance(fields, dict):
        raise invalid("device file", str(path), f"{name!r} is not a table", "one table per device, such as [mi250x]")
    try:
        entry = msgspec.convert({**fields, "name": name}, Device)
    except msgspec.ValidationError as error:
        raise invalid(
            "device file", str(path), f"device {name!r}: {error}", "the fields of the built-in devices"
        ) from error
    for field in Device.__struct_fields__:
        value = 1 if field in WORDS else getattr(entry, field)
        if field in SHARES and not 0 < value <= 1:
            raise invalid(f"device {name!r} {field}", value, "is no share of the peak", "a number in (0, 1]")
        if not 0 <= value < inf or (not value and field not in NOT_NEGATIVE):
            valid = "a number >= 0" if field in NOT_NEGATIVE else "a number > 0"
            raise invalid(f"device {name!r} {field}", value, "is out of range", valid)
    return entry


MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
UTIL = 0.9
"""Share of a GPU that an engine takes: vLLM's default."""


def kv_capacity(device: Device, shape: ModelShape, tp: int) -> int:
    """Tokens of KV cache of a replica of ``tp`` devices; 0 when weights and workspace leave no room.

    Raises `UserError` for a ``tp`` that does not shard the model.
    """
    shape.check_tp(tp, "tp", rollout=True)
    free = device.memory_bytes * UTIL - shape.weight_bytes / tp - device.workspace_bytes
    return max(0, int(free // shape.kv_bytes_per_device(tp)))


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that a replica needs to finish a trajectory of ``tokens`` context tokens.

    One more than they fill: a prompt whose last block is cached computes that block again, into another.
    """
    return -(-tokens // block_size) + 1
