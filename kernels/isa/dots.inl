// A tile in bf16, for processors with dot products of bf16 pairs. isa/avx512_bf16.cpp includes it instead of tile.inl, which
// states the order of summation.
//
// A pair of neighbouring rows of a panel is read as two vectors of pairs along K. That takes two shuffles for up to 24 dot
// products, and leaves the columns in another order until the tile is finished. Panels stored as pairs of rows would need no
// shuffles, but were no faster (docs/decisions/0010).

using Pairs16 = uint32_t;  // two values of x as bf16, the even one in the low half

inline Simd::reg dot(Pairs16 const* x, __m512i w, Simd::reg sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(*x)), (__m512bh)w);
}

// total[q, kRows, 32] += a[kRows, length] · w for kPanels panels q. a holds pairs, its rows are `lda` pairs apart. The columns
// of total stay in the order of the shuffles.
template <int kRows, int kPanels>
void chain(const Pairs16* a, int64_t lda, const Block& block, float* total, const Ahead& ahead) {
  Simd::reg sums[kRows][kPanels][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int q = 0; q < kPanels; ++q) sums[m][q][0] = sums[m][q][1] = Simd::zero();
  }
  const Pairs16* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const int64_t next_panel = block.next_panel;
  const char* next = ahead.from;
  const int stride = ahead.stride;
  const uint16_t* w = block.w;
  const auto step = [&](int pair, bool whole) __attribute__((always_inline)) {
    __m512i b[kPanels][2];
#pragma GCC unroll 2
    for (int q = 0; q < kPanels; ++q) {
      const uint16_t* row = w + q * next_panel + pair * 2 * kPanel;
      const __m512i even = _mm512_loadu_si512(row);
      const __m512i odd = whole ? _mm512_loadu_si512(row + kPanel) : _mm512_setzero_si512();
      b[q][0] = _mm512_unpacklo_epi16(even, odd);
      b[q][1] = _mm512_unpackhi_epi16(even, odd);
      __builtin_prefetch(next + q * next_panel * 2 + 2 * pair * stride);
      __builtin_prefetch(next + q * next_panel * 2 + (2 * pair + 1) * stride);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Pairs16* x = from[m / 3] + m % 3 * lda + pair;
#pragma GCC unroll 2
      for (int q = 0; q < kPanels; ++q) {
        sums[m][q][0] = dot(x, b[q][0], sums[m][q][0]);
        sums[m][q][1] = dot(x, b[q][1], sums[m][q][1]);
      }
    }
  };
  const int pairs = block.length / 2;
#pragma GCC unroll 2
  for (int pair = 0; pair < pairs; ++pair) step(pair, true);
  if (block.length % 2 != 0) step(pairs, false);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int q = 0; q < kPanels; ++q) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* to = total + (q * kRows + m) * kPanel + h * Simd::kLanes;
        Simd::store(to, Simd::add(block.first ? Simd::zero() : Simd::load(to), sums[m][q][h]));
      }
    }
  }
}

using Chain = void (*)(const Pairs16*, int64_t, const Block&, float*, const Ahead&);

template <int kPanels, int... kRows>
Chain chain_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr Chain kTable[] = {chain<kRows + 1, kPanels>...};
  return kTable[rows - 1];
}

template <Arithmetic kArithmetic>
struct Tiles;

template <>
struct Tiles<Arithmetic::kBf16> {
  using Element = Pairs16;
  static constexpr int kValues = 2;
  static constexpr int kRows = 12;
  static constexpr int kTwoPanelRows = 3;

  // Rounds like vcvtneps2bf16: to nearest, ties to even; a subnormal becomes zero.
  static void copy(const float* from, int64_t length, Pairs16* to) {
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
    }
    if (i == length) return;
    const auto rest = static_cast<__mmask16>((1u << (length - i)) - 1);
    const auto last = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(rest, from + i));
    alignas(32) Pairs16 pairs[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), last);
    std::memcpy(to + i / 2, pairs, sizeof(Pairs16) * ((length - i + 1) / 2));
  }

  static void add(int rows, int panels, const Pairs16* a, int64_t lda, const Block& block, float* total,
                  const Ahead& ahead) {
    if (panels > 1) {
      chain_of<2>(rows, std::make_integer_sequence<int, kTwoPanelRows>())(a, lda, block, total, ahead);
    } else {
      chain_of<1>(rows, std::make_integer_sequence<int, kRows>())(a, lda, block, total, ahead);
    }
  }

  static void in_order(const float* totals, float* row) {
    // The shuffles worked on quarters of a vector: one sum has their low halves, the other their high halves.
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const Simd::reg a = Simd::load(totals), b = Simd::load(totals + Simd::kLanes);
    Simd::store(row, _mm512_permutex2var_ps(a, low, b));
    Simd::store(row + Simd::kLanes, _mm512_permutex2var_ps(a, high, b));
  }
};
