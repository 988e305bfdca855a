"""Names of real kernels and operators, and what kind of work they do."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.kernels import KERNEL_KINDS
from lightning_gpuopt.timeline.kernel_kinds import is_a_transpose, kind_of_kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_tn", "matmul"),
        ("volta_sgemm_32x128_nn", "matmul"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>(...)", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(...)", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matmul_tensor_core"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(...)", "matmul_tensor_core"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul_tensor_core"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul_tensor_core"),
        ("void wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_nn_align8", "matmul_tensor_core"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32", "convolution"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(...)", "convolution"),
        ("void dgrad2d_grouped_direct_kernel<__half, float>(...)", "convolution"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(...)", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(...)", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(...)", "normalization"),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(...)", "normalization"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array>",
            "elementwise",
        ),
        ("triton_poi_fused_add_relu_3", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>", "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(...)", "reduction"),
        ("triton_per_fused__softmax_5", "reduction"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, "
            "at::native::FusedAdamMathFunctor<float, 4>>(...)",
            "optimizer",
        ),
        ("Memset (Device)", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false>(...)", "copy"),
        ("triton_poi_fused_convolution_relu_1", "elementwise"),
        ("triton_tem_fused_mm_0", "matmul_tensor_core"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(...)", "matmul_tensor_core"),
        (
            "void at::native::reduce_kernel<512, 1, ReduceOp<float, at::native::NormTwoOps<float>>>",
            "reduction",
        ),
        ("void at::native::distribution_elementwise_grid_stride_kernel<float, 4, normal_and_transform>", "elementwise"),
        ("my_own_thing", "other"),
    ],
)
def test_kernels(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind
    assert kind in KERNEL_KINDS


def test_transposes_of_cudnn() -> None:
    assert is_a_transpose("void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, true>(...)")
    assert not is_a_transpose("void at::native::transpose_kernel")
