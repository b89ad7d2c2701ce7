// AVX512_BF16: products and attention in bf16 with vdpbf16ps. For fp32 the AVX-512F path is used.
#if defined(__x86_64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512bf16")
#endif

namespace bf16kit {
namespace avx512_bf16 {
namespace {

#include "avx512.inl"

#include "activation.inl"
#include "tile.inl"
#include "dots.inl"
#include "part.inl"
#include "heads_dots.inl"
#include "attention.inl"
#include "recurrent.inl"
#include "recurrent_dots.inl"

}  // namespace
}  // namespace avx512_bf16

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Path kAvx512Bf16 = {
    .name = "avx512_bf16",
    .supported = [] {
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
             __builtin_cpu_supports("avx512bf16") != 0;
    },
    .bf16 = avx512_bf16::compute<Arithmetic::kBf16>,
    .attend_bf16 = avx512_bf16::attend<Arithmetic::kBf16>,
    .recur_bf16 = avx512_bf16::recur<Arithmetic::kBf16>,
};

}  // namespace bf16kit
#endif
