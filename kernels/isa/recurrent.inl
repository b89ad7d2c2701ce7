// A step of a recurrence, for any instruction set. Each isa/*.cpp includes this file in its own namespace, after attention.inl.
//
// R is read as ONNX stores it, [gates * hidden, hidden]: a row holds what one unit of one gate is multiplied by, so each sum
// runs along a row. The order of sums is the same on all paths (except the portable one, which may lack fma). 16 sums take the
// pairs of h in turn, the odd one first, as vdpbf16ps does; h is padded with zeros to a multiple of 32:
//     for k = 2 * i, 2 * i + 32, …:  sum[i] = fma(h[k + 1], r[k + 1], sum[i]);  sum[i] = fma(h[k], r[k], sum[i])
// They are then added as a tree: sum[i] + sum[i + 8], and so on. In bf16, h is rounded first, and subnormal operands and
// results are zero.

constexpr int kPairs = kSums;  // pairs of h that are multiplied at once: one in each sum

// h and r in the format of a path's vectors. Element holds a part of a row of h, kBlock of them 32 values.
template <Arithmetic kArithmetic>
struct Lanes {
  using Element = float;
  static constexpr int kBlock = 2 * kPairs, kTurn = 2 * Simd::kLanes;
  struct Vector {
    Simd::reg even, odd;
  };

  // Copies a row of h, and pads it with zeros. Of each 2 * kLanes values, the even ones come first.
  static void copy(const float* from, int64_t length, float* to) {
    const auto put = [&](int64_t i, float value) __attribute__((always_inline)) {
      to[i / kTurn * kTurn + i % kTurn / 2 + i % 2 * Simd::kLanes] =
          kArithmetic == Arithmetic::kFp32 ? value : rounded(value);
    };
    int64_t i = 0;
    for (; i + kTurn <= length; i += kTurn) {
      for (int j = 0; j < kTurn; ++j) put(i + j, from[i + j]);
    }
    for (; i < length; ++i) put(i, from[i]);
    for (; i % kBlock != 0; ++i) put(i, 0);
  }
  static Vector load(const uint16_t* p) {
    Vector both;
    Simd::unpack(p, both.even, both.odd);
    return both;
  }
  static Simd::reg add(const float* h, const Vector& r, Simd::reg sum) {
    return Simd::fma(Simd::load(h), r.even, Simd::fma(Simd::load(h + Simd::kLanes), r.odd, sum));
  }
};

// Multiplies kRows rows of h, `stride` elements apart, by `columns` rows of r, at most kColumns; sums[row, unit, 16].
template <typename L, int kRows, int kColumns>
void dot_tile(const typename L::Element* h, int64_t stride, const uint16_t* r, int64_t length, int64_t columns, float* sums) {
  alignas(64) uint16_t last[kColumns][2 * kPairs] = {};
  const uint16_t* from[kColumns];
  const int64_t whole = length / (2 * kPairs) * (2 * kPairs), rest = length - whole;
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
    from[c] = r + (c < columns ? c : columns - 1) * length;  // a missing one repeats the last
    if (rest != 0) std::memcpy(last[c], from[c] + whole, sizeof(uint16_t) * rest);
  }
#pragma GCC unroll 4
  for (int turn = 0; turn < kVectorsOfSums; ++turn) {
    typename Simd::reg sum[kRows][kColumns];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sum[m][c] = Simd::zero();
    }
    const typename L::Element* values = h + turn * L::kTurn;
    const auto step = [&](int c, const uint16_t* weights) __attribute__((always_inline)) {
      const typename L::Vector w = L::load(weights + turn * 2 * Simd::kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[m][c] = L::add(values + m * stride, w, sum[m][c]);
    };
    for (int64_t k = 0; k < whole; k += 2 * kPairs, values += L::kBlock) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        __builtin_prefetch(from[c] + kColumns * length + k);
        step(c, from[c] + k);
      }
    }
    if (rest != 0) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) step(c, last[c]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) Simd::store(sums + (m * kUnits + c) * kPairs + turn * Simd::kLanes, sum[m][c]);
    }
  }
}

// Multiplies kRows rows of h by the rows of r of up to 16 units; sums[row, unit, 16].
template <typename L, int kRows>
void dot_rows(const typename L::Element* h, int64_t stride, const uint16_t* r, int64_t length, int64_t units, float* sums) {
  constexpr int kColumns = kRows * 8 <= Simd::kDots ? 8 : 4;
  for (int64_t c = 0; c < units; c += kColumns) {
    const int64_t some = units - c < kColumns ? units - c : kColumns;
    dot_tile<L, kRows, kColumns>(h, stride, r + c * length, length, some, sums + c * kPairs);
  }
}

template <typename L, int... kRows>
auto dot_rows_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr decltype(&dot_rows<L, 1>) kTable[] = {dot_rows<L, kRows + 1>...};
  return kTable[rows - 1];
}

// 1 / (1 + e^-x). Below -43 it stays at 2^-62.
inline Simd::reg sigmoid(Simd::reg x) {
  const Simd::reg within = Simd::max(Simd::set(-43.0f), Simd::min(Simd::set(100.0f), x));
  const Simd::reg raised = exp2_raised(within, Simd::set(-1.44269502f), within, Simd::set(-1.92596303e-08f));
  return Simd::div(Simd::set(1.0f), Simd::fma(raised, Simd::set(kLowered), Simd::set(1.0f)));
}

// tanh(x) = x * p(x^2) / q(x^2), with the coefficients of Eigen's ptanh; beyond its bound it is 1 or -1 in fp32.
inline Simd::reg hyperbolic_tangent(Simd::reg x) {
  const Simd::reg t = Simd::max(Simd::set(-7.90531111f), Simd::min(Simd::set(7.90531111f), x)), u = Simd::mul(t, t);
  Simd::reg p = Simd::set(-2.76076847742355e-16f);
  p = Simd::fma(p, u, Simd::set(2.00018790482477e-13f));
  p = Simd::fma(p, u, Simd::set(-8.60467152213735e-11f));
  p = Simd::fma(p, u, Simd::set(5.12229709037114e-08f));
  p = Simd::fma(p, u, Simd::set(1.48572235717979e-05f));
  p = Simd::fma(p, u, Simd::set(6.37261928875436e-04f));
  p = Simd::fma(p, u, Simd::set(4.89352455891786e-03f));
  Simd::reg q = Simd::set(1.19825839466702e-06f);
  q = Simd::fma(q, u, Simd::set(1.18534705686654e-04f));
  q = Simd::fma(q, u, Simd::set(2.26843463243900e-03f));
  q = Simd::fma(q, u, Simd::set(4.89352518554385e-03f));
  return Simd::div(Simd::mul(t, p), q);
}

// Computes the new state of `units` units of one row, at most 16, from its gates' sums [gates, 16].
inline void update_units(const Step& step, int64_t row, int64_t unit, int64_t units, const float* sums) {
  const bool lstm = step.cell == Cell::kLstm;
  const int count = gates(step.cell);
  const int64_t at = row * step.hidden + unit;
  alignas(64) float before[kUnits] = {}, h[kUnits], c[kUnits];
  copy_few((lstm ? step.c : step.h) + at, units, before);
  const float* g[kMostGates];  // of missing units: other numbers, whose results are not kept
  for (int i = 0; i < count; ++i) g[i] = step.inputs + (row * count + step.blocks[i]) * step.hidden + unit;
  for (int v = 0; v < kUnits; v += Simd::kLanes) {
    const auto gate = [&](int i) { return Simd::add(Simd::load(g[i] + v), Simd::load(sums + i * kUnits + v)); };
    const Simd::reg old = Simd::load(before + v);
    if (lstm) {
      const Simd::reg added = Simd::mul(sigmoid(gate(0)), hyperbolic_tangent(gate(3)));
      const Simd::reg cell = Simd::fma(sigmoid(gate(2)), old, added);
      Simd::store(c + v, cell);
      Simd::store(h + v, Simd::mul(sigmoid(gate(1)), hyperbolic_tangent(cell)));
    } else {
      const Simd::reg inner = Simd::add(Simd::load(sums + 2 * kUnits + v), Simd::load(step.reset_bias + unit + v));
      const Simd::reg next = hyperbolic_tangent(Simd::fma(sigmoid(gate(1)), inner, Simd::load(g[2] + v)));
      Simd::store(h + v, Simd::fma(sigmoid(gate(0)), Simd::sub(old, next), next));
    }
  }
  copy_few(h, units, step.y + at);
  if (lstm) copy_few(c, units, step.c + at);
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode that recur() sets.
template <Arithmetic kArithmetic>
__attribute__((noinline)) void recur_units(const Step& step) {
  using L = Lanes<kArithmetic>;
  constexpr int kMostRows = Simd::kDots / 4;
  const int count = gates(step.cell);
  auto* h = static_cast<typename L::Element*>(step.scratch);
  const int64_t stride = divide_up(step.hidden, 2 * kPairs) * L::kBlock;
  for (int64_t row = 0; row < step.rows; ++row) L::copy(step.h + row * step.hidden, step.hidden, h + row * stride);
  const int64_t tiles = divide_up(step.rows, kMostRows);
  alignas(64) float partial[kMostRows * kUnits * kPairs], sums[kMostRows * kMostGates * kUnits];
  for (int64_t unit = step.first_unit; unit < step.last_unit; unit += kUnits) {
    const int64_t units = step.last_unit - unit < kUnits ? step.last_unit - unit : kUnits;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = step.rows * tile / tiles, rows = step.rows * (tile + 1) / tiles - begin;
      const auto dot = dot_rows_of<L>(rows, std::make_integer_sequence<int, kMostRows>());
      for (int gate = 0; gate < count; ++gate) {
        const uint16_t* r = step.r + (step.blocks[gate] * step.hidden + unit) * step.hidden;
        dot(h + begin * stride, stride, r, step.hidden, units, partial);
        for (int64_t m = 0; m < rows; ++m) {
          for (int v = 0; v < kUnits; v += Simd::kLanes) {
            Simd::store(sums + (m * count + gate) * kUnits + v, fold_sums<1>(partial + (m * kUnits + v) * kPairs));
          }
        }
      }
      for (int64_t m = 0; m < rows; ++m) update_units(step, begin + m, unit, units, sums + m * count * kUnits);
    }
  }
}

template <Arithmetic kArithmetic>
void recur(const Step& step) {
  const RoundingMode mode(kArithmetic);
  recur_units<kArithmetic>(step);
}
