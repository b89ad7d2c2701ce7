// The Neon path, for every 64-bit Arm processor. With flush-to-zero it computes bf16 as well, with the same bits as neon_bf16.cpp.
#if defined(__aarch64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <arm_neon.h>

namespace bf16kit {
namespace neon {
namespace {

#include "neon.inl"
#include "activation.inl"
#include "tile.inl"

// The multiply-add takes one lane of a vector as a factor of all four, so one load of x serves four steps. Loads that
// broadcast would need as many loads as multiplications in narrow tiles, and a vector pipeline besides.
template <Arithmetic kArithmetic>
struct ByLane : Broadcasts<kArithmetic> {
  static constexpr int kSteps = 4;
  static Simd::reg load(const float* x) { return Simd::load(x); }
  template <int kStep, typename Columns>
  static void add(Simd::reg x, const Columns& w, Simd::reg (&sums)[2]) {
    sums[0] = vfmaq_laneq_f32(sums[0], w.even, x, kStep);
    sums[1] = vfmaq_laneq_f32(sums[1], w.odd, x, kStep);
  }
};

template <>
struct Terms<Arithmetic::kFp32> : ByLane<Arithmetic::kFp32> {};
template <>
struct Terms<Arithmetic::kBf16> : ByLane<Arithmetic::kBf16> {};

#include "part.inl"
#include "heads.inl"
#include "attention.inl"
#include "norm.inl"
#include "depthwise.inl"
#include "recurrent.inl"

}  // namespace
}  // namespace neon

const Path kNeon = {
    .name = "neon",
    .supported = [] { return true; },
    .fp32 = neon::compute<Arithmetic::kFp32>,
    .bf16 = neon::compute<Arithmetic::kBf16>,
    .attend = neon::attend<Arithmetic::kFp32>,
    .attend_bf16 = neon::attend<Arithmetic::kBf16>,
    .normalise = neon::normalise,
    .convolve = neon::convolve,
    .recur = neon::recur<Arithmetic::kFp32>,
    .recur_bf16 = neon::recur<Arithmetic::kBf16>,
};

}  // namespace bf16kit
#endif
