// What a product should be, in float64, and how far from it fp32 may be.
#pragma once

#include <cmath>
#include <vector>

#include "case.h"

namespace bf16kit {

constexpr double kUnit = 0x1p-24;     // fp32's unit roundoff
constexpr double kSmallest = 0x1p-149;  // fp32's smallest subnormal

// x * sigmoid(v)
inline double gated(double x, double v) { return x / (1 + std::exp(-v)); }

// The smooth ones are -inf * 0 at -inf.
inline double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu: return x < 0 ? 0 : x;
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh: return gated(x, 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    case Activation::kSilu: return gated(x, x);
    case Activation::kNone: break;
  }
  return x;
}

// The activation's own error: 6 units in the last place of a normal result; elsewhere 2^-24 |x| and a subnormal.
inline double tolerance(Activation activation, double x) {
  if (activation == Activation::kNone || activation == Activation::kRelu) return 0;
  const double magnitude = std::fabs(activate(activation, x));
  int exponent;
  std::frexp(magnitude, &exponent);
  return magnitude >= 0x1p-126 ? 6 * std::ldexp(1, exponent - 24) : kUnit * std::fabs(x) + kSmallest;
}

struct Expected {
  std::vector<double> y, tolerance;  // [rows, n]
};

// |error| <= 4 sqrt(K) 2^-24 |x||w| for the sum, its own rounding for the bias, and the activation's slope (< 1.13).
inline Expected expect(const Case& c) {
  std::vector<double> w(c.w.size()), w_square(c.n), sums(c.n);
  for (size_t i = 0; i < c.w.size(); ++i) {
    w[i] = widen(c.w[i]);
    w_square[i % c.n] += w[i] * w[i];
  }
  Expected expected;
  for (int64_t row = 0; row < c.rows; ++row) {
    double x_square = 0;
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t i = 0; i < c.k; ++i) {
      const double x = c.x[row * c.k + i];
      x_square += x * x;
      const double* from = w.data() + i * c.n;
      for (int64_t j = 0; j < c.n; ++j) sums[j] += x * from[j];
    }
    for (int64_t j = 0; j < c.n; ++j) {
      const double sum = c.bias.size() == 0 ? sums[j] : sums[j] + c.bias[j];
      const double rounding = sum == sums[j] || sums[j] == 0 ? 0 : kUnit * std::fabs(sum);
      const double error = 4 * std::sqrt(c.k) * kUnit * std::sqrt(x_square * w_square[j]) + rounding + c.k * kSmallest;
      expected.y.push_back(activate(c.activation, sum));
      expected.tolerance.push_back(1.13 * error + tolerance(c.activation, sum));
    }
  }
  return expected;
}

// The sum of one element before bias and activation, in the order that tile.inl promises.
inline float sum_in_order(const Case& c, int64_t row, int64_t column) {
  float total = 0;
  for (int64_t first = 0; first < c.k; first += 128) {
    float chain = 0;
    for (int64_t i = first; i < std::min(c.k, first + 128); ++i) {
      chain = std::fma(c.x[row * c.k + i], static_cast<float>(widen(c.w[i * c.n + column])), chain);
    }
    total += chain;
  }
  return total;
}

inline bool close(double got, double wanted, double tolerance) {
  if (std::isnan(wanted)) return std::isnan(got);
  if (std::isinf(wanted)) return got == wanted;
  return std::fabs(got - wanted) <= tolerance;
}

// The same bits, any NaN being as good as another.
inline bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace bf16kit
