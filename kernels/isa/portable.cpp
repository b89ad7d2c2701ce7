// Vectors of the compiler's, for processors without AVX2, in the instructions of the build's target. If that has fused
// multiply-add (as 64-bit Arm has), it gives the same bits as the other paths; otherwise products are rounded as well.
#include "gemm/path.h"
#include "gemm/rounding_mode.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace bf16kit {
namespace portable {
namespace {

struct Simd {
  using reg = float __attribute__((vector_size(16)));
  using bits = uint32_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4;
  static constexpr int kWideRows = 1;
  static constexpr int kTwoPanelRows = 1;
  static constexpr int kDots = 8;

  template <typename F>
  static reg each(F value) {
    return reg{value(0), value(1), value(2), value(3)};
  }

  static reg zero() { return reg{}; }
  static reg broadcast(const float* p) { return set(*p); }
  static reg load(const float* p) {
    reg v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, reg v) { std::memcpy(p, &v, sizeof v); }
  static reg add(reg a, reg b) { return a + b; }
#ifdef FP_FAST_FMAF
  static reg fma(reg a, reg b, reg c) {
    return each([&](int i) { return std::fma(a[i], b[i], c[i]); });
  }
  static reg fms(reg a, reg b, reg c) { return fma(a, b, -c); }
#else
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static reg fms(reg a, reg b, reg c) {
    // In double, the product of two floats is exact.
    return each([&](int i) { return static_cast<float>(static_cast<double>(a[i]) * b[i] - c[i]); });
  }
#endif
  static reg set(float value) { return reg{value, value, value, value}; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg div(reg a, reg b) { return a / b; }
  static reg min(reg a, reg b) { return a < b ? a : b; }
  static reg max(reg a, reg b) { return a > b ? a : b; }
  static reg abs(reg a) { return reg(bits(a) & 0x7fffffff); }
  static reg to_exponent(reg a) { return reg(bits(a) << 23); }
  static void unpack(const uint16_t* p, reg& even, reg& odd) {
    bits both;
    std::memcpy(&both, p, sizeof both);
    even = reg(both << 16);
    odd = reg(both & 0xffff0000);
  }
  static void interleave(reg even, reg odd, reg& low, reg& high) {
    low = reg{even[0], odd[0], even[1], odd[1]};
    high = reg{even[2], odd[2], even[3], odd[3]};
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
}  // namespace portable

const Path kPortable = {
    .name = "portable",
    .supported = [] { return true; },
    .fp32 = portable::compute<Arithmetic::kFp32>,
    .bf16 = portable::compute<Arithmetic::kBf16>,
    .attend = portable::attend<Arithmetic::kFp32>,
    .attend_bf16 = portable::attend<Arithmetic::kBf16>,
    .normalise = portable::normalise,
    .convolve = portable::convolve,
    .recur = portable::recur<Arithmetic::kFp32>,
    .recur_bf16 = portable::recur<Arithmetic::kBf16>,
};

}  // namespace bf16kit
