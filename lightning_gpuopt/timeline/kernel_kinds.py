"""What kind of work a kernel does, by its name: nothing else of a record says it."""

from __future__ import annotations

import re
from typing import Final

_TENSOR_CORES: Final = re.compile(
    r"tensorop|tensor_op|wgmma|hmma|imma|_mma|s1688|s16816|s884|h1688|h16816|h884|i8816|i16832|16816|1688gemm"
    r"|sm90_xmma|sm100|sm80_xmma|nvjet|tf32|bf16|fp8|f16f16|_f16_|hgemm|gemm_f16|xmma_gemm_f16|bfloat16|__half|^triton"
)
"""Instructions of tensor cores (``mma.m16n8k16`` is ``16816``), and types that only they multiply, in names of cuBLAS's
and CUTLASS's kernels; cuBLAS's on Hopper and later (nvjet) use nothing else."""

_SIMT: Final = re.compile(r"simt|sgemm|dgemm|ffma|gemv|gemvx|dot_kernel")
_KERNELS: Final = tuple(
    (kind, re.compile(words))
    for kind, words in (
        ("communication", r"^(nccl|rccl)|oneshot_all_reduce|all_reduce|allreduce|all_gather|reduce_scatter"),
        ("elementwise", r"^triton_poi_"),
        ("reduction", r"^triton_(red|per)_"),
        ("attention", r"flash|fmha|attention|attn|sdpa|efficient_"),
        ("reduction", r"normtwoops|lpnorm|vector_norm"),
        ("elementwise", r"distribution|normal_and"),
        ("normalization", r"norm|bn_fw|bn_bw|welford"),
        ("convolution", r"conv|implicit_gemm|wgrad|dgrad|fprop|winograd|im2col|col2im|cudnn.*xmma"),
        ("optimizer", r"adam|sgd_|_sgd|lamb|adagrad|rmsprop|lion|foreach|multi_tensor_apply|amp_update"),
        ("matmul", r"gemm|gemv|cutlass|cublas|matmul|splitk|nvjet|bmm|dot_kernel|triton_mm|triton_tem_"),
        ("copy", r"^mem(cpy|set)|nchwtonhwc|nhwctonchw|transpose|direct_copy|copy_kernel|cat_array|catarray"),
        (
            "reduction",
            r"reduce|softmax|nll_loss|argmax|argmin|cumsum|scan|triton_red_|triton_per_|loss|sort|topk|cub::|mean_kernel|pool",
        ),
        (
            "elementwise",
            r"elementwise|triton_poi_|pointwise|functor|relu|gelu|silu|sigmoid|dropout|fill|index|embedding|gather"
            r"|scatter|where|distribution|fused_|upsample",
        ),
    )
)

_TRANSPOSES: Final = re.compile(r"nchwtonhwc|nhwctonchw")


def kind_of_kernel(name: str) -> str:
    """One of ``KERNEL_KINDS``, by a kernel's name as CUPTI gives it."""
    lower = name.lower()
    kind = next((kind for kind, words in _KERNELS if words.search(lower)), "other")
    if kind != "matmul":
        return kind
    return "matmul_tensor_core" if _TENSOR_CORES.search(lower) and not _SIMT.search(lower) else "matmul"


def is_a_transpose(name: str) -> bool:
    """Whether a kernel of cuDNN brings images from one memory format to another."""
    return bool(_TRANSPOSES.search(name.lower()))
