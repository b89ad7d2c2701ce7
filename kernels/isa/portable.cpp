// Plain C++, for processors without AVX2. The compiler vectorises it for the target of the build. If the target has fused
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
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4;
  static constexpr int kWideRows = 1;
  static constexpr int kTwoPanelRows = 1;
  static constexpr int kDots = 8;
  struct reg {
    float lane[kLanes];
  };

  template <typename F>
  static reg each(F value) {
    reg result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = value(i);
    return result;
  }
  static float from_bf16(uint16_t stored) {
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  static reg zero() { return each([](int) { return 0.0f; }); }
  static reg broadcast(const float* p) { return each([=](int) { return *p; }); }
  static reg load(const float* p) { return each([=](int i) { return p[i]; }); }
  static void store(float* p, reg v) { std::memcpy(p, v.lane, sizeof v.lane); }
  static reg add(reg a, reg b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static reg fma(reg a, reg b, reg c) {
#ifdef FP_FAST_FMAF
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
#else
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
#endif
  }
  static reg fms(reg a, reg b, reg c) {
#ifdef FP_FAST_FMAF
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], -c.lane[i]); });
#else
    // In double, the product of two floats is exact.
    return each([&](int i) { return static_cast<float>(static_cast<double>(a.lane[i]) * b.lane[i] - c.lane[i]); });
#endif
  }
  static reg set(float value) { return each([=](int) { return value; }); }
  static reg sub(reg a, reg b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
  static reg mul(reg a, reg b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static reg div(reg a, reg b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
  static reg min(reg a, reg b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static reg max(reg a, reg b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static reg abs(reg a) { return each([&](int i) { return std::fabs(a.lane[i]); }); }
  static reg to_exponent(reg a) {
    return each([&](int i) {
      uint32_t bits;
      std::memcpy(&bits, &a.lane[i], sizeof bits);
      bits <<= 23;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    });
  }
  static void unpack(const uint16_t* p, reg& even, reg& odd) {
    even = each([=](int i) { return from_bf16(p[2 * i]); });
    odd = each([=](int i) { return from_bf16(p[2 * i + 1]); });
  }
  static void interleave(reg even, reg odd, reg& low, reg& high) {
    const auto column = [&](int i) { return i % 2 == 0 ? even.lane[i / 2] : odd.lane[i / 2]; };
    low = each(column);
    high = each([&](int i) { return column(i + kLanes); });
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
