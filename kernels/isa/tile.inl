// A tile: some rows of x times one chain's rows of a panel. Each isa/*.cpp includes this file in its own namespace, after its
// struct Simd. So it is compiled once for each path, with that path's instructions.
//
// The order of summation is part of the interface. In fp32 every element of y is
//     total = 0;  for each 128 rows of the weight:  chain = 0;  for each row k:  chain = fma(x[k], w[k], chain);
//                                                   total += chain
//     y = activation(total + bias)
// whatever the number of rows, their batch, the number of threads, and the path (except the portable one, which may lack
// fma). In bf16, x is rounded first. The rows of a chain are added in pairs, the odd one first, as vdpbf16ps does:
//     for k = 0, 2, 4, ...:  chain = fma(x[k + 1], w[k + 1], chain);  chain = fma(x[k], w[k], chain)
// (the first only if row k + 1 exists). In bf16, subnormal operands and results are zero.
// Chains of 128 bound the error by (128 + K/128) unit roundoffs of sum |x||w|; for one chain of length K it would be K.
//
// Simd has: reg, kLanes, kRows, kWideRows, kTwoPanelRows, zero, broadcast, load, store, add, fma, unpack, interleave. unpack
// reads 2 * kLanes bf16 of one row as two vectors, the even and the odd columns. That takes a shift and a mask; columns in
// order would need a shuffle for each load. interleave puts the sums back in order, once for each tile.
//
// A path whose instructions take one lane of a vector as a factor of all lanes has its own specialisations of Terms.

#include "operands.inl"

constexpr int kWide = kPanel / (2 * Simd::kLanes);  // pairs of vectors in a row of a panel

template <int kRows, int kPairs>
using Sums = typename Simd::reg[kRows][kPairs][2];

// Rounds `value` to bf16: to nearest, ties to even. A subnormal becomes zero, a NaN a quiet NaN.
inline float rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  bits = magnitude > 0x7f800000 ? bits | 0x00400000 : magnitude < 0x00800000 ? bits & 0x80000000 : nearest;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The operands of a step, which is one row of the weight, and what it adds to the sums of a row of x.
template <Arithmetic kArithmetic>
struct Broadcasts {
  using Element = float;            // of a row of x
  static constexpr int kSteps = 1;  // the steps for which X holds x
  using X = typename Simd::reg;
  struct W {
    typename Simd::reg even, odd;
  };

  // Copies `length` values of x; in bf16 they are rounded.
  static void copy(const float* from, int64_t length, float* to) {
    if constexpr (kArithmetic == Arithmetic::kFp32) {
      std::memcpy(to, from, sizeof(float) * length);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i] = rounded(from[i]);
    }
  }
  static X broadcast(const float* x) { return Simd::broadcast(x); }  // for one step, the first
  static W unpack(const uint16_t* w) {
    W columns;
    Simd::unpack(w, columns.even, columns.odd);
    return columns;
  }
  template <int kStep>
  static void add(X x, const W& w, typename Simd::reg (&sums)[2]) {
    sums[0] = Simd::fma(x, w.even, sums[0]);
    sums[1] = Simd::fma(x, w.odd, sums[1]);
  }
};

template <Arithmetic kArithmetic>
struct Terms : Broadcasts<kArithmetic> {};

template <int... kSteps, typename Step>
void for_each(std::integer_sequence<int, kSteps...>, const Step& step) {
  (step(std::integral_constant<int, kSteps>()), ...);
}

// total[q, kRows, 32] += a[kRows, length] · w for the panels q that the tile spans. The rows of a are `lda` apart. The columns
// of total stay in the order of unpack.
template <Arithmetic kArithmetic, int kRows, int kPairs>
void chain(const typename Terms<kArithmetic>::Element* a, int64_t lda, const Block& block, float* total, const Ahead& ahead) {
  using T = Terms<kArithmetic>;
  constexpr int kPanels = kPairs > kWide ? kPairs / kWide : 1;
  constexpr bool kOddFirst = kArithmetic == Arithmetic::kBf16;
  Sums<kRows, kPairs> sums;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) sums[m][p][0] = sums[m][p][1] = Simd::zero();
  }
  // One pointer for three rows: x86 can address no more with one stride register.
  const typename T::Element* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const uint16_t* const w = block.w;
  const int64_t next_panel = block.next_panel;
  const char* const next = ahead.from;
  const int stride = ahead.stride, length = block.length;
  // One row k of the weight; x(m) returns the operand of row m, for this and later rows of the weight.
  const auto step = [&](int k, auto at, const auto& x) __attribute__((always_inline)) {
    typename T::W b[kPairs];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      b[p] = T::unpack(w + p / kWide * next_panel + k * kPanel + p % kWide * 2 * Simd::kLanes);
    }
#pragma GCC unroll 2
    for (int q = 0; q < kPanels; ++q) __builtin_prefetch(next + q * next_panel * 2 + k * stride);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename T::X row = x(m);
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) T::template add<at.value>(row, b[p], sums[m][p]);
    }
  };
  const auto alone = [&](int k) __attribute__((always_inline)) {
    step(k, std::integral_constant<int, 0>(), [&](int m) { return T::broadcast(from[m / 3] + m % 3 * lda + k); });
  };
  int k = 0;
  if constexpr (T::kSteps > 1) {
    for (; k + T::kSteps <= length; k += T::kSteps) {
      typename T::X x[kRows];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) x[m] = T::load(from[m / 3] + m % 3 * lda + k);
      for_each(std::make_integer_sequence<int, T::kSteps>(), [&](auto i) __attribute__((always_inline)) {
        constexpr int at = i.value ^ (kOddFirst ? 1 : 0);
        step(k + at, std::integral_constant<int, at>(), [&](int m) { return x[m]; });
      });
    }
  }
  if constexpr (kOddFirst) {
    for (; k + 1 < length; k += 2) {
      alone(k + 1);
      alone(k);
    }
    if (length % 2 != 0) alone(length - 1);
  } else {
#pragma GCC unroll 2
    for (; k < length; ++k) alone(k);
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
using Chain = void (*)(const typename Terms<kArithmetic>::Element*, int64_t, const Block&, float*, const Ahead&);

// Returns the function for a tile of `rows` rows. Each number of rows has its own, so that no register is unused or spilled.
template <Arithmetic kArithmetic, int kPairs, int... kRows>
Chain<kArithmetic> chain_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr Chain<kArithmetic> kTable[] = {chain<kArithmetic, kRows + 1, kPairs>...};
  return kTable[rows - 1];
}

// The operations of a path that part.inl uses. A path with bf16 instructions has its own specialisation for bf16.
template <Arithmetic kArithmetic>
struct Tiles {
  using Element = typename Terms<kArithmetic>::Element;  // the type of x's rows when copied
  static constexpr int kValues = 1;    // values of x in an element
  static constexpr int kRows = Simd::kRows;
  // Up to this number of rows, one panel has too few sums to hide the latency of an addition, so tiles span two panels.
  static constexpr int kTwoPanelRows = Simd::kTwoPanelRows;

  static void copy(const float* from, int64_t length, Element* to) { Terms<kArithmetic>::copy(from, length, to); }

  static void add(int rows, int panels, const Element* a, int64_t lda, const Block& block, float* total,
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

  // Copies a row of `totals` to `row`, with its columns in order.
  static void in_order(const float* totals, float* row) {
    for (int p = 0; p < kWide; ++p) {
      const int at = p * 2 * Simd::kLanes;
      typename Simd::reg low, high;
      Simd::interleave(Simd::load(totals + at), Simd::load(totals + at + Simd::kLanes), low, high);
      Simd::store(row + at, low);
      Simd::store(row + at + Simd::kLanes, high);
    }
  }
};
