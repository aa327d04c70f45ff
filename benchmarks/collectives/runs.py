"""Bytes of collectives as `polyhead plan` counts them, beside those of runs over four gloo processes.

"counted" is what is passed to torch.distributed, by the formulas of ring algorithms; "sockets" is what the kernel sent
over the TCP connections of a process and had acknowledged.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyhead
from polyhead.costs import ModelLayout, Ranks
from polyhead.layers import MultiHeadConfig
from polyhead.layers.config import AttentionConfig, build_attention
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig

WORLD = 4
BATCH, HEAD_DIM = 2, 16
OPERATIONS = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
}
UNCOUNTED = ("recv_", "barrier", "broadcast_", "scatter_", "monitored_barrier_")  # of set-up, or counted by the sender

_CAUSAL: dict[str, Any] = {"head_dim": HEAD_DIM, "causal": True}
_LATENT: dict[str, Any] = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "causal": True}


@dataclass(frozen=True)
class Case:
    """Layers over ranks; the sizes of their heads are fixed, `width` is that of the model."""

    name: str
    ranks: Ranks
    config: Callable[[int], AttentionConfig]
    layers: int = 2
    monitored: bool = False


def _heads(heads: int, **options: Any) -> Callable[[int], AttentionConfig]:
    return lambda width: MultiHeadConfig(width, heads, **_CAUSAL, **options)


def _latent(width: int) -> AttentionConfig:
    return LatentConfig(width, 6, positions=RotaryConfig(interleaved=True), **_LATENT)


CASES = (
    Case("tensor, 8 heads", Ranks(tensor=4), _heads(8)),
    Case("tensor, 8 heads over 2 KV heads, norms", Ranks(tensor=4), _heads(8, num_kv_heads=2, qk_norm="rms")),
    Case("tensor, 6 heads, gates and sinks", Ranks(tensor=4), _heads(6, output_gate="head", sinks=True)),
    Case("tensor, latents", Ranks(tensor=4), _latent),
    Case("tensor and sequence", Ranks(tensor=4, sequence_parallel=True), _heads(8, num_kv_heads=2)),
    Case("context, ring", Ranks(context=4, method="ring"), _heads(4, num_kv_heads=2)),
    Case("context, all-gather", Ranks(context=4, method="all_gather"), _heads(4, num_kv_heads=2)),
    Case("FSDP2", Ranks(fsdp=4), _heads(5), monitored=True),
    Case("tensor and FSDP2", Ranks(tensor=2, fsdp=2), _heads(5, num_kv_heads=1)),
    Case("tensor and context", Ranks(tensor=2, context=2, method="ring"), _heads(6, num_kv_heads=2)),
)


class Layers(nn.ModuleList):
    """Attention layers, one after the other; FSDP2 needs a root with a forward."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self:
            x = layer(x, **options).output
        return x


@dataclass
class Counter(TorchDispatchMode):
    """Counts what a process passes to torch.distributed; an operation that is not known raises."""

    sent: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace == "c10d" and name.partition(".")[0] not in UNCOUNTED:
            self._add(OPERATIONS[name.partition(".")[0]], name, args)
        elif namespace == "_c10d_functional" and name not in ("wait_tensor",):
            raise AssertionError(f"a functional collective, {name}, is not counted")
        return function(*args, **(kwargs or {}))

    def _add(self, operation: str, name: str, args: Any) -> None:
        tensors = [x for x in args[:2] if isinstance(x, Tensor | list)]
        given = tensors[0] if operation in ("all-reduce", "send") else tensors[1]  # others write to the first
        parts = given if isinstance(given, list) else [given]
        while isinstance(parts[0], list):
            parts = parts[0]
        if operation == "all-gather" and parts[0].dtype is torch.int64:
            return  # the comparison of arguments of head-parallel layers, on CPUs alone
        size = sum(x.nbytes for x in parts)
        ranks = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject))).size()
        share = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1, "send": 1}.get(
            operation, (ranks - 1) / ranks
        )
        total = self.sent.setdefault(operation, [0, 0])
        total[0] += 1
        total[1] += math.ceil(size * share - 1e-9)


def acknowledged() -> int:
    """Return the bytes that this process has sent over its TCP connections, of which the other ends know."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", facts, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue  # closed since, or not of TCP
    return total


@contextmanager
def counting(results: dict[str, Any], name: str) -> Iterator[None]:
    """Add what is sent in a block to results, by its name."""
    dist.barrier()
    before = acknowledged()
    with Counter() as counter:
        yield
    dist.barrier()
    results[name] = {key: tuple(value) for key, value in counter.sent.items()}
    results[f"{name}, sockets"] = acknowledged() - before


def run(case: Case, width: int, tokens: int) -> dict[str, Any]:
    """Return what this rank sends in the forward and in the backward of a case, in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from polyhead.parallel import HeadParallel, context_parallel, shard_positions, shard_sequence
    from polyhead.training import HeadMonitor

    ranks, results = case.ranks, {}
    sizes = {name: getattr(ranks, name) for name in ("fsdp", "context", "tensor")}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model = Layers(build_attention(case.config(width), dtype=torch.float32) for _ in range(case.layers))
    x = torch.randn(BATCH, tokens, width).requires_grad_()
    if ranks.tensor > 1:
        style = HeadParallel(sequence_parallel=ranks.sequence_parallel)
        parallelize_module(model, mesh["tensor"], {str(index): style for index in range(case.layers)})
    for layer in model if ranks.fsdp > 1 else ():
        fully_shard(layer, mesh=mesh["fsdp"])
    if ranks.fsdp > 1:
        fully_shard(model, mesh=mesh["fsdp"])
    options: dict[str, Any] = {}
    if ranks.sequence_parallel:
        x = x.detach().chunk(ranks.tensor, 1)[mesh.get_local_rank("tensor")].clone().requires_grad_()
    if ranks.context > 1:
        where: dict[str, Any] = {"mesh": mesh["context"]}
        x = shard_sequence(x.detach(), dim=1, **where).requires_grad_()
        options["token_positions"] = shard_positions(x.shape[1], **where)
    results["elements"] = sum(_local(p).numel() for p in model.parameters())

    def step() -> None:
        with counting(results, "forward"):
            output = model(x, **options)
        with counting(results, "backward"):
            output.square().mean().backward()
            for layer in model if ranks.context > 1 else ():  # as data parallel training does, in a bucket per layer
                gradients = torch.cat([_local(parameter.grad).flatten() for parameter in layer.parameters()])
                dist.all_reduce(gradients, group=mesh["context"].get_group())

    if ranks.context > 1:
        with context_parallel(model, method=ranks.method, **where):
            step()
    else:
        step()
    if case.monitored:
        with HeadMonitor(model) as monitor:
            for name in ("first", "monitor"):  # the first step compares the ranks' heads
                model(x).square().mean().backward()
                with counting(results, name):
                    monitor.step()
        del results["first"], results["first, sockets"]
    return results


def predicted(case: Case, width: int, tokens: int) -> dict[str, Any]:
    """Return what the plan of a case says, in the form of `run`."""
    layout = ModelLayout.of(case.config(width), case.layers)
    sizes: dict[str, Any] = {"context": tokens, "batch": BATCH, "dtype": torch.float32, "phases": ["training"]}
    planned = polyhead.plan(layout, ranks=case.ranks, **sizes).ranks
    assert planned is not None
    results: dict[str, Any] = {"elements": planned.parameters, "forward": {}, "backward": {}}
    for x in planned["training"].collectives:
        if x.name.startswith("HeadMonitor"):
            if case.monitored:
                results["monitor"] = {x.operation: (x.calls, x.bytes)}
            continue
        found = results["backward" if x.is_backward else "forward"]
        calls, sent = found.get(x.operation, (0, 0))
        found[x.operation] = calls + x.calls, sent + x.bytes
    return results


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x
