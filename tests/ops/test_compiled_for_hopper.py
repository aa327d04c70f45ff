"""Gluon kernels compile for Hopper GPUs without one: names of Gluon differ between versions of Triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

ROW_TERMS = ("ptr_entropy", "ptr_distance", "ptr_offset")
SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor that one program can use


def compiled(
    kernel: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tiles: Mapping[str, tuple[int, int]],
    constants: Mapping[str, object],
    absent: Collection[str] = (),
    num_warps: int = 4,
) -> Any:
    """Compile a kernel with tiles [rows, columns] by the names of its descriptors, and None for absent pointers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], object] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in absent:
            signature[name], constexprs[(index,)] = "constexpr", constants.get(name)
        elif name in tiles:
            shape, is_sum = [1, 1, *tiles[name]], name == "desc_dq"
            layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float32 if is_sum else gl.bfloat16)
            signature[name] = f"tensordesc<{'fp32' if is_sum else 'bf16'}{shape},{layout!r}>"
        else:
            types = {"ptr_output": "*bf16", "ptr_positions": "*i32", "ptr_offsets": "*i32", "scale": "fp32"}
            signature[name] = types.get(name, "*fp32" if name.startswith("ptr_") else "i32")
    source = GluonASTSource(kernel, signature, constexprs)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert 0 < result.metadata.shared <= SHARED_MEMORY
    return result


@pytest.mark.parametrize("terms", [(), ROW_TERMS])
def test_backward(terms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from polyhead.ops.attention.kernels.backward_hopper import backward_kernel

    result = compiled(
        backward_kernel,
        tmp_path,
        monkeypatch,
        tiles={
            **dict.fromkeys(("desc_q", "desc_dq"), (64, 128)),
            **dict.fromkeys(("desc_k", "desc_dk"), (128, 128)),
            **dict.fromkeys(("desc_v", "desc_dv"), (128, 64)),
            "desc_do": (64, 64),
        },
        constants={"BLOCK_M": 64, "BLOCK_N": 128, "D": 128, "DV": 64, "STAGES": 2, "WINDOW": bool(terms)},
        absent=[name for name in ROW_TERMS if name not in terms],
        num_warps=8,
    )
    assert "cp.reduce.async.bulk.tensor.4d" in result.asm["ptx"]  # for which Triton 3.6 has no function
    assert ("lg2.approx" in result.asm["ptx"]) == bool(terms)


def test_forward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from polyhead.ops.attention.kernels.forward_hopper import forward_kernel

    flags = {"CAUSAL": True, "FULL": False, "WINDOW": False, "ENTROPY": True, "DISTANCE": True, "SIGNED": False}
    compiled(
        forward_kernel,
        tmp_path,
        monkeypatch,
        tiles={"desc_q": (64, 128), "desc_k": (128, 128), "desc_v": (128, 128), "desc_o": (64, 128)},
        constants={"D": 128, "DV": 128, "BLOCK_N": 128, "STAGES": 2, "MARK": True, **flags},
        absent=("ptr_signed", "ptr_poison"),
    )


def test_selected_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from polyhead.ops.selected_rows.kernels.forward_hopper import ragged_kernel

    constants = {"D": 64, "DV": 64, "DIM_VALUE": 64, "BLOCK_N": 128, "STAGES": 2}
    compiled(
        ragged_kernel,
        tmp_path,
        monkeypatch,
        tiles={"desc_q": (64, 64), "desc_k": (128, 64), "desc_v": (128, 64)},
        constants={**constants, "BY_HEAD": False, "WINDOW": False, "ENTROPY": True},
        absent=("ptr_confidence", "ptr_visible", "ptr_poison"),
    )
