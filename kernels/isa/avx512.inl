// AVX-512F: 16 lanes and 32 registers; a tile is 12 rows of a whole panel. Included by all paths with AVX-512F, each in its own
// namespace.
struct Simd {
  using reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 12;
  static constexpr int kWideRows = 12;
  static constexpr int kTwoPanelRows = 1;
  static constexpr int kDots = 24;  // sums of a recurrence that a tile holds in registers

  static reg zero() { return _mm512_setzero_ps(); }
  static reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, reg v) { _mm512_storeu_ps(p, v); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg fms(reg a, reg b, reg c) { return _mm512_fmsub_ps(a, b, c); }
  static reg set(float value) { return _mm512_set1_ps(value); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
  static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
  static reg abs(reg a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
  }
  static reg to_exponent(reg a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
  static void unpack(const uint16_t* p, reg& even, reg& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // 16 bf16 in order
  static reg widen(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void interleave(reg even, reg odd, reg& low, reg& high) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    low = _mm512_permutex2var_ps(even, first, odd);
    high = _mm512_permutex2var_ps(even, second, odd);
  }
};
