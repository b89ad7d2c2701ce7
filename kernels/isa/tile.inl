// A tile: some rows of x times one chain's rows of a panel. Included by each isa/*.cpp inside its own namespace, after
// the struct Simd of that set; what is here is therefore compiled once per path, with that path's instructions.
//
// The order of summation is part of the interface. In fp32 every element of y is
//     total = 0;  for each 128 rows of the weight:  chain = 0;  for each row k:  chain = fma(x[k], w[k], chain);
//                                                   total += chain
//     y = activation(total + bias)
// whatever the number of rows, the batch they came in, the number of threads, and the path (the portable one may lack
// fma). In bf16, x is rounded first and the rows of a chain come in pairs, the odd one first, as vdpbf16ps takes them:
//     for k = 0, 2, 4, ...:  chain = fma(x[k + 1], w[k + 1], chain);  chain = fma(x[k], w[k], chain)
// where there is a row k + 1. Subnormals are zero there, of operands and of results.
// Chains of 128 bound the error by (128 + K/128) unit roundoffs of sum |x||w|, where one chain of K has K.
//
// Simd has: reg, kLanes, kRows, kWideRows, kTwoPanelRows, zero, broadcast, load, store, add, fma, unpack. unpack reads
// 2 * kLanes bf16 of one row as two vectors, the even columns and the odd ones: a shift and a mask, where columns in
// order would need a shuffle for each load. interleave puts sums back in order, once for each tile.

#include "operands.inl"

constexpr int kWide = kPanel / (2 * Simd::kLanes);  // pairs of vectors in a row of a panel

template <int kRows, int kPairs>
using Sums = typename Simd::reg[kRows][kPairs][2];

// total[q, kRows, 32] += a[kRows, length] · w for the panels q that the tile spans, rows of a being `lda` apart; columns
// are left as unpack parts them.
template <Arithmetic kArithmetic, int kRows, int kPairs>
void chain(const float* a, int64_t lda, const Block& block, float* total, const Ahead& ahead) {
  constexpr int kPanels = kPairs > kWide ? kPairs / kWide : 1;
  Sums<kRows, kPairs> sums;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) sums[m][p][0] = sums[m][p][1] = Simd::zero();
  }
  // Three rows for each pointer: as many as one register of stride can address.
  const float* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const uint16_t* const w = block.w;
  const int64_t next_panel = block.next_panel;
  const char* const next = ahead.from;
  const int stride = ahead.stride, length = block.length;
  const auto step = [&](int k) __attribute__((always_inline)) {
    typename Simd::reg b[kPairs][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      Simd::unpack(w + p / kWide * next_panel + k * kPanel + p % kWide * 2 * Simd::kLanes, b[p][0], b[p][1]);
    }
#pragma GCC unroll 2
    for (int q = 0; q < kPanels; ++q) __builtin_prefetch(next + q * next_panel * 2 + k * stride);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename Simd::reg x = Simd::broadcast(from[m / 3] + m % 3 * lda + k);
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) {
        sums[m][p][0] = Simd::fma(x, b[p][0], sums[m][p][0]);
        sums[m][p][1] = Simd::fma(x, b[p][1], sums[m][p][1]);
      }
    }
  };
  if constexpr (kArithmetic == Arithmetic::kFp32) {
#pragma GCC unroll 2
    for (int k = 0; k < length; ++k) step(k);
  } else {
    for (int k = 0; k + 1 < length; k += 2) {
      step(k + 1);
      step(k);
    }
    if (length % 2 != 0) step(length - 1);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* to = total + (p / kWide * kRows + m) * kPanel + (2 * (p % kWide) + h) * Simd::kLanes;
        Simd::store(to, Simd::add(block.first ? Simd::zero() : Simd::load(to), sums[m][p][h]));
      }
    }
  }
}

template <Arithmetic kArithmetic>
using Chain = void (*)(const float*, int64_t, const Block&, float*, const Ahead&);

// As many rows in a tile as leave no register unused and none spilled.
template <Arithmetic kArithmetic, int kPairs, int... kRows>
Chain<kArithmetic> chain_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr Chain<kArithmetic> kTable[] = {chain<kArithmetic, kRows + 1, kPairs>...};
  return kTable[rows - 1];
}

// What a path computes of a part; part.inl is written against this. One that has instructions of its own for bf16
// brings its own for that.
template <Arithmetic kArithmetic>
struct Tiles {
  using Element = float;               // of the rows of x, as they are copied
  static constexpr int kValues = 1;    // of x in an element
  static constexpr int kRows = Simd::kRows;
  // Rows whose sums are too few to hide how long an addition takes: such tiles span two panels.
  static constexpr int kTwoPanelRows = Simd::kTwoPanelRows;

  // Copies `length` values of x.
  static void copy(const float* from, int64_t length, float* to) {
    if constexpr (kArithmetic == Arithmetic::kFp32) {
      std::memcpy(to, from, sizeof(float) * length);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i] = rounded(from[i]);
    }
  }

  static void add(int rows, int panels, const float* a, int64_t lda, const Block& block, float* total,
                  const Ahead& ahead) {
    if (panels > 1) {
      using Few = std::make_integer_sequence<int, kTwoPanelRows>;
      return chain_of<kArithmetic, 2 * kWide>(rows, Few())(a, lda, block, total, ahead);
    }
    if (rows <= Simd::kWideRows) {
      using All = std::make_integer_sequence<int, Simd::kWideRows>;
      return chain_of<kArithmetic, kWide>(rows, All())(a, lda, block, total, ahead);
    }
    if constexpr (kWide > 1) {
      using All = std::make_integer_sequence<int, Simd::kRows>;
      const Chain<kArithmetic> half = chain_of<kArithmetic, 1>(rows, All());
      Block part = block;
      Ahead share = {ahead.from, ahead.stride / kWide};
      for (int p = 0; p < kWide; ++p) {
        half(a, lda, part, total + p * 2 * Simd::kLanes, share);
        part.w += 2 * Simd::kLanes;
        share.from += kChain * share.stride;
      }
    }
  }

  // The columns of a row of `totals` in their order.
  static void in_order(const float* totals, float* row) {
    for (int p = 0; p < kWide; ++p) {
      const int at = p * 2 * Simd::kLanes;
      typename Simd::reg low, high;
      Simd::interleave(Simd::load(totals + at), Simd::load(totals + at + Simd::kLanes), low, high);
      Simd::store(row + at, low);
      Simd::store(row + at + Simd::kLanes, high);
    }
  }

  // `value` as bf16: to nearest, ties to even; a subnormal is zero, NaN a quiet NaN.
  static float rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    bits = magnitude > 0x7f800000 ? bits | 0x00400000 : magnitude < 0x00800000 ? bits & 0x80000000 : nearest;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};
