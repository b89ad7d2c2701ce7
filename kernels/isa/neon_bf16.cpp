// Neon with BFMLALB and BFMLALT: products in bf16. For attention and fp32 the Neon path is used.
//
// BFMLALB multiplies the even columns of a row of the weight, BFMLALT the odd ones, by one value of x: fused multiply-adds in fp32.
// So the weight needs no unpacking, and with flush-to-zero the bits are those of vdpbf16ps. BFDOT and BFMMLA round otherwise
// (docs/decisions/0089).
#if defined(__aarch64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16")
#endif

namespace bf16kit {
namespace neon_bf16 {
namespace {

#include "neon.inl"
#include "activation.inl"
#include "tile.inl"

template <>
struct Terms<Arithmetic::kBf16> : Broadcasts<Arithmetic::kBf16> {
  using Element = uint16_t;
  static constexpr int kSteps = 8;
  using X = uint16x8_t;
  using W = uint16x8_t;

  static void copy(const float* from, int64_t length, uint16_t* to) {
    for (int64_t i = 0; i < length; ++i) {
      const float value = rounded(from[i]);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      to[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  static X broadcast(const uint16_t* x) { return vld1q_dup_u16(x); }
  static X load(const uint16_t* x) { return vld1q_u16(x); }
  static W read(const uint16_t* w, int64_t, bool) { return vld1q_u16(w); }
  // Not the intrinsics: GCC 12 also gives them x in one of the upper 16 registers, which these instructions cannot address.
  template <int kStep>
  static void add(X x, W w, Simd::reg (&sums)[2]) {
    Simd::reg even = sums[0], odd = sums[1];  // an operand that is an element of an array would stay in memory
    asm("bfmlalb %0.4s, %1.8h, %2.h[%3]" : "+w"(even) : "w"(w), "x"(x), "i"(kStep));
    asm("bfmlalt %0.4s, %1.8h, %2.h[%3]" : "+w"(odd) : "w"(w), "x"(x), "i"(kStep));
    sums[0] = even;
    sums[1] = odd;
  }
};

#include "part.inl"

}  // namespace
}  // namespace neon_bf16

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Path kNeonBf16 = {
    .name = "neon_bf16",
    .supported = [] {
#if defined(__linux__)
      // The kernel reports only what all cores have. 1 << 14 is HWCAP2_BF16, which older headers lack.
      return (getauxval(AT_HWCAP2) & 1ul << 14) != 0;
#else
      return false;
#endif
    },
    .bf16 = neon_bf16::compute<Arithmetic::kBf16>,
    .attend_bf16 = [](const Attention& a, const AttentionPart& part) { return kNeon.attend_bf16(a, part); },
    .recur_bf16 = [](const Step& step) { kNeon.recur_bf16(step); },
};

}  // namespace bf16kit
#endif
