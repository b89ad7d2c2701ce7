// The operands of attention in bf16, for processors with dot products of bf16 pairs. isa/avx512_bf16.cpp includes it instead of
// heads.inl, which describes Heads.
//
// Pairs are formed along the depth of q and k, and along the keys of p and v. So packed operands are half as large as in fp32,
// and no product needs a shuffle.

#include "softmax.inl"

template <Arithmetic kArithmetic>
struct Heads;

template <>
struct Heads<Arithmetic::kBf16> : Terms<Arithmetic::kBf16> {
  using Row = Pairs16;
  using Vector = __m512i;
  static constexpr int kRowsAStep = 1;
  static constexpr bool kOfPanels = false, kValuesInPlace = false, kOneInPlace = true;

  // For one.inl.
  static constexpr int kStep = 32;
  using Lanes = __m512bh;
  static Lanes read_lanes(const float* step, int) {
    return _mm512_cvtne2ps_pbh(Simd::load(step + Simd::kLanes), Simd::load(step));
  }
  static Lanes read_rest(const float* step, int64_t left, int) {
    const uint32_t there = (uint32_t{1} << left) - 1;
    const auto low = static_cast<__mmask16>(there), high = static_cast<__mmask16>(there >> 16);
    return _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, step + Simd::kLanes), _mm512_maskz_loadu_ps(low, step));
  }
  static Lanes query_lanes(const Pairs16* step, int) { return (__m512bh)_mm512_loadu_si512(step); }
  static Simd::reg dot_lanes(Lanes q, Lanes k, Simd::reg sum) { return _mm512_dpbf16_ps(sum, q, k); }
  static Vector read_values(const float* from, int64_t stride, bool whole) {
    return pair_rows(from, stride, 0xffff, whole ? 0xffff : 0);
  }

  static W read(const Pairs16* w, int64_t, bool) { return {_mm512_loadu_si512(w), _mm512_loadu_si512(w + Simd::kLanes)}; }
  static Simd::reg dot(const Pairs16* x, Vector w, Simd::reg sum) { return avx512_bf16::dot(pair_of(x), w, sum); }

  static void copy_row(const float* from, int64_t length, Pairs16* to) { copy(from, length, to); }

  // Copies `count` rows of k, at most 32, to the columns of [pairs of depth, 32], padded with zeros on the right.
  static void pack_keys(const float* from, int64_t stride, int64_t count, int64_t depth, Pairs16* to) {
    constexpr int64_t kValuesAtOnce = 16, kPairsAtOnce = 8;
    if (count < kPanel) std::memset(to, 0, sizeof(Pairs16) * ((depth + 1) / 2) * kPanel);
    const int64_t whole_keys = count / 8 * 8, whole_depth = depth / kValuesAtOnce * kValuesAtOnce;
    for (int64_t key = 0; key < whole_keys; key += 8) {
      for (int64_t d = 0; d < whole_depth; d += kValuesAtOnce) {
        Pairs rows[8];
        for (int i = 0; i < 8; ++i) rows[i] = (Pairs)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + (key + i) * stride + d));
        transpose_pairs(rows);
        for (int i = 0; i < 8; ++i) {
          store_pairs(reinterpret_cast<uint16_t*>(to + (d / 2 + i) * kPanel + key), rows[i]);
        }
      }
    }
    for (int64_t key = 0; key < count; ++key) {
      for (int64_t d = key < whole_keys ? whole_depth : 0; d < depth; d += kValuesAtOnce) {
        const int64_t some = depth - d < kValuesAtOnce ? depth - d : kValuesAtOnce;
        Pairs16 pairs[kPairsAtOnce];
        copy_row(from + key * stride + d, some, pairs);
        for (int64_t i = 0; i < (some + 1) / 2; ++i) to[(d / 2 + i) * kPanel + key] = pairs[i];
      }
    }
  }

  // Copies up to 32 columns of v to [pairs of keys, 32], padded with zeros on the right.
  static void pack_values(const float* from, int64_t stride, int64_t keys, int64_t columns, Pairs16* to) {
    const __mmask32 there = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
    const __mmask16 left = static_cast<__mmask16>(there), right = static_cast<__mmask16>(there >> 16);
    for (int64_t key = 0; key < keys; key += 2, from += 2 * stride, to += kPanel) {
      const bool whole = key + 1 < keys;
      _mm512_storeu_si512(to, pair_rows(from, stride, left, whole ? left : 0));
      _mm512_storeu_si512(to + Simd::kLanes, pair_rows(from + Simd::kLanes, stride, right, whole ? right : 0));
    }
  }

  // Replaces a row's x by pairs of p in the order of keys, up to the end of the last panel. Returns the sum of p.
  static float soften(float* row, int64_t keys, float highest) {
    const Simd::reg most = Simd::set(highest);
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    Simd::reg sum = Simd::zero();
    for (int64_t key = 0; key < keys; key += kPanel) {
      const Simd::reg low = rough_exponential(Simd::sub(Simd::load(row + key), most));
      const Simd::reg high = rough_exponential(Simd::sub(Simd::load(row + key + Simd::kLanes), most));
      const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
      _mm512_storeu_si512(row + key / 2, (__m512i)pairs);
      sum = _mm512_dpbf16_ps(sum, pairs, ones);
    }
    alignas(64) float sums[Simd::kLanes];
    Simd::store(sums, sum);
    return tree(sums);
  }

 private:
  // Returns 16 columns of two successive rows of v as pairs. The masks `first` and `second` select the columns to read of each
  // row; the others become zero.
  static Vector pair_rows(const float* from, int64_t stride, __mmask16 first, __mmask16 second) {
    const __m512 even = _mm512_maskz_loadu_ps(first, from), odd = _mm512_maskz_loadu_ps(second, from + stride);
    return pair_halves((__m512i)_mm512_cvtne2ps_pbh(odd, even));
  }
};
