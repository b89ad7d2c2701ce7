// The products of attention: some rows times 32 columns, chain by chain. Included by attention.inl, which states the order of
// summation.

template <typename H>
using Element = typename H::Element;

constexpr int kSpan = 2 * Simd::kLanes;  // columns of a tile

// c[kRows, 2 vectors] = (first ? 0 : c) + a[kRows, length] · b[length, 2 vectors]. The rows are lda, ldb and ldc apart; length
// counts elements.
template <typename H, int kRows>
void wide_chain(const Element<H>* a, int64_t lda, const Element<H>* b, int64_t ldb, int64_t length, float* c,
                int64_t ldc, bool first) {
  typename Simd::reg sums[kRows][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) sums[m][0] = sums[m][1] = Simd::zero();
  const Element<H>* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    const typename H::Vector left = H::load(b + k * ldb), right = H::load(b + k * ldb + Simd::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Element<H>* x = from[m / 3] + m % 3 * lda + k;
      sums[m][0] = H::dot(x, left, sums[m][0]);
      sums[m][1] = H::dot(x, right, sums[m][1]);
    }
  };
  if constexpr (H::kOddFirst) {
    for (int64_t k = 0; k + 1 < length; k += 2) {
      step(k + 1);
      step(k);
    }
    if (length % 2 != 0) step(length - 1);
  } else {
#pragma GCC unroll 2
    for (int64_t k = 0; k < length; ++k) step(k);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* to = c + m * ldc + h * Simd::kLanes;
      Simd::store(to, Simd::add(first ? Simd::zero() : Simd::load(to), sums[m][h]));
    }
  }
}

template <typename H>
using WideChain = void (*)(const Element<H>*, int64_t, const Element<H>*, int64_t, int64_t, float*, int64_t, bool);

template <typename H, int... kRows>
WideChain<H> wide_chain_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr WideChain<H> kTable[] = {wide_chain<H, kRows + 1>...};
  return kTable[rows - 1];
}

// Returns the number of elements that hold `values` values.
template <typename H>
int64_t elements(int64_t values) {
  return (values + H::kValues - 1) / H::kValues;
}

// c[rows, columns] = a[rows, length] · b[length, columns]; a and b hold elements(length); columns is a multiple of 32. `skipped` zero terms before them are left out:
// the chains begin where they would with these terms.
template <typename H>
void multiply_wide(int64_t rows, const Element<H>* a, int64_t lda, const Element<H>* b, int64_t ldb, int64_t length,
                   float* c, int64_t ldc, int64_t columns = kPanel, int64_t skipped = 0) {
  const WideChain<H> chain = wide_chain_of<H>(rows, std::make_integer_sequence<int, Simd::kRows>());
  for (int64_t first = 0, next; first < length; first = next) {
    next = first + kChain - (skipped + first) % kChain;
    const int64_t some = elements<H>((length < next ? length : next) - first), at = first / H::kValues;
    for (int64_t column = 0; column < columns; column += kSpan) {
      chain(a + at, lda, b + at * ldb + column, ldb, some, c + column, ldc, first == 0);
    }
  }
}
