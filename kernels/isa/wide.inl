// The products of attention: some rows times 32 columns, chain by chain. Included by attention.inl, which states the order of
// summation.

template <typename H>
using Element = typename H::Element;

constexpr int kSpan = 2 * Simd::kLanes;  // columns of a tile

// Returns the number of elements that hold `values` values.
template <typename H>
int64_t elements(int64_t values) {
  return (values + H::kValues - 1) / H::kValues;
}

// c[rows, columns] = a[rows, length] · b[length, columns]; a and b hold elements(length); columns is a multiple of 32. `skipped`
// zero terms before them are left out: the chains begin where they would with these terms.
template <typename H>
void multiply_wide(int64_t rows, const Element<H>* a, int64_t lda, const Element<H>* b, int64_t ldb, int64_t length,
                   float* c, int64_t ldc, int64_t columns = kPanel, int64_t skipped = 0) {
  const Chain<H> add = chain_of<H, 1>(rows, std::make_integer_sequence<int, Simd::kRows>());
  for (int64_t first = 0, next; first < length; first = next) {
    next = first + kChain - (skipped + first) % kChain;
    const int64_t at = first / H::kValues;
    BlockOf<Element<H>> block = {b + at * ldb, ldb, 0, static_cast<int>(elements<H>((length < next ? length : next) - first)), first == 0};
    for (int64_t column = 0; column < columns; column += kSpan, block.w += kSpan) {
      add(a + at, lda, block, c + column, ldc, Ahead());
    }
  }
}
