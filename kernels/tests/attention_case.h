// One random attention: its shape, its numbers, and its result in float64 and in the order of sums that attention.inl states.
#pragma once

#include <algorithm>

#include "case.h"
#include "gemm/attention.h"
#include "gemm/rounding_mode.h"

namespace bf16kit {

constexpr float kNever = -3.38953139e38f;  // the lowest bf16 number, which exporters write for minus infinity
constexpr double kRoundoff = 0x1p-24;
constexpr double kRoundedTo8Bits = 0x1p-9 + 0x1p-13;  // relative error of p in bf16: rounding, rough_exponential

struct AttentionCase {
  int64_t batch = 1, kv_heads = 1, shared = 1, queries = 1, keys = 1, depth = 1, width = 1;
  bool in_heads[3] = {};     // q, k, v: [batch, heads, rows, columns], or else [batch, rows, heads, columns]
  bool masked = false, along[4] = {};  // along: whether each dimension of the mask is not 1
  bool finite = true;        // whether q, k and v are finite
  Arithmetic arithmetic = Arithmetic::kFp32;
  Exact<float> q, k, v, mask;

  int64_t heads() const { return kv_heads * shared; }
  int64_t outputs() const { return batch * queries * heads() * width; }

  static Strided strided(const float* data, bool in_heads, int64_t heads, int64_t rows, int64_t columns) {
    if (in_heads) return {data, heads * rows * columns, rows * columns, columns, 1};
    return {data, rows * heads * columns, columns, heads * columns, 1};
  }
  Attention attention(float* y) const {
    Attention a = {batch, heads(), kv_heads, queries, keys, depth, width, scale(), arithmetic, {}, {}, {}, {}, y, 0};
    a.q = strided(q.data(), in_heads[0], heads(), queries, depth);
    a.k = strided(k.data(), in_heads[1], kv_heads, keys, depth);
    a.v = strided(v.data(), in_heads[2], kv_heads, keys, width);
    if (masked) a.mask = mask_strides(mask.data());
    return a;
  }
  Strided mask_strides(const float* data) const {
    const int64_t column = along[3], row = along[3] ? keys : 1, head = row * (along[2] ? queries : 1);
    return {data, along[0] ? head * (along[1] ? heads() : 1) : 0, along[1] ? head : 0, along[2] ? row : 0, column};
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(depth)); }

  std::string describe() const {
    const auto n = [](int64_t value) { return std::to_string(value); };
    return "batch=" + n(batch) + " kv_heads=" + n(kv_heads) + " shared=" + n(shared) + " queries=" + n(queries) +
           " keys=" + n(keys) + " depth=" + n(depth) + " width=" + n(width) + " mask=" + n(masked) +
           " arithmetic=" + (arithmetic == Arithmetic::kFp32 ? "fp32" : "bf16");
  }
};

// Some of the mask's numbers hide a key: the lowest number, minus infinity, or one that a high score may compensate. Some rows
// are hidden completely. In other cases, each row only sees a fixed number of keys before it.
inline void draw_mask(AttentionCase& c, Random& random) {
  c.masked = true;
  int64_t size = 1;
  const int64_t dims[] = {c.batch, c.heads(), c.queries, c.keys};
  for (int i = 0; i < 4; ++i) size *= (c.along[i] = random.chance(i == 3 ? 0.9 : 0.5)) ? dims[i] : 1;
  c.mask = Exact<float>(size, random.between(0, 3));
  const float hidden = random.one_of({kNever, -std::numeric_limits<float>::infinity(), -1e4f, -150.0f});
  const bool causal = random.chance(0.4);
  const int64_t window = random.one_of<int64_t>({20, 100, 1000}), late = random.between(-5, 40);
  const double often = causal ? 0 : random.one_of({0.0, 0.2, 0.9});
  const bool numbers = random.chance(0.3);
  for (int64_t i = 0; i < size; ++i) c.mask[i] = random.chance(often) ? hidden : numbers ? random.normal() : 0.0f;
  const int64_t row = c.along[3] ? c.keys : 1;
  for (int64_t i = 0; causal && i < size; ++i) {
    const int64_t key = i % row, seen = late + (c.along[2] ? i / row % c.queries : 0);
    if (key > seen || key + window < seen) c.mask[i] = hidden;
  }
  if (random.chance(0.2)) std::fill_n(c.mask.data() + random.between(0, size / row - 1) * row, row, hidden);
}

inline void spoil(Exact<float>& values, Random& random) {
  const float infinity = std::numeric_limits<float>::infinity();
  values[random.between(0, values.size() - 1)] = random.one_of({infinity, -infinity, std::nanf("")});
}

inline AttentionCase draw_attention(Random& random) {
  AttentionCase c;
  const auto length = [&] {
    if (random.chance(0.2)) return random.one_of<int64_t>({1, 8, 31, 32, 33, 64, 127, 128, 129});
    return random.between(1, random.one_of<int64_t>({8, 20, 40, 40, 140}));
  };
  c.batch = random.between(1, 3), c.kv_heads = random.between(1, 3), c.shared = random.one_of<int64_t>({1, 1, 2, 3});
  c.queries = random.chance(0.3) ? 1 : length(), c.keys = random.chance(0.1) ? random.between(1, 400) : length();
  c.depth = length(), c.width = length();
  for (bool& each : c.in_heads) each = random.chance(0.5);
  c.arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  const float size = random.one_of({1.0f, 1.0f, 0.1f, 4.0f});
  const auto fill = [&](Exact<float>& values, int64_t count, float scale) {
    values = Exact<float>(count, random.between(0, 3));
    for (int64_t i = 0; i < count; ++i) values[i] = random.normal() * scale;
  };
  fill(c.q, c.batch * c.heads() * c.queries * c.depth, size);
  fill(c.k, c.batch * c.kv_heads * c.keys * c.depth, size);
  fill(c.v, c.batch * c.kv_heads * c.keys * c.width, random.chance(0.1) ? 1e-38f : 1);  // 1e-38: subnormal results
  if (random.chance(0.7)) draw_mask(c, random);
  if (random.chance(0.1)) {
    c.finite = false;
    spoil(random.chance(0.3) ? c.q : random.chance(0.5) ? c.k : c.v, random);
  }
  return c;
}

// One row of the result, [width], with the error bound of each element.
struct ExpectedRow {
  std::vector<double> y, tolerance;
};

inline const float* element(const Strided& from, int64_t batch, int64_t head, int64_t row) {
  return from.data + batch * from.batch + head * from.head + row * from.row;
}

// The error bound is twice the sum of the first-order bounds of all roundings. In bf16, that of p is added, and at most one
// smallest normal number for each operation that flushes to zero.
inline ExpectedRow expect_row(const AttentionCase& c, const Attention& a, int64_t batch, int64_t head, int64_t query) {
  const bool rounds = c.arithmetic == Arithmetic::kBf16;
  const int64_t kv = head / c.shared;
  const float* q = element(a.q, batch, head, query);
  std::vector<double> x(c.keys), error(c.keys);
  double most = -std::numeric_limits<double>::infinity(), sum = 0, worst = 0;
  bool broken = false;
  for (int64_t j = 0; j < c.keys; ++j) {
    const float* k = element(a.k, batch, kv, j);
    double score = 0, size = 0;
    for (int64_t d = 0; d < c.depth; ++d) {
      const double product = static_cast<double>(taken(q[d], c.arithmetic)) * taken(k[d], c.arithmetic);
      score += product, size += std::fabs(product);
    }
    const double added = c.masked ? element(a.mask, batch, head, query)[j * a.mask.column] : 0;
    x[j] = score * a.scale + added;
    error[j] = kRoundoff * (a.scale * size * (std::min<int64_t>(c.depth, 128) + 2) + std::fabs(x[j]));
    if (added == kNever && std::isfinite(score)) x[j] = kNever, error[j] = 0;  // the sum rounds to the mask, whatever the score
    broken |= std::isnan(x[j]) || x[j] == std::numeric_limits<double>::infinity();
    most = std::max(most, x[j]);
  }
  std::vector<double> p(c.keys);
  for (int64_t j = 0; j < c.keys; ++j) {
    p[j] = std::exp(x[j] - most), sum += p[j];
    if (x[j] > most - 110) worst = std::max(worst, error[j] + kRoundoff * (most - x[j]));
  }
  if (std::isinf(most)) broken = true;
  // The smallest number, as p is 2^-16 of its formula.
  const double smallest = 0x1p16 * (rounds ? static_cast<double>(std::numeric_limits<float>::min()) : 0x1p-149);
  ExpectedRow row;
  for (int64_t column = 0; column < c.width; ++column) {
    double y = 0, size = 0, largest = 0;
    for (int64_t j = 0; j < c.keys; ++j) {
      const double v = taken(element(a.v, batch, kv, j)[column], c.arithmetic);
      y += p[j] * v, size += std::fabs(p[j] * v), largest = std::max(largest, std::fabs(v));
    }
    row.y.push_back(broken ? std::nan("") : y / sum);
    const double additions = kRoundoff * (std::min<int64_t>(c.keys, 128) + c.keys / 32.0 + 20);
    const double relative = 2 * (worst + (rounds ? kRoundedTo8Bits : 0)) + additions;
    const double flushed = static_cast<double>(c.keys) * smallest * (rounds ? 2 + largest : 1);
    row.tolerance.push_back(2 * relative * size / sum + flushed);
  }
  return row;
}

// Returns 2^-16 e^t by the operations of softmax.inl, for t <= 0.
inline float exponential_in_order(float t) {
  t = std::max(-110.0f, t);
  const float high = 1.44269502f, low = 1.92596303e-08f, magic = 12582912.0f + 127 + 64;
  const float biased = std::fma(t, high, magic);
  const float f = std::fma(t, low, std::fma(t, high, -(biased - magic)));
  float p = 0x1.4173c6p-13f;
  for (float next : {0x1.5f0988p-10f, 0x1.3b2ddap-7f, 0x1.c6af7ap-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f, 1.0f}) {
    p = std::fma(p, f, next);
  }
  return std::ldexp(p * std::ldexp(1.0f, static_cast<int>(biased - magic) + 64), -80);
}

// Returns 2^-16 e^t by softmax.inl's operations for bf16, rounded to bf16.
inline float rough_exponential_in_order(float t) {
  t = std::max(-76.9f, t);
  const float factor = 1.44269502f, magic = 12582912.0f + 127 - 16;
  const float biased = std::fma(t, factor, magic), f = std::fma(t, factor, -(biased - magic));
  float p = 0x1.c2a246p-5f;
  for (float next : {0x1.f00c4ap-3f, 0x1.62f5fap-1f, 1.0f}) p = std::fma(p, f, next);
  const int exponent = static_cast<int>(biased - magic) - 16;
  return taken(exponent == -127 ? 0 : std::ldexp(p, exponent), Arithmetic::kBf16);
}

inline float chained(const float* a, const float* b, int64_t step, int64_t length, Arithmetic arithmetic) {
  const auto add = [&](int64_t i, float chain) {
    return std::fma(taken(a[i], arithmetic), taken(b[i * step], arithmetic), chain);
  };
  float total = 0;
  for (int64_t first = 0; first < length; first += 128) {
    const int64_t end = std::min(length, first + 128);
    float chain = 0;
    for (int64_t i = first; i < end; ++i) {
      if (arithmetic == Arithmetic::kFp32) {
        chain = add(i, chain);
      } else if (i % 2 == 0) {
        chain = add(i, i + 1 < end ? add(i + 1, chain) : chain);
      }
    }
    total += chain;
  }
  return total;
}

inline float tree_of(float* lanes, int count) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// The score of a row that reads the keys of its head alone: 16 sums, of every 16th column, or pair of columns in bf16.
inline float score_alone(const float* q, const float* k, int64_t depth, Arithmetic arithmetic) {
  const int64_t together = arithmetic == Arithmetic::kBf16 ? 2 : 1;
  const auto at = [&](const float* row, int64_t d) { return d < depth ? taken(row[d], arithmetic) : 0.0f; };
  float lanes[16] = {};
  for (int64_t first = 0; first < depth; first += 16 * together) {
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t d = first + (i + 1) * together - 1; d >= first + i * together; --d) {
        lanes[i] = std::fma(at(q, d), at(k, d), lanes[i]);
      }
    }
  }
  return tree_of(lanes, 16);
}

// Replaces a row's x by p. Returns the sum of p.
inline float soften_in_order(std::vector<float>& x, Arithmetic arithmetic) {
  const float most = *std::max_element(x.begin(), x.end());
  float lanes[32] = {};
  if (arithmetic == Arithmetic::kFp32) {
    for (size_t j = 0; j < x.size(); ++j) lanes[j % 32] += x[j] = exponential_in_order(x[j] - most);
    return tree_of(lanes, 32);
  }
  for (float& each : x) each = rough_exponential_in_order(each - most);
  for (size_t j = 0; j < x.size(); j += 2) {
    float& lane = lanes[j / 2 % 16];
    if (j + 1 < x.size()) lane += x[j + 1];
    lane += x[j];
  }
  return tree_of(lanes, 16);
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode.
__attribute__((noinline)) inline float attend_in_mode(const AttentionCase& c, const Attention& a, int64_t batch,
                                                      int64_t head, int64_t query, int64_t column) {
  const int64_t kv = head / c.shared;
  std::vector<float> x(c.keys);
  for (int64_t j = 0; j < c.keys; ++j) {
    const float* q = element(a.q, batch, head, query);
    const float* k = element(a.k, batch, kv, j);
    const bool alone = c.shared * c.queries == 1;
    const float score = alone ? score_alone(q, k, c.depth, c.arithmetic) : chained(q, k, 1, c.depth, c.arithmetic);
    const float added = c.masked ? element(a.mask, batch, head, query)[j * a.mask.column] : 0;
    x[j] = std::fma(score, a.scale, added);
  }
  const float sum = soften_in_order(x, c.arithmetic);
  const float total = chained(x.data(), element(a.v, batch, kv, 0) + column, a.v.row, c.keys, c.arithmetic);
  return std::fma(total, 1 / sum, 0.0f);
}

// Returns one element of y in the order of sums that attention.inl states. No operand may be NaN.
inline float attend_in_order(const AttentionCase& c, const Attention& a, int64_t batch, int64_t head, int64_t query,
                             int64_t column) {
  const RoundingMode mode(c.arithmetic);
  return attend_in_mode(c, a, batch, head, query, column);
}

}  // namespace bf16kit
