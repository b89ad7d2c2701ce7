// AVX2 with FMA: 8 lanes and 16 registers; a tile is 2 rows of a whole panel, or 6 rows of half of one.
#if defined(__x86_64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace bf16kit {
namespace avx2 {
namespace {

struct Simd {
  using reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  static constexpr int kWideRows = 2;
  static constexpr int kTwoPanelRows = 1;
  static constexpr int kDots = 8;

  static reg zero() { return _mm256_setzero_ps(); }
  static reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg fms(reg a, reg b, reg c) { return _mm256_fmsub_ps(a, b, c); }
  static reg set(float value) { return _mm256_set1_ps(value); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
  static reg abs(reg a) {
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  }
  static reg to_exponent(reg a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
  static void unpack(const uint16_t* p, reg& even, reg& odd) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void interleave(reg even, reg odd, reg& low, reg& high) {
    const reg a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
    low = _mm256_permute2f128_ps(a, b, 0x20);
    high = _mm256_permute2f128_ps(a, b, 0x31);
  }
};

#include "activation.inl"
#include "tile.inl"
#include "part.inl"
#include "heads.inl"
#include "attention.inl"
#include "norm.inl"
#include "depthwise.inl"
#include "recurrent.inl"

}  // namespace
}  // namespace avx2

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Path kAvx2 = {
    .name = "avx2",
    .supported = [] { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; },
    .fp32 = avx2::compute<Arithmetic::kFp32>,
    .bf16 = avx2::compute<Arithmetic::kBf16>,
    .attend = avx2::attend<Arithmetic::kFp32>,
    .attend_bf16 = avx2::attend<Arithmetic::kBf16>,
    .normalise = avx2::normalise,
    .convolve = avx2::convolve,
    .recur = avx2::recur<Arithmetic::kFp32>,
    .recur_bf16 = avx2::recur<Arithmetic::kBf16>,
};

}  // namespace bf16kit
#endif
