// The AVX-512F path.
#if defined(__x86_64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif

namespace bf16kit {
namespace avx512 {
namespace {

#include "avx512.inl"
#include "activation.inl"
#include "tile.inl"

template <Arithmetic kArithmetic>
struct Half : Terms<kArithmetic> {
  static constexpr int kVectors = 1;
  using W = Simd::reg;
  static W read(const uint16_t* w, int64_t, bool) { return Simd::widen(w); }
  template <int kStep>
  static void add(Simd::reg x, W w, Simd::reg (&sums)[1]) {
    sums[0] = Simd::fma(x, w, sums[0]);
  }
};

#include "part.inl"
#include "heads.inl"
#include "attention.inl"
#include "norm.inl"
#include "depthwise.inl"
#include "recurrent.inl"

}  // namespace
}  // namespace avx512

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Path kAvx512 = {
    .name = "avx512f",
    .supported = [] { return __builtin_cpu_supports("avx512f") != 0; },
    .fp32 = avx512::compute<Arithmetic::kFp32>,
    .bf16 = avx512::compute<Arithmetic::kBf16>,
    .attend = avx512::attend<Arithmetic::kFp32>,
    .attend_bf16 = avx512::attend<Arithmetic::kBf16>,
    .normalise = avx512::normalise,
    .convolve = avx512::convolve,
    .recur = avx512::recur<Arithmetic::kFp32>,
    .recur_bf16 = avx512::recur<Arithmetic::kBf16>,
};

}  // namespace bf16kit
#endif
