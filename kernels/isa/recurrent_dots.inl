// h and r for a step of a recurrence in pairs of bf16, for processors with dot products of them. Included after recurrent.inl.

template <>
struct Lanes<Arithmetic::kBf16> {
  using Element = Pairs16;
  using Vector = __m512i;
  static constexpr int kBlock = 16, kTurn = 16;

  static void copy(const float* from, int64_t length, Pairs16* to) {
    std::memset(to + length / 32 * kBlock, 0, length % 32 == 0 ? 0 : sizeof(Pairs16) * kBlock);
    Tiles<Arithmetic::kBf16>::copy(from, length, to);
  }
  static Vector load(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static Simd::reg add(const Pairs16* h, Vector r, Simd::reg sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(h), (__m512bh)r);
  }
};
