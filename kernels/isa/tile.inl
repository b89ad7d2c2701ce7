// A tile: some rows of x times one chain's rows of a panel; in attention, rows of q or p times packed k or v. Each isa/*.cpp
// includes this file in its own namespace, after its struct Simd. So it is compiled once for each path, with that path's
// instructions.
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
// A path with other instructions for a step has its own specialisations of Terms: lanes as factors (neon.cpp), products of bf16
// (neon_bf16.cpp, dots.inl).

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "unpack and read_lanes take pairs as one number");
constexpr int kWide = kPanel / (2 * Simd::kLanes);  // pairs of vectors in a row of a panel

// What a tile multiplies by: one chain's rows of one panel of the weight, or of two; in attention, rows of packed operands.
template <typename Row>
struct BlockOf {
  const Row* w;         // [length, 2 * kPairs * kLanes], rows `stride` apart
  int64_t stride;
  int64_t next_panel;   // elements from one panel to the next, if a tile spans two
  int length;           // rows
  bool first;           // whether this is the first block of its columns: the totals start at zero
  float* wide = nullptr;  // [length, kPanel], where the block's first tile leaves it in fp32 for the others; null: nowhere
  bool widened = false;   // whether it has
};
using Block = BlockOf<uint16_t>;

// The memory to prefetch: `stride` bytes of it with every row.
struct Ahead {
  const char* from;
  int stride;
};

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

// The same for each value of a vector.
inline Simd::reg rounded(Simd::reg value) {
  using Bits = uint32_t __attribute__((vector_size(sizeof(Simd::reg))));
  using Signed = int32_t __attribute__((vector_size(sizeof(Simd::reg))));
  const Bits bits = Bits(value), nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  const Signed magnitude = Signed(bits & 0x7fffffff);
  return Simd::reg(magnitude > 0x7f800000 ? bits | 0x00400000 : magnitude < 0x00800000 ? bits & 0x80000000 : nearest);
}

// The operands of a step, and what it adds to the sums of a row of x.
template <Arithmetic kArithmetic>
struct Broadcasts {
  using Element = float;                // of a row of x
  static constexpr int kValues = 1;     // of x in an element
  using Row = uint16_t;                 // element of a row of the weight
  static constexpr int kRowsAStep = 1;  // rows of the weight that a step takes
  static constexpr int kSteps = 1;      // the steps for which load() reads x
  static constexpr int kVectors = 2;    // of W, and of sums for each row of x
  static constexpr bool kOddFirst = kArithmetic == Arithmetic::kBf16;
  static constexpr bool kStores = false;  // whether the tile stores its W for others
  static constexpr bool kOfPanels = true;  // rows are kPanel apart, and what follows them is prefetched
  // Up to this number of rows, one panel has too few sums to hide the latency of an addition, so tiles span two panels.
  static constexpr int kTwoPanelRows = Simd::kTwoPanelRows;
  using X = typename Simd::reg;
  struct W {
    typename Simd::reg even, odd;
  };

  // Copies `length` values of x, which may stay where they are; in bf16 they are rounded.
  static void copy(const float* from, int64_t length, float* to) {
    if constexpr (kArithmetic == Arithmetic::kFp32) {
      std::memcpy(to, from, sizeof(float) * length);
    } else {
      int64_t i = 0;
      for (; i + Simd::kLanes <= length; i += Simd::kLanes) Simd::store(to + i, rounded(Simd::load(from + i)));
      for (; i < length; ++i) to[i] = rounded(from[i]);
    }
  }
  static X broadcast(const float* x) { return Simd::broadcast(x); }  // for one step, the first
  // Reads a step's rows of the weight; unless `whole`, only the first is there.
  static W read(const uint16_t* w, int64_t, bool) {
    W columns;
    Simd::unpack(w, columns.even, columns.odd);
    return columns;
  }
  template <int kStep>
  static void add(X x, const W& w, typename Simd::reg (&sums)[2]) {
    sums[0] = Simd::fma(x, w.even, sums[0]);
    sums[1] = Simd::fma(x, w.odd, sums[1]);
  }
  static void interleave(Simd::reg even, Simd::reg odd, Simd::reg& low, Simd::reg& high) {
    Simd::interleave(even, odd, low, high);
  }
};

template <Arithmetic kArithmetic>
struct Terms : Broadcasts<kArithmetic> {};

// Terms of a block's first tile, which stores what it reads in fp32, and of the others, which read that.
template <Arithmetic kArithmetic>
struct Widening : Broadcasts<kArithmetic> {
  static constexpr bool kStores = true;
};
template <Arithmetic kArithmetic>
struct Widened : Broadcasts<kArithmetic> {
  using Row = float;
  using W = typename Broadcasts<kArithmetic>::W;
  static W read(const float* w, int64_t, bool) { return {Simd::load(w), Simd::load(w + Simd::kLanes)}; }
};

// Terms for the first kLanes columns of a panel, in order. Only for paths where a panel is two vectors: kHalves.
template <Arithmetic kArithmetic>
struct Half;

template <int... kSteps, typename Step>
void for_each(std::integer_sequence<int, kSteps...>, const Step& step) {
  (step(std::integral_constant<int, kSteps>()), ...);
}

// total[q, kRows, 2 * kPairs vectors] += a[kRows, length] · w for the panels q that the tile spans. The rows of a are `lda` apart,
// those of total `ldt`. The columns of total stay in the order of T::read.
template <typename T, int kRows, int kPairs>
void chain(const typename T::Element* a, int64_t lda, const BlockOf<typename T::Row>& block, float* total, int64_t ldt,
           const Ahead& ahead) {
  constexpr int kPanels = kPairs > kWide ? kPairs / kWide : 1;
  typename Simd::reg sums[kRows][kPairs][T::kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      for (auto& sum : sums[m][p]) sum = Simd::zero();
    }
  }
  // One pointer for three rows: x86 can address no more with one stride register.
  const typename T::Element* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const typename T::Row* const w = block.w;
  float* const wide = block.wide;
  const int64_t next_panel = block.next_panel, ldw = T::kOfPanels ? kPanel : block.stride;
  const char* const next = ahead.from;
  const int stride = ahead.stride, length = block.length / T::kRowsAStep;
  // Step k; x(m) returns the operand of row m, for this and later steps.
  const auto step = [&](int k, bool whole, auto at, const auto& x) __attribute__((always_inline)) {
    typename T::W b[kPairs];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      b[p] = T::read(w + p / kWide * next_panel + k * T::kRowsAStep * ldw + p % kWide * 2 * Simd::kLanes, ldw, whole);
    }
    if constexpr (T::kStores) {  // kPairs is 1
      Simd::store(wide + k * kPanel, b[0].even);
      Simd::store(wide + k * kPanel + Simd::kLanes, b[0].odd);
    }
    if constexpr (T::kOfPanels) {
#pragma GCC unroll 4
      for (int i = 0; i < kPanels * T::kRowsAStep; ++i) {
        __builtin_prefetch(next + i / T::kRowsAStep * next_panel * 2 + (k * T::kRowsAStep + i % T::kRowsAStep) * stride);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename T::X row = x(m);
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) T::template add<at.value>(row, b[p], sums[m][p]);
    }
  };
  const auto alone = [&](int k, bool whole = true) __attribute__((always_inline)) {
    step(k, whole, std::integral_constant<int, 0>(), [&](int m) { return T::broadcast(from[m / 3] + m % 3 * lda + k); });
  };
  int k = 0;
  if constexpr (T::kSteps > 1) {
    for (; k + T::kSteps <= length; k += T::kSteps) {
      typename T::X x[kRows];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) x[m] = T::load(from[m / 3] + m % 3 * lda + k);
      for_each(std::make_integer_sequence<int, T::kSteps>(), [&](auto i) __attribute__((always_inline)) {
        constexpr int at = i.value ^ (T::kOddFirst ? 1 : 0);
        step(k + at, true, std::integral_constant<int, at>(), [&](int m) { return x[m]; });
      });
    }
  }
  if constexpr (T::kOddFirst) {
    for (; k + 1 < length; k += 2) {
      alone(k + 1);
      alone(k);
    }
    if (length % 2 != 0) alone(length - 1);
  } else {
#pragma GCC unroll 2
    for (; k < length; ++k) alone(k);
    if (block.length % T::kRowsAStep != 0) alone(length, false);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < T::kVectors; ++h) {
        float* to = total + (p / kWide * kRows + m) * ldt + (2 * (p % kWide) + h) * Simd::kLanes;
        Simd::store(to, Simd::add(block.first ? Simd::zero() : Simd::load(to), sums[m][p][h]));
      }
    }
  }
}

template <typename T>
using Chain = void (*)(const typename T::Element*, int64_t, const BlockOf<typename T::Row>&, float*, int64_t, const Ahead&);

// Returns the function for a tile of `rows` rows. Each number of rows has its own, so that no register is unused or spilled.
template <typename T, int kPairs, int... kRows>
Chain<T> chain_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr Chain<T> kTable[] = {chain<T, kRows + 1, kPairs>...};
  return kTable[rows - 1];
}

// The operations of a path that part.inl uses. amx.inl has its own for bf16.
template <Arithmetic kArithmetic>
struct Tiles : Terms<kArithmetic> {
  using T = Terms<kArithmetic>;
  static constexpr int kRows = Simd::kRows;
  static constexpr bool kWidens = kWide == 1 && T::kRowsAStep == 1;  // whether add() uses block.wide
  static constexpr bool kHalves = kWide == 1;  // whether add() leaves up to kLanes columns in order

  // Returns whether block.wide makes add() faster. Intel's processors widen in the units that multiply, and of a step's 26 such
  // instructions two widen. On Zen 4 other units do, and to store and read the block in fp32 costs more (docs/decisions/0092).
  static bool widens() {
#if defined(__x86_64__)
    return kWidens && __builtin_cpu_is("intel") != 0;
#else
    return false;
#endif
  }

  // Adds to the totals of one panel, which has `columns` columns, or of two if `columns` is more than kPanel. Totals of columns
  // that the panel does not have may stay unset.
  static void add(int rows, int64_t columns, const typename T::Element* a, int64_t lda, const Block& block, float* total,
                  const Ahead& ahead) {
    if (columns > kPanel) {
      using Few = std::make_integer_sequence<int, T::kTwoPanelRows>;
      return chain_of<T, 2 * kWide>(rows, Few())(a, lda, block, total, kPanel, ahead);
    }
    if constexpr (kHalves) {
      using All = std::make_integer_sequence<int, Simd::kRows>;
      if (columns <= Simd::kLanes) {
        return chain_of<Half<kArithmetic>, 1>(rows, All())(a, lda, block, total, kPanel, ahead);
      }
    }
    if constexpr (kWidens) {
      using All = std::make_integer_sequence<int, Simd::kRows>;
      if (block.widened) {
        const BlockOf<float> wide = {block.wide, kPanel, 0, block.length, block.first};
        return chain_of<Widened<kArithmetic>, 1>(rows, All())(a, lda, wide, total, kPanel, ahead);
      }
      if (block.wide != nullptr) {
        return chain_of<Widening<kArithmetic>, 1>(rows, All())(a, lda, block, total, kPanel, ahead);
      }
    }
    if (rows <= Simd::kWideRows) {
      using All = std::make_integer_sequence<int, Simd::kWideRows>;
      return chain_of<T, kWide>(rows, All())(a, lda, block, total, kPanel, ahead);
    }
    if constexpr (kWide > 1) {
      const Chain<T> half = chain_of<T, 1>(rows, std::make_integer_sequence<int, Simd::kRows>());
      Block part = block;
      Ahead share = {ahead.from, ahead.stride / kWide};
      for (int p = 0; p * 2 * Simd::kLanes < columns; ++p) {
        half(a, lda, part, total + p * 2 * Simd::kLanes, kPanel, share);
        part.w += 2 * Simd::kLanes;
        share.from += kChain * share.stride;
      }
    }
  }
};
