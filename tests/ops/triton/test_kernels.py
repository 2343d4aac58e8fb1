"""Triton kernels without a GPU: computed in Triton's interpreter, and built for a Hopper GPU by its own assembler."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton: `pip install -e '.[triton]'`")


def run_cases(file: str, **environment: str) -> None:
    """Run cases in a process of their own: Triton reads its switch when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("file", ["kernel_cases.py", "call_cases.py", "launch_cases.py"])
def test_kernels_compute_the_librarys_operations_in_the_interpreter(file: str) -> None:
    run_cases(file, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("file", ["kernel_cases.py", "call_cases.py"])
def test_kernels_compute_the_librarys_operations_on_a_gpu(file: str) -> None:
    run_cases(file, TRITON_INTERPRET="0")


POINTERS = {
    "*fp32": ("scale", "grad_weight", "factor", "lse", "logp", "entropy", "grad_logp", "grad_entropy", "cosine", "sine",
              "own_part", "own_lse", "prompt_part", "prompt_lse", "grad_gain", "add_lse", "query_gain", "key_gain"),
    "*i64": ("position", "target", "token", "length_R", "end_P", "member_PN", "first_R", "position_R", "entry_R", "place_R"),
    "*fp64": ("uniform",),
    "*bf16": ("x", "add", "weight", "out", "grad", "grad_x", "gate", "up", "inner", "grad_up", "raw", "logits", "query", "new_key",
              "new_value", "own_key", "own_value", "prompt_key", "prompt_value", "sinks_H", "grad_gate", "grad_query", "grad_key",
              "grad_value"),
    "fp32": ("eps", "sign", "temperature", "cap"),
}  # fmt: skip
"""Types of arguments; others are whole numbers."""
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}


def built(module: str, kernel: str, warps: int, constants: dict[str, Any], floats: tuple[str, ...] = ()) -> bytes:
    """Build a kernel for sm_90 -> the binary.  floats: numbers that are no pointer here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"groupwise.ops.triton.{module}"), kernel)
    signature = {}
    for name in function.arg_names:
        kind = "fp32" if name in floats else TYPES.get(name, "i32")
        signature[name] = "constexpr" if name in constants else kind
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return compiled.asm["cubin"]


def attention(width: int, queries: int, *, capped: bool = False, reach: bool = False) -> dict[str, Any]:
    from groupwise.ops.triton.decode_attention import MOST_QUERIES, keys_of_a_step

    return {
        "K": 2, "Q": queries, "D": width, "E": width, "BLOCK_D": width, "BLOCK_E": width, "OWN_QUERIES": 16,
        "PROMPT_QUERIES": MOST_QUERIES, "OWN_SPLIT": 512, "PROMPT_SPLIT": 512, "KEYS": keys_of_a_step(width), "CAPPED": capped,
        "REACH": reach,
    }  # fmt: skip


def sm90_builds() -> list[tuple[Any, ...]]:
    """Kernel, module, warps and constants, at the sizes of models of 0.5 to 8 billion parameters."""
    norm = {"ADD": True, "KEEP": True, "ROUND": True}
    merge = {"K": 2, "Q": 7, "E": 128, "BLOCK_E": 128, "OWN_SPLITS": 16, "PROMPT_SPLITS": 16, "OWN_SPLIT": 512, "PROMPT_SPLIT": 512}
    chunk = {"ENTROPY": True, "BLOCK": 4096}
    return [
        ("norm", "forward_kernel", 4, {**norm, "BLOCK": 1024}),
        ("norm", "forward_kernel", 8, {**norm, "BLOCK": 8192}),
        ("norm", "backward_kernel", 4, {"WEIGHT": True, "ROWS": 32, "BLOCK": 1024}),
        ("norm", "backward_kernel", 8, {"WEIGHT": True, "ROWS": 32, "BLOCK": 4096}),
        ("rotary", "rotary_kernel", 4, {"GATHER": True, "HEADS": 16, "HALF": 32}),
        ("rotary", "rotary_kernel", 8, {"GATHER": False, "HEADS": 32, "HALF": 64}),
        ("heads", "heads_kernel", 4, {"NORM": False, "HEADS": 16, "HALF": 32}),
        ("heads", "heads_kernel", 8, {"NORM": True, "HEADS": 16, "HALF": 64}),
        ("heads", "heads_backward_kernel", 4, {"NORM": False, "ROWS": 1, "HEADS": 16, "HALF": 32}),
        ("heads", "heads_backward_kernel", 8, {"NORM": True, "ROWS": 32, "HEADS": 16, "HALF": 64}),
        ("heads", "heads_backward_kernel", 8, {"NORM": True, "ROWS": 32, "HEADS": 8, "HALF": 128}),
        ("merge", "merge_parts_kernel", 8, {"HEADS": 32, "WIDTH": 128}),
        ("gate", "gated_kernel", 4, {"BLOCK": 1024}),
        ("gate", "gated_backward_kernel", 4, {"BLOCK": 1024}),
        ("gate", "gelu_kernel", 4, {"GRAD": True, "BLOCK": 1024}),
        ("head", "read_kernel", 8, {**chunk, "VOCABULARY": 151_936}),
        ("head", "gradient_kernel", 8, chunk),
        ("draw", "draw_kernel", 8, {"VOCABULARY": 151_936, "GREEDY": False, "BLOCK": 4096, "BLOCKS": 64}),
        ("decode_attention", "parts_kernel", 4, attention(64, 7), ("scale",)),
        ("decode_attention", "parts_kernel", 4, attention(128, 4), ("scale",)),
        ("decode_attention", "parts_kernel", 4, attention(256, 4, capped=True, reach=True), ("scale",)),
        ("decode_attention", "merge_kernel", 4, {**merge, "SINKS": True}),
    ]


@needs_triton
@pytest.mark.slow
def test_kernels_are_built_for_a_hopper_gpu_within_its_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what does not fit into registers a part lies on the stack, in the card's memory: each use of it would be a visit there."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for number, build in enumerate(sm90_builds()):
        cubin = tmp_path / f"{number}.cubin"
        cubin.write_bytes(built(*build))
        dump = subprocess.run([str(tool), "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
        assert re.search(r"REG:\d+", dump), dump
        assert "STACK:0 " in dump and "LOCAL:0 " in dump, (build, dump)
