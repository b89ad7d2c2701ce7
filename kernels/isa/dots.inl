// The steps of a tile in bf16, for processors with dot products of bf16 pairs. isa/avx512_bf16.cpp includes it after tile.inl,
// which states the order of summation.
//
// A pair of neighbouring rows of a panel is read as two vectors of pairs along K. That takes two shuffles for up to 24 dot
// products, and leaves the columns in another order until the tile is finished. Panels stored as pairs of rows would need no
// shuffles, but were no faster (docs/decisions/0010).

using Pairs16 = uint32_t;  // two values of x as bf16, the even one in the low half

// Returns pairs of an element of the first half and one of the second.
inline __m512i pair_halves(__m512i both) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                         4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both);
}
inline __m512i pair_of(const Pairs16* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
inline Simd::reg dot(__m512i x, __m512i w, Simd::reg sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }

template <>
struct Terms<Arithmetic::kBf16> : Broadcasts<Arithmetic::kBf16> {
  using Element = Pairs16;
  static constexpr int kValues = 2, kRowsAStep = 2, kTwoPanelRows = 3;
  static constexpr bool kOddFirst = false;  // the instruction itself adds in that order
  using X = __m512i;
  struct W {
    __m512i low, high;  // the halves of each quarter of a row
  };

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

  static X broadcast(const Pairs16* x) { return pair_of(x); }
  static W read(const uint16_t* w, int64_t stride, bool whole) {
    const __m512i even = _mm512_loadu_si512(w);
    const __m512i odd = whole ? _mm512_loadu_si512(w + stride) : _mm512_setzero_si512();
    return {_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)};
  }
  template <int kStep>
  static void add(X x, const W& w, Simd::reg (&sums)[2]) {
    sums[0] = dot(x, w.low, sums[0]);
    sums[1] = dot(x, w.high, sums[1]);
  }
  static void interleave(Simd::reg a, Simd::reg b, Simd::reg& first, Simd::reg& second) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    first = _mm512_permutex2var_ps(a, low, b);
    second = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
  }
};

template <>
struct Half<Arithmetic::kBf16> : Terms<Arithmetic::kBf16> {
  static constexpr int kVectors = 1;
  using W = __m512i;
  static W read(const uint16_t* w, int64_t stride, bool whole) {
    const auto row = [](const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
    const __m512i even = _mm512_castsi256_si512(row(w));
    return pair_halves(_mm512_inserti64x4(even, whole ? row(w + stride) : _mm256_setzero_si256(), 1));
  }
  template <int kStep>
  static void add(X x, W w, Simd::reg (&sums)[1]) {
    sums[0] = dot(x, w, sums[0]);
  }
};
