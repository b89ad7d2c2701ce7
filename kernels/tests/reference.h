// The product in float64, and the error bounds for fp32.
#pragma once

#include <cmath>
#include <vector>

#include "case.h"
#include "gemm/rounding_mode.h"

namespace bf16kit {

constexpr double kUnit = 0x1p-24;     // fp32's unit roundoff
constexpr double kSmallest = 0x1p-149;  // fp32's smallest subnormal

// x * sigmoid(v)
inline double gated(double x, double v) { return x / (1 + std::exp(-v)); }

// At -inf, the smooth activations are -inf * 0.
inline double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu: return x < 0 ? 0 : x;
    case Activation::kRelu6: return x < 0 ? 0 : x > 6 ? 6 : x;
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh: return gated(x, 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    case Activation::kSilu: return gated(x, x);
    case Activation::kNone: break;
  }
  return x;
}

// The activation's own error: 6 units in the last place of a normal result; otherwise 2^-24 |x| plus a subnormal.
inline double tolerance(Activation activation, double x) {
  if (activation == Activation::kNone || activation == Activation::kRelu || activation == Activation::kRelu6) return 0;
  const double magnitude = std::fabs(activate(activation, x));
  int exponent;
  std::frexp(magnitude, &exponent);
  return magnitude >= 0x1p-126 ? 6 * std::ldexp(1, exponent - 24) : kUnit * std::fabs(x) + kSmallest;
}

struct Expected {
  std::vector<double> y, tolerance;  // [rows, n]
};

// |error| <= (min(K, 128) + ceil(K / 128)) 2^-24 sum |x||w| to first order; the factor is the most additions that one product
// passes through. To this come the bias's own rounding and the activation's slope (< 1.13). Flushing to zero adds at most one
// smallest normal number for each operation.
inline Expected expect(const Case& c) {
  const bool flushed = c.arithmetic == Arithmetic::kBf16;
  const double smallest = flushed ? static_cast<double>(std::numeric_limits<float>::min()) : kSmallest;
  const double additions = std::min<int64_t>(c.k, 128) + (c.k + 127) / 128;
  std::vector<double> w(c.w.size()), sums(c.n), magnitudes(c.n);
  for (size_t i = 0; i < c.w.size(); ++i) w[i] = taken(static_cast<float>(widen(c.w[i])), c.arithmetic);
  Expected expected;
  for (int64_t row = 0; row < c.rows; ++row) {
    std::fill(sums.begin(), sums.end(), 0);
    std::fill(magnitudes.begin(), magnitudes.end(), 0);
    for (int64_t i = 0; i < c.k; ++i) {
      const double x = taken(c.x[row * c.k + i], c.arithmetic);
      const double* from = w.data() + i * c.n;
      for (int64_t j = 0; j < c.n; ++j) {
        sums[j] += x * from[j];
        magnitudes[j] += std::fabs(x * from[j]);
      }
    }
    for (int64_t j = 0; j < c.n; ++j) {
      const double sum = c.bias.size() == 0 ? sums[j] : sums[j] + c.bias[j];
      const double rounding = sum == sums[j] || sums[j] == 0 ? 0 : kUnit * std::fabs(sum);
      const double error = 1.0001 * additions * kUnit * magnitudes[j] + rounding + (c.k + additions) * smallest;
      expected.y.push_back(activate(c.activation, sum));
      expected.tolerance.push_back(1.13 * error + tolerance(c.activation, sum) + (flushed ? 3 * smallest : 0));
    }
  }
  return expected;
}

// Returns the sum of one element before bias and activation, in the order that tile.inl states.
inline float sum_in_order(const Case& c, int64_t row, int64_t column) {
  const RoundingMode mode(c.arithmetic);
  const auto step = [&](int64_t i, volatile float chain) -> float {
    if (i >= c.k) return chain;
    const float w = static_cast<float>(widen(c.w[i * c.n + column]));
    return std::fma(taken(c.x[row * c.k + i], c.arithmetic), w, chain);
  };
  volatile float total = 0;
  for (int64_t first = 0; first < c.k; first += 128) {
    const int64_t end = std::min(c.k, first + 128);
    float chain = 0;
    for (int64_t i = first; i < end; ++i) {
      if (c.arithmetic == Arithmetic::kFp32) {
        chain = step(i, chain);
      } else if ((i - first) % 2 == 0) {
        chain = step(i, step(i + 1 < end ? i + 1 : c.k, chain));
      }
    }
    total = total + chain;
  }
  return total;
}

inline bool close(double got, double wanted, double tolerance) {
  if (std::isnan(wanted)) return std::isnan(got);
  if (std::isinf(wanted)) return got == wanted;
  return std::fabs(got - wanted) <= tolerance;
}

// Returns whether both have the same bits; all NaN count as equal.
inline bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace bf16kit
